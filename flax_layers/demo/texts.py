"""Texts that a model is writing: what it has read of them, in dense caches or on pages."""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from flax_layers.models import Decoder
from flax_layers.nnx import DenseCache
from jflex.paged import PagedBatch, PagedCache, PagePool, token_requests

PAGE_SIZE = 16


class Texts(Protocol):
    """B texts, of which the model has read a number of bytes each. A pytree; `read` returns another.

    It runs under `jit`. Donate the texts, and their cache is updated in place.
    """

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int) -> Self:
        """Texts of which nothing has been read, with room for so many bytes each."""
        ...

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B 256"], Self]:
        """Reads on in each text, `counts` of the T bytes; also returns the logits of the byte after them.

        The count of a text is at least 1. The bytes beyond it are padding.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseTexts:
    """Each layer has a dense cache with a row for each text.

    Attributes:
        caches: One for each layer.
    """

    caches: tuple[DenseCache, ...]

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int) -> DenseTexts:
        """As `Texts.empty`."""
        return cls(model.init_caches(batch_size, max_length))

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B 256"], DenseTexts]:
        """As `Texts.read`: reads the padding, too, and then forgets it."""
        lengths = self.caches[0].lengths + counts
        logits, caches = model.decode(tokens, self.caches)
        last = jnp.take_along_axis(logits, (counts - 1)[:, None, None], axis=1)[:, 0]
        return last, DenseTexts(tuple(cache.with_lengths(lengths) for cache in caches))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedTexts:
    """All layers share one paged cache. Each text has pages enough for all of its bytes, from a pool.

    Attributes:
        cache: Of all layers.
        page_table: The pages of each text.
        lengths: How many bytes of each have been read.
    """

    cache: PagedCache
    page_table: Int32[Array, "B max_pages"]
    lengths: Int32[Array, " B"]

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int) -> PagedTexts:
        """As `Texts.empty`."""
        pages = -(-max_length // PAGE_SIZE)
        pool = PagePool(batch_size * pages + 1, PAGE_SIZE)
        table = np.array([pool.alloc(pages) for _ in range(batch_size)], np.int32)
        cache = model.init_paged_cache(pool.num_pages, PAGE_SIZE)
        return cls(cache, jnp.asarray(table), jnp.zeros(batch_size, jnp.int32))

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B 256"], PagedTexts]:
        """As `Texts.read`: packs the bytes of all texts, and leaves the padding at the end, where nothing reads it."""
        begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
        ends = begins + counts
        lengths = self.lengths + counts
        batch = PagedBatch(jnp.concatenate([begins[:1], ends]), lengths, self.page_table)
        text = token_requests(batch, tokens.size)
        packed = tokens[text, jnp.arange(tokens.size, dtype=jnp.int32) - begins[text]]
        logits, cache = model.decode_paged(packed, self.cache, batch)
        return logits[ends - 1], PagedTexts(cache, self.page_table, lengths)


KINDS: dict[str, type[DenseTexts] | type[PagedTexts]] = {"dense": DenseTexts, "paged": PagedTexts}
"""By the names of their caches."""
