"""Adapters of the GPU kernels."""
