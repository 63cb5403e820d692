"""Backward kernels for Hopper."""
