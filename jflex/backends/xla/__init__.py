"""The backend in plain JAX: blockwise, for any device."""
