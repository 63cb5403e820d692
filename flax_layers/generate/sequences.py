"""Sequences in dense or paged caches, with one interface."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from flax_layers.models import Decoder
from flax_layers.nnx import DenseCache
from jflex.paged import PagedBatch, PagedCache, PagePool, token_requests

PAGE_SIZE = 16
"""Pages of 16 and of 64 tokens decode within 1% of one another on an H200 (`benchmarks/results/h200/paged.json`)."""


class Sequences(Protocol):
    """B sequences, of which the model has read a number of tokens each. A pytree; `read` returns another.

    It runs under `jit`. Donate the sequences, and their cache is updated in place.
    """

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int) -> Self:
        """Empty sequences, with capacity for `max_length` tokens each."""
        ...

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """How many tokens of each have been read."""
        ...

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B V"], Self]:
        """Appends `counts` of the T tokens to each sequence; also returns the logits of the next token.

        The tokens beyond a count are padding. A sequence with a count of 0 stays as it is; its logits are arbitrary.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseSequences:
    """Each layer has a dense cache with a row for each sequence.

    Attributes:
        caches: One for each layer.
    """

    caches: tuple[DenseCache, ...]

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int) -> DenseSequences:
        """As `Sequences.empty`."""
        return cls(model.init_caches(batch_size, max_length))

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """As `Sequences.lengths`."""
        return self.caches[0].lengths

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B V"], DenseSequences]:
        """As `Sequences.read`: appends the padding, too, and then drops it."""
        lengths = self.lengths + counts
        hidden, caches = model.decode_hidden(tokens, self.caches)
        last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        return model.logits(last), DenseSequences(tuple(cache.with_lengths(lengths) for cache in caches))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedSequences:
    """All layers share one paged cache. Each sequence has pages enough for all of its tokens, from a pool.

    Attributes:
        cache: Of all layers.
        page_table: The pages of each sequence.
        lengths: How many tokens of each have been read.
    """

    cache: PagedCache
    page_table: Int32[Array, "B max_pages"]
    lengths: Int32[Array, " B"]

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int) -> PagedSequences:
        """As `Sequences.empty`."""
        page_size, pages = PAGE_SIZE, -(-max_length // PAGE_SIZE)
        if any(max_length <= limit < pages * page_size for limit in model.config.context_limits[:-1]):
            page_size = math.gcd(max_length, PAGE_SIZE)  # no room beyond the limit, for then LongRoPE would be another
            pages = max_length // page_size
        pool = PagePool(batch_size * pages + 1, page_size)
        table = np.array([pool.alloc(pages) for _ in range(batch_size)], np.int32)
        cache = model.init_paged_cache(pool.num_pages, page_size)
        return cls(cache, jnp.asarray(table), jnp.zeros(batch_size, jnp.int32))

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B V"], PagedSequences]:
        """As `Sequences.read`: packs the tokens of all; the padding stays unused at the end."""
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        begins, lengths = ends - counts, self.lengths + counts
        batch = PagedBatch(jnp.concatenate([begins[:1], ends]), lengths, self.page_table)
        row = token_requests(batch, tokens.size)
        packed = tokens[row, jnp.arange(tokens.size, dtype=jnp.int32) - begins[row]]
        hidden, cache = model.decode_paged_hidden(packed, self.cache, batch)
        return model.logits(hidden[ends - 1]), PagedSequences(cache, self.page_table, lengths)


KINDS: dict[str, type[DenseSequences] | type[PagedSequences]] = {"dense": DenseSequences, "paged": PagedSequences}
"""By the names of their caches."""
