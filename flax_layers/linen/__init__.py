"""Layers for Flax linen."""

from flax_layers.dense_cache import DenseCache
from flax_layers.linen.attention import FlexAttention
from flax_layers.linen.parameters import params_from_nnx, params_to_nnx

__all__ = ["DenseCache", "FlexAttention", "params_from_nnx", "params_to_nnx"]
