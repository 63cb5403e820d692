"""A byte-level decoder with learnable ALiBi slopes, written with `flax_layers.nnx.FlexAttention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.nnx import FlexAttention

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
        # Press et al. 2022, arXiv:2108.12409: a geometric sequence, here only where the slopes start.
        self.slopes = nnx.Param(2.0 ** (-8.0 * (jnp.arange(sizes.heads, dtype=jnp.float32) + 1) / sizes.heads))
        self.hidden_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.expand = nnx.Linear(sizes.width, 2 * hidden, use_bias=False, rngs=rngs)
        self.contract = nnx.Linear(hidden, sizes.width, use_bias=False, rngs=rngs)

    def alibi(self, score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The `score_mod`: a penalty that grows with the distance, by a learned slope for each head."""
        return score - self.slopes[h] * (q_idx - kv_idx).astype(score.dtype)

    def __call__(self, stream: Float[Array, "B T width"], block_mask: jflex.BlockMask) -> Float[Array, "B T width"]:
        """Returns the residual stream after this block."""
        stream += self.attention(self.attention_norm(stream), score_mod=self.alibi, block_mask=block_mask)
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
    documents = jnp.asarray(documents)  # of a numpy array, no element can be taken at a traced index

    def same_document_and_causal(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    rows, length = documents.shape
    return jflex.create_block_mask(same_document_and_causal, rows, None, length, length)


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
