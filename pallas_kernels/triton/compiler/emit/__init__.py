"""Source for official Triton, emitted from the jaxpr of a kernel."""
