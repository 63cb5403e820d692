"""Kernels for Hopper, through Pallas and Mosaic GPU."""
