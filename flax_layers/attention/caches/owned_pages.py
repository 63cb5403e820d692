"""Dense caches on pages: a row of the batch owns its pages for good, so that calls over them are paged ones."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Int32

from flax_layers.attention.caches.dense import check_room, checked_lengths
from jflex.paged import LatentCache, PagedCache, slots_of

PAGE_SIZE = 64  # keys that kernels read at once


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedPages:
    """Sequences of a batch on pages of their own, in order, from page 1 on: `DenseLatentCache` or `EightBitCache`."""

    pages: PagedCache | LatentCache
    lengths: Int32[Array, " B"]
    max_length: int = dataclasses.field(metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @property
    def table(self) -> Int32[Array, "B pages"]:
        """The pages of each sequence."""
        pages = -(-self.max_length // self.pages.page_size)
        return 1 + jnp.arange(self.batch_size * pages, dtype=jnp.int32).reshape(self.batch_size, pages)

    def with_lengths(self, lengths: Int32[Array, " B"] | list[int]) -> Self:
        """The cache with new lengths: drops tokens from the end of each sequence, as `DenseCache.with_lengths`.

        Example:
            >>> from flax_layers.nnx import EightBitCache
            >>> cache = EightBitCache.create(2, 8, num_kv_heads=1, head_dim=1, dtype=jnp.float8_e5m2)
            >>> cache.with_lengths([3, 5]).lengths.tolist()
            [3, 5]
        """
        return dataclasses.replace(self, lengths=checked_lengths(lengths, self.batch_size, self.max_length))

    def next_slots(self, tokens: int) -> Int32[Array, " N"]:
        """The slots of that many more tokens of each sequence, packed; -1, which is dropped, beyond `max_length`.

        Raises:
            ValueError: They do not fit, as far as lengths are known.

        Example:
            >>> from flax_layers.nnx import EightBitCache
            >>> cache = EightBitCache.create(2, 8, num_kv_heads=1, head_dim=1, dtype=jnp.int8).with_lengths([3, 5])
            >>> cache.next_slots(2).tolist()
            [11, 12, 21, 22]
        """
        check_room(self.lengths, self.max_length, tokens)
        at = self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        return jnp.where(at < self.max_length, slots_of(self.table, at, self.pages.page_size), -1).reshape(-1)


def sizes_of_pages(batch_size: int, max_length: int) -> tuple[int, int]:
    """Pages, page 0 included, and the size of a page, for so many sequences of so many tokens.

    Example:
        >>> sizes_of_pages(2, 100), sizes_of_pages(2, 8)
        ((5, 64), (3, 8))
    """
    page_size = min(PAGE_SIZE, max_length)
    return 1 + batch_size * -(-max_length // page_size), page_size
