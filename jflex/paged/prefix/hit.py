"""Locked prefixes of a `PrefixCache`, and its statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from jflex.paged.prefix.tree import Node


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixHit:
    """A cached prefix and one lock on it, from `PrefixCache.match`, `lock` or `insert`. Each hit is unlocked once.

    The pages are those of the cache: they are full, are not written again, and are not released to the pool. A request
    puts them in front of its own pages in the page table.

    Attributes:
      pages: The pages of the prefix, in the order of its tokens.
      num_tokens: Its length, a multiple of the page size.
      namespace: The namespace that it is in.

    >>> from jflex.paged import PagePool, PrefixCache
    >>> PrefixCache(PagePool(8, 16)).match(range(40))
    PrefixHit(pages=(), num_tokens=0, namespace=None)
    """

    pages: tuple[int, ...]
    num_tokens: int
    namespace: Hashable
    _node: Node = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class PrefixStats:
    """Counts of a `PrefixCache` since it was created.

    Attributes:
      lookups: Calls of `match`.
      hits: Lookups that matched at least one page.
      tokens: Tokens that calls of `match` were given.
      hit_tokens: Tokens that they found.
      inserted_pages: Pages that `insert` added to the cache.
      duplicate_pages: Pages that `insert` released, because their tokens were cached on other pages.
      evicted_pages: Pages that `evict` and `alloc` removed. Those of `clear` and `reset` are not counted.

    >>> PrefixStats(lookups=2, hits=1, tokens=100, hit_tokens=48).hit_rate
    0.48
    """

    lookups: int = 0
    hits: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """`hit_tokens` of `tokens`; 0 before the first token."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def plus(stats: PrefixStats, **counts: int) -> PrefixStats:
    """Statistics in which some counts are increased."""
    return dataclasses.replace(stats, **{name: getattr(stats, name) + count for name, count in counts.items()})
