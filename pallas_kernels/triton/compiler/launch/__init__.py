"""Launchers of kernels that official Triton compiled."""
