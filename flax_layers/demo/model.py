"""A byte-level decoder with learnable ALiBi slopes, written with `flax_layers.nnx.FlexAttention`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.nnx import DenseCache, FlexAttention
from jflex.masks import causal, document
from jflex.paged import PagedBatch, PagedCache
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
        attended = self.attention(self.attention_norm(stream), score_mod=alibi(self.slopes[...]), block_mask=block_mask)
        return self._feed_forward(stream + attended)

    def decode(
        self, stream: Float[Array, "B T width"], cache: DenseCache
    ) -> tuple[Float[Array, "B T width"], DenseCache]:
        """Returns the residual stream of the next tokens of each sequence, and the cache with them."""
        attended, cache = self.attention.decode(self.attention_norm(stream), cache, **self._decoding_mods())
        return self._feed_forward(stream + attended), cache

    def decode_paged(
        self, stream: Float[Array, "N width"], cache: PagedCache, batch: PagedBatch, layer: int
    ) -> tuple[Float[Array, "N width"], PagedCache]:
        """Returns the residual stream of packed tokens, and the cache with them as this layer."""
        attended, cache = self.attention.decode_paged(
            self.attention_norm(stream), cache, batch, layer=layer, **self._decoding_mods()
        )
        return self._feed_forward(stream + attended), cache

    def _decoding_mods(self) -> dict[str, Any]:
        """Those of training, where a sequence is one document."""
        return {"score_mod": alibi(self.slopes[...]), "mask_mod": causal()}

    def _feed_forward(self, stream: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
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

    def init_caches(self, batch_size: int, max_length: int) -> tuple[DenseCache, ...]:
        """Dense caches of empty sequences, one for each layer, for `decode`."""
        return tuple(block.attention.init_cache(batch_size, max_length) for block in self.blocks)

    def decode(
        self, tokens: Int[Array, "B T"], caches: tuple[DenseCache, ...]
    ) -> tuple[Float[Array, "B T 256"], tuple[DenseCache, ...]]:
        """Continues sequences, each of one document, by T bytes.

        Args:
            tokens: The next bytes of each.
            caches: Of `init_caches`, or what the last call returned.

        Returns:
            The logits of the byte after each of them, and the caches with them.
        """
        stream, written = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            stream, cache = block.decode(stream, cache)
            written.append(cache)
        return self.head(self.norm(stream)), tuple(written)

    def init_paged_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """A paged cache that all layers share, for `decode_paged`."""
        return self.blocks[0].attention.init_paged_cache(num_pages, page_size, layers=len(self.blocks))

    def decode_paged(
        self, tokens: Int[Array, " N"], cache: PagedCache, batch: PagedBatch
    ) -> tuple[Float[Array, "N 256"], PagedCache]:
        """Continues requests, each of one document, by as many bytes as each has in `tokens`.

        Args:
            tokens: The next bytes of all requests, packed.
            cache: Of `init_paged_cache`, or what the last call returned.
            batch: Which bytes are whose, and on which pages their keys are.

        Returns:
            The logits of the byte after each of them, and the cache with them.
        """
        stream = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            stream, cache = block.decode_paged(stream, cache, batch, layer)
        return self.head(self.norm(stream)), cache


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
