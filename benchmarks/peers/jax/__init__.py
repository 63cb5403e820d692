"""The JAX peers."""
