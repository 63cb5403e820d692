"""Plans of the Hopper kernels: limits, costs, tile rules."""
