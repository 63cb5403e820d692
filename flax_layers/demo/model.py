"""A byte-level decoder with learnable ALiBi slopes, written with `flax_layers.nnx.FlexAttention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.nnx import FlexAttention
from jflex.masks import causal, document
from jflex.scores import alibi, alibi_slopes

VOCABULARY = 256

Packed = Int[Array | np.ndarray, "B T"]
"""Bytes, or the numbers of their documents, at each place of each row."""


class Sizes(NamedTuple):
    """Sizes of the model."""

    width: int
    layers: int
    heads: int
    kv_heads: int


class Block(nnx.Module):
    """Attention and a gated feed-forward layer, each added to the residual stream."""

    def __init__(self, sizes: Sizes, implementation: str | None, *, rngs: nnx.Rngs):
        hidden = 2 * sizes.width
        self.attention_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.attention = FlexAttention(
            sizes.width,
            sizes.heads,
            num_kv_heads=sizes.kv_heads,
            qk_norm=True,
            implementation=implementation,
            rngs=rngs,
        )
        self.slopes = nnx.Param(alibi_slopes(sizes.heads))  # where they start; the score_mod captures them
        self.hidden_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.expand = nnx.Linear(sizes.width, 2 * hidden, use_bias=False, rngs=rngs)
        self.contract = nnx.Linear(hidden, sizes.width, use_bias=False, rngs=rngs)

    def __call__(self, stream: Float[Array, "B T width"], block_mask: jflex.BlockMask) -> Float[Array, "B T width"]:
        """Returns the residual stream after this block."""
        stream += self.attention(self.attention_norm(stream), score_mod=alibi(self.slopes[...]), block_mask=block_mask)
        gate, value = jnp.split(self.expand(self.hidden_norm(stream)), 2, axis=-1)
        return stream + self.contract(nnx.silu(gate) * value)


class ByteDecoder(nnx.Module):
    """Predicts each byte from the bytes before it in the same document."""

    def __init__(self, sizes: Sizes, implementation: str | None = None, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, sizes.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = nnx.List([Block(sizes, implementation, rngs=rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Packed, documents: Packed) -> Float[Array, "B T 256"]:
        """Returns the logits of the byte after each position."""
        block_mask = document_mask(documents)
        stream = self.embed(jnp.asarray(tokens))
        for block in self.blocks:
            stream = block(stream, block_mask)
        return self.head(self.norm(stream))


def document_mask(documents: Packed) -> jflex.BlockMask:
    """Each position sees itself and what comes before it in its document.

    Args:
        documents: Number of the document at each place of each row. It may be a tracer: the boundaries are data, and
            new ones compile nothing.

    Returns:
        The mask of all rows, one batch entry each, for all heads.
    """
    rows, length = documents.shape
    mask_mod = jflex.and_masks(document(jnp.asarray(documents)), causal())
    return jflex.create_block_mask(mask_mod, rows, None, length, length)


def next_byte_loss(model: ByteDecoder, tokens: Packed, documents: Packed) -> Float[Array, ""]:
    """Mean cross entropy of the next byte, in nats, over the places whose next byte is of the same document.

    Args:
        model: The decoder.
        tokens: Packed bytes.
        documents: Number of the document at each place.

    Returns:
        The loss, float32.
    """
    logits = model(tokens, documents)[:, :-1].astype(jnp.float32)
    targets = tokens[:, 1:]
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(losses, where=documents[:, 1:] == documents[:, :-1])
