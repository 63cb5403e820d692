"""What JAX asks of an operation: custom_vjp, a primitive, partitioning, manual axes."""
