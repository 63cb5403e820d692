"""Kernels for few queries against many keys, with split-KV."""
