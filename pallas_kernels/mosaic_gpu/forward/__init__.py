"""The forward kernel for Hopper."""
