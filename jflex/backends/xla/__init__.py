"""The `xla` backend: blockwise attention in plain JAX, for any device."""
