"""Layers for Flax NNX."""

from flax_layers.dense_cache import DenseCache
from flax_layers.nnx.attention import FlexAttention

__all__ = ["DenseCache", "FlexAttention"]
