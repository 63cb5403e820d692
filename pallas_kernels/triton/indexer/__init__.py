"""Kernels of the lightning indexer: scores of keys, and the selection of the largest."""
