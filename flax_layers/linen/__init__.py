"""Layers for Flax linen."""

from flax_layers.attention_core import SharedPrefix
from flax_layers.dense_cache import DenseCache
from flax_layers.linen.attention import FlexAttention
from flax_layers.linen.parameters import params_from_nnx, params_to_nnx
from flax_layers.linen.rms_norm import RMSNorm

__all__ = ["DenseCache", "FlexAttention", "RMSNorm", "SharedPrefix", "params_from_nnx", "params_to_nnx"]
