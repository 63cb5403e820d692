"""Kernels through Pallas and Triton, for NVIDIA GPUs from Ampere on."""
