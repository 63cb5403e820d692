"""The kernel for few queries against keys and values, contiguous or in pages, for Hopper."""
