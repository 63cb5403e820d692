"""Layers for Flax linen."""

from flax_layers.attention.caches.dense import DenseCache
from flax_layers.attention.caches.owned_pages import DenseLatentCache, EightBitCache
from flax_layers.attention.core import SharedPrefix
from flax_layers.attention.selection import BlockSelection
from flax_layers.linen.attention import FlexAttention
from flax_layers.linen.latent_attention import MultiHeadLatentAttention
from flax_layers.linen.parameters import params_from_nnx, params_to_nnx
from flax_layers.linen.rms_norm import RMSNorm

__all__ = [
    "BlockSelection",
    "DenseCache",
    "DenseLatentCache",
    "EightBitCache",
    "FlexAttention",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "SharedPrefix",
    "params_from_nnx",
    "params_to_nnx",
]
