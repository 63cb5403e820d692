"""Backward kernels, through Pallas and Triton."""
