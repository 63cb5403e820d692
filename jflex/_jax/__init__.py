"""JAX's interfaces to an operation: custom_vjp, a primitive, partitioning, manual axes."""
