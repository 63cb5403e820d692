"""A byte-level decoder with learnable ALiBi slopes: a small `flax_layers.models.Decoder`."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

import jflex
from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.models.mods import mask_mod
from flax_layers.nnx import AlibiBias

VOCABULARY = 256
LONGEST = 1 << 20

Packed = Int[Array | np.ndarray, "B T"]
"""Bytes, or their document ids."""


class Sizes(NamedTuple):
    """Sizes of the model."""

    width: int
    layers: int
    heads: int
    kv_heads: int


class ByteDecoder(Decoder):
    """Predicts each byte from the bytes before it in the same document. ALiBi with learned slopes encodes positions.

    Args:
        sizes: Of the model.
        implementation: The backend of jflex.
        rngs: Source of the keys of the initializers.
    """

    def __init__(self, sizes: Sizes, implementation: str | None = None, *, rngs: nnx.Rngs):
        config = ModelConfig(
            vocabulary=VOCABULARY,
            width=sizes.width,
            mlp_width=2 * sizes.width,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.width // sizes.heads,
            layers=(LayerConfig(rotary_base=None),) * sizes.layers,
            max_positions=LONGEST,
            qk_norm=True,
            initializer_range=sizes.width**-0.5,
            embedding_scale=sizes.width**0.5,
        )
        slopes = functools.partial(AlibiBias, sizes.heads)
        super().__init__(config, score_mod=slopes, implementation=implementation, rngs=rngs)


def document_mask(documents: Packed) -> jflex.BlockMask:
    """The mask of the decoder: each byte attends to itself and to earlier bytes of its document.

    Args:
        documents: Document id of each byte. It may be a tracer: new document boundaries do not recompile.

    Returns:
        The mask of all rows, one batch entry each, for all heads.
    """
    rows, length = documents.shape
    return jflex.create_block_mask(mask_mod(None, jnp.asarray(documents)), rows, None, length, length)
