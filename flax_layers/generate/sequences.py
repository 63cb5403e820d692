"""B sequences and their cache, dense or paged: pytrees with one interface.

`read` runs under `jit` and returns new sequences. Donate the old ones to update the cache in place.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float, Int, Int32

from flax_layers.models import Decoder
from flax_layers.models.block import Pages
from flax_layers.models.decoder import Caches
from jflex.paged import PagedBatch, PagePool, token_requests

PAGE_SIZE = 16
"""Pages of 16 and of 64 tokens decode within 1% of one another on an H200 (`benchmarks/results/h200/paged.json`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseSequences:
    """Sequences in dense caches, with a row for each sequence.

    `lengths` is stored once, not in the `caches` of the layers: a loop over decoding steps would copy those of each
    layer, in a kernel for each.
    """

    caches: Caches
    lengths: Int32[Array, " B"]

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int, dtype: Dtype | None = None) -> DenseSequences:
        """Empty sequences, with capacity for `max_length` tokens each; `dtype` as for `Decoder.init_caches`."""
        caches = model.init_caches(batch_size, max_length, dtype=dtype)
        return cls(_with_lengths(caches, None), caches[0].lengths)

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B V"], DenseSequences]:
        """Appends the first `counts` of T tokens to each sequence, and returns the logits of the token after them.

        Tokens beyond a count are padding, which is appended as well, and then dropped. A sequence with a count of 0
        does not change, and its logits are arbitrary.
        """
        lengths = self.lengths + counts
        hidden, caches = model.decode_hidden(tokens, _with_lengths(self.caches, self.lengths))
        last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        return model.logits(last), DenseSequences(_with_lengths(caches, None), lengths)


def _with_lengths(caches: Caches, lengths: Int32[Array, " B"] | None) -> Caches:
    return tuple(dataclasses.replace(cache, lengths=lengths) for cache in caches)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedSequences:
    """Sequences in a paged cache, which all layers share. The pages of a sequence are allocated at the start."""

    cache: Pages
    page_table: Int32[Array, "B max_pages"]
    lengths: Int32[Array, " B"]

    @classmethod
    def empty(cls, model: Decoder, batch_size: int, max_length: int, dtype: Dtype | None = None) -> PagedSequences:
        """See `DenseSequences.empty`; `dtype` as for `Decoder.init_paged_cache`."""
        page_size, pages = PAGE_SIZE, -(-max_length // PAGE_SIZE)
        if any(max_length <= limit < pages * page_size for limit in model.config.context_limits[:-1]):
            page_size = math.gcd(max_length, PAGE_SIZE)  # a capacity beyond the limit selects other factors of LongRoPE
            pages = max_length // page_size
        pool = PagePool(batch_size * pages + 1, page_size)
        table = np.array([pool.alloc(pages) for _ in range(batch_size)], np.int32)
        cache = model.init_paged_cache(pool.num_pages, page_size, dtype=dtype)
        return cls(cache, jnp.asarray(table), jnp.zeros(batch_size, jnp.int32))

    def read(
        self, model: Decoder, tokens: Int[Array, "B T"], counts: Int32[Array, " B"]
    ) -> tuple[Float[Array, "B V"], PagedSequences]:
        """See `DenseSequences.read`. Packs the tokens of all sequences, with the padding at the end."""
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        begins, lengths = ends - counts, self.lengths + counts
        batch = PagedBatch(jnp.concatenate([begins[:1], ends]), lengths, self.page_table)
        row = token_requests(batch, tokens.size)
        packed = tokens[row, jnp.arange(tokens.size, dtype=jnp.int32) - begins[row]]
        hidden, cache = model.decode_paged_hidden(packed, self.cache, batch)
        return model.logits(hidden[ends - 1]), PagedSequences(cache, self.page_table, lengths)


Sequences = DenseSequences | PagedSequences

KINDS: dict[str, type[DenseSequences] | type[PagedSequences]] = {"dense": DenseSequences, "paged": PagedSequences}
"""The kinds of sequences, by the name of their cache."""
