"""Attention on GPUs: tile programs of traced mods, and the kernels that evaluate them."""
