"""Layers for Flax NNX."""

from flax_layers.attention_core import SharedPrefix
from flax_layers.dense_cache import DenseCache
from flax_layers.nnx.attention import FlexAttention
from flax_layers.nnx.biases import AlibiBias, RelativeBias
from flax_layers.nnx.rms_norm import RMSNorm

__all__ = ["AlibiBias", "DenseCache", "FlexAttention", "RMSNorm", "RelativeBias", "SharedPrefix"]
