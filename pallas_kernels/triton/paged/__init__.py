"""Kernels for packed queries against paged keys."""
