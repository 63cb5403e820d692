"""Layers for Flax NNX."""

from flax_layers.attention.caches.dense import DenseCache
from flax_layers.attention.caches.owned_pages import DenseLatentCache, EightBitCache
from flax_layers.attention.core import SharedPrefix
from flax_layers.attention.selection import BlockSelection
from flax_layers.nnx.attention import FlexAttention
from flax_layers.nnx.biases import AlibiBias, RelativeBias
from flax_layers.nnx.latent_attention import MultiHeadLatentAttention
from flax_layers.nnx.rms_norm import RMSNorm
from flax_layers.nnx.stored_mods import AttentionMask

__all__ = [
    "AlibiBias",
    "AttentionMask",
    "BlockSelection",
    "DenseCache",
    "DenseLatentCache",
    "EightBitCache",
    "FlexAttention",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "RelativeBias",
    "SharedPrefix",
]
