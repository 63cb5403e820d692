"""Plans of the Triton kernels: limits, costs, tiles."""
