"""Prefix caching: requests whose tokens begin alike share the pages of the common prefix.

After RadixAttention (Zheng et al., 2024, https://arxiv.org/abs/2312.07104, section 3): cached tokens are in a radix
tree, requests lock the paths that they use, and the least recently used leaves are evicted. Only whole pages are
shared. The last page of a request, if it is partly filled, stays its own.

Every page of the pool, page 0 left out, is in one of three states at a time:

  * free;
  * cached: in the tree. The cache is the only owner that the pool counts. Requests use the page under a lock and do not
    own it: they neither share nor release it;
  * in use: owned by requests, and not in the tree.

`insert` moves the ownership of a page from a request to the cache, and refuses pages that are cached already or have
several owners. So no page is counted twice: ``free + cached + in use == num_pages - 1``, which `PrefixCache.check`
verifies. The pages of a hit are those that a request does not own; the others in its page table are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from jflex._check.arguments import checked_size
from jflex.paged.errors import OutOfPages, PrefixLocked
from jflex.paged.pool import PagePool
from jflex.paged.prefix.checks import (
    Tokens,
    check_begin,
    check_owners,
    checked_hit,
    checked_namespace,
    checked_own_pages,
    checked_time,
    checked_tokens,
    next_time,
    whole_pages,
)
from jflex.paged.prefix.hit import PrefixHit, PrefixStats, plus
from jflex.paged.prefix.tree import Node, PrefixTree


class PrefixCache:
    """The prefixes of past and running requests, on pages of a `PagePool`: a radix tree for each namespace.

    Every method succeeds as a whole, or raises and changes nothing. A cache is not thread-safe. It never touches a
    device. Use one cache for a pool.

    A namespace is a tenant, an adapter, a salt, or a tuple of them. Tokens match only within one. Namespaces compare as
    the keys of a dict do, where 1 equals True. Tokens are compared one by one, not by a hash alone.

    A page is last used when the last lock on it ends. This is the LRU order, so the same calls evict the same pages.

    Args:
      pool: The pool. Others may allocate from it, too.
      clock: Gives the time of each `unlock`, for `used_before` of `evict`. It must not go back. None: the time is the
        number of calls of `unlock`.

    Raises:
      TypeError: `pool` is not a PagePool, or `clock` is not callable.

    >>> pool = PagePool(num_pages=16, page_size=16)
    >>> cache = PrefixCache(pool)
    >>> def prefill(prompt):
    ...     hit = cache.match(prompt)  # what is cached: locked, not to be computed again
    ...     pages = [*hit.pages, *cache.alloc(pool.pages_for(len(prompt)) - len(hit.pages))]  # evicts if it must
    ...     hit = cache.insert(prompt, pages, hit)  # once keys and values are written
    ...     return hit, [*hit.pages, *pages[len(hit.pages) :]]
    >>> def finish(hit, pages):
    ...     cache.unlock(hit)
    ...     pool.release(pages[len(hit.pages) :])  # the last page, partly filled
    >>> first, pages = prefill(range(40))
    >>> other, other_pages = prefill([*range(32), 7, 8, 9])
    >>> pages, other_pages, cache
    ([1, 2, 3], [1, 2, 4], PrefixCache(num_cached=2, num_evictable=0, num_locks=2, num_free=11))
    >>> finish(first, pages)
    >>> finish(other, other_pages)
    >>> cache
    PrefixCache(num_cached=2, num_evictable=2, num_locks=0, num_free=13)
    """

    def __init__(self, pool: PagePool, *, clock: Callable[[], float] | None = None) -> None:
        if not isinstance(pool, PagePool):
            raise TypeError(f"`pool` must be a PagePool. Got {type(pool).__name__}.")
        if not (clock is None or callable(clock)):
            raise TypeError(f"`clock` must be a function without arguments, or None. Got {type(clock).__name__}.")
        self._pool = pool
        self._tree = PrefixTree()
        self._cached = np.zeros(pool.num_pages, bool)
        self._hits: set[PrefixHit] = set()
        self._stats = PrefixStats()
        self._clock = clock
        self._time = 0.0 if clock is None else -math.inf

    @property
    def num_cached(self) -> int:
        """Pages in the cache."""
        return self._tree.num_pages

    @property
    def num_evictable(self) -> int:
        """Cached pages that no hit locks: `alloc` can return these and the free pages of the pool. Takes O(1)."""
        return self._tree.num_evictable

    @property
    def num_locks(self) -> int:
        """Hits that are locked, those of no pages included."""
        return len(self._hits)

    @property
    def stats(self) -> PrefixStats:
        """Counts since the cache was created."""
        return self._stats

    def __repr__(self) -> str:
        return (
            f"PrefixCache(num_cached={self.num_cached}, num_evictable={self.num_evictable}, "
            f"num_locks={self.num_locks}, num_free={self._pool.num_free})"
        )

    def match(self, tokens: Tokens, *, namespace: Hashable = None, limit: int | None = None) -> PrefixHit:
        """Finds the longest cached prefix, in whole pages, and locks it.

        The logits of the next token need the output of the last one, so at least one token must be computed. By default
        the match therefore leaves out the last token, and with it the last page if that ends there.

        Args:
          tokens: Tokens of a request.
          limit: How many tokens to match at most; None: all but the last.

        Returns:
          The prefix, which must be unlocked later, even if it has no pages.

        Raises:
          TypeError: `tokens` or `limit` are not integers, or `namespace` is not hashable.
          ValueError: `tokens` is not of one axis, or `limit` is negative.

        >>> cache = PrefixCache(PagePool(8, 4))
        >>> hit = cache.insert(range(8), cache.alloc(2), cache.match(range(8)))
        >>> cache.match([0, 1, 2, 3, 4, 5, 9, 9]).num_tokens  # the second page differs
        4
        >>> cache.match(range(8)).num_tokens, cache.match(range(8), limit=8).num_tokens
        (4, 8)
        >>> cache.match(range(8), namespace="other").num_tokens
        0
        """
        tokens = checked_tokens(tokens)
        most = max(0, len(tokens) - 1) if limit is None else checked_size(limit, "limit")
        rows = whole_pages(tokens[:most], self._pool.page_size)
        node = self._tree.split(self._tree.find(checked_namespace(namespace), rows))
        self._tree.lock(node)
        hit = self._hit(node, namespace)
        self._stats = plus(self._stats, lookups=1, hits=bool(hit.pages), tokens=len(tokens), hit_tokens=hit.num_tokens)
        return hit

    def lock(self, hit: PrefixHit) -> PrefixHit:
        """Locks a prefix once more, for a second request that goes on from it.

        Args:
          hit: A locked hit. It stays locked.

        Returns:
          A second hit, which must be unlocked later, too.

        Raises:
          TypeError: `hit` is not a PrefixHit.
          StaleHit: The hit is not locked, or not by this cache.

        >>> cache = PrefixCache(PagePool(8, 4))
        >>> hit = cache.match(range(8))
        >>> copy = cache.lock(hit)
        >>> cache.unlock(hit)
        >>> cache.num_locks
        1
        """
        checked_hit(hit, self._hits)
        self._tree.lock(hit._node)
        return self._hit(hit._node, hit.namespace)

    def unlock(self, hit: PrefixHit) -> None:
        """Ends the lock of a hit. Its pages stay cached, and can be evicted once no other hit locks them.

        Args:
          hit: A locked hit. It cannot be used again.

        Raises:
          TypeError: `hit` is not a PrefixHit, or the clock does not give a real number.
          StaleHit: The hit is not locked, or not by this cache.
          ValueError: The clock went back, or is not finite.

        >>> cache = PrefixCache(PagePool(8, 4))
        >>> hit = cache.insert(range(8), cache.alloc(2), cache.match(range(8)))
        >>> cache.unlock(hit)
        >>> cache.num_cached, cache.num_evictable
        (2, 2)
        >>> cache.unlock(hit)
        Traceback (most recent call last):
        jflex.paged.errors.StaleHit: `hit` is not locked by this cache: 2 pages of namespace None. Unlock a hit once.
        After `insert`, use the hit that it returned.
        """
        checked_hit(hit, self._hits)
        self._time = next_time(self._clock, self._time)
        self._hits.remove(hit)
        self._tree.unlock(hit._node, self._time)

    def insert(self, tokens: Tokens, pages: Iterable[int], hit: PrefixHit) -> PrefixHit:
        """Caches the whole pages of a request, and returns the prefix that it uses from now on.

        The request gives up those of its pages that `tokens` fill. They become pages of the cache, but for duplicates,
        whose tokens are cached on other pages by now: these are released. From now on, the request must use
        ``[*hit.pages, *pages[len(hit.pages) :]]``, the pages of the new hit and those that it still owns.

        Args:
          tokens: The tokens of the request whose keys and values are written, from its first on.
          pages: The pages of the request, those of `hit` first. There may be more than `tokens` need.
          hit: What the request has locked. The new hit replaces it.

        Returns:
          All whole pages of `tokens`, locked, in the namespace of `hit`.

        Raises:
          TypeError: `tokens` or `pages` are not integers, or `hit` is not a PrefixHit.
          StaleHit: The hit is not locked, or not by this cache.
          ForeignPage: A page of the request is not one of the pool, is free, or belongs to the cache.
          ValueError: `tokens` or `pages` do not begin with those of `hit`; `tokens` is not of one axis; there are fewer
            pages than `tokens` fill, a page is listed twice, or one that `tokens` fill has several owners.

        >>> cache = PrefixCache(pool := PagePool(8, 4))
        >>> first, second = cache.match(range(10)), cache.match(range(10))  # two requests compute the same
        >>> cache.insert(range(10), pool.alloc(3), first).pages
        (1, 2)
        >>> pages = pool.alloc(3)
        >>> hit = cache.insert(range(10), pages, second)
        >>> pages, [*hit.pages, *pages[len(hit.pages) :]]
        ((4, 5, 6), [1, 2, 6])
        """
        rows = whole_pages(checked_tokens(tokens), self._pool.page_size)
        prefix = self._tree.find(checked_hit(hit, self._hits).namespace, rows)
        check_begin(prefix, hit, len(tokens))
        request_pages = checked_own_pages(pages, len(rows), hit, self._pool, self._cached)
        known = prefix.num_pages - len(hit.pages)
        duplicates, new = request_pages[:known], request_pages[known:]
        node = self._tree.split(prefix)
        if new:
            node = self._tree.append(node, rows[prefix.num_pages :], new)
        self._tree.lock(node, below=hit._node)  # the new hit takes over the lock of `hit`
        self._hits.remove(hit)
        self._cached[new] = True
        self._pool.release(duplicates)
        self._stats = plus(self._stats, inserted_pages=len(new), duplicate_pages=len(duplicates))
        return self._hit(node, hit.namespace)

    def alloc(self, n: int) -> tuple[int, ...]:
        """Allocates pages from the pool for a request, and evicts as many cached ones as are missing.

        Args:
          n: How many; may be 0.

        Returns:
          Their ids, as from `PagePool.alloc`.

        Raises:
          TypeError: `n` is not an integer.
          ValueError: It is negative.
          OutOfPages: Fewer are free and evictable. Nothing is evicted then.

        >>> cache = PrefixCache(PagePool(4, 4))
        >>> cache.unlock(cache.insert(range(8), cache.alloc(2), cache.match(range(8))))
        >>> cache.alloc(2), cache.num_cached
        ((2, 3), 1)
        """
        n = checked_size(n, "n")
        missing = n - self._pool.num_free
        if missing > self.num_evictable:
            raise OutOfPages(
                f"`n` is {n}, but {self._pool.num_free} pages are free and {self.num_evictable} evictable of "
                f"{self._pool.num_pages - 1}. Unlock hits, release pages, or make the cache and its pool larger."
            )
        self.evict(max(0, missing))
        return self._pool.alloc(n)

    def evict(self, num_pages: int, *, used_before: float | None = None) -> tuple[int, ...]:
        """Evicts pages that no hit locks: from the end of the least recently used leaf on, then of the next leaf.

        A node becomes a leaf when all nodes below it are evicted. The time that it takes does not depend on the size of
        the tree.

        Args:
          num_pages: How many at most; fewer are evicted if fewer are evictable.
          used_before: A time of `clock`: evicts only pages that were not used since. None: any.

        Returns:
          The pages, which are free now.

        Raises:
          TypeError: `num_pages` is not an integer, or `used_before` is not a real number.
          ValueError: `num_pages` is negative, or `used_before` is not finite.

        >>> cache = PrefixCache(PagePool(8, 4))
        >>> cache.unlock(cache.insert(range(12), cache.alloc(3), cache.match(range(12))))
        >>> cache.evict(1), cache.evict(9)
        ((3,), (1, 2))
        """
        before = None if used_before is None else checked_time(used_before, "used_before")
        pages = self._tree.evict(checked_size(num_pages, "num_pages"), before)
        self._stats = plus(self._stats, evicted_pages=len(pages))
        return self._free(pages)

    def clear(self, namespace: Hashable = None) -> tuple[int, ...]:
        """Removes all pages of a namespace, as when the weights of its adapter change.

        Args:
          namespace: Which one. The others keep their pages.

        Returns:
          The pages, which are free now.

        Raises:
          TypeError: `namespace` is not hashable.
          PrefixLocked: A hit of the namespace is locked, even one without pages, whose request may still insert some.

        >>> cache = PrefixCache(PagePool(8, 4))
        >>> cache.unlock(cache.insert(range(8), cache.alloc(2), cache.match(range(8), namespace="adapter")))
        >>> cache.clear("adapter"), cache.num_cached
        ((1, 2), 0)
        """
        root = self._tree.roots.get(checked_namespace(namespace))
        if root is not None and root.locks:
            raise PrefixLocked(
                f"`namespace` {namespace!r} cannot be cleared while requests use it. Got {root.locks} locked hits. "
                "Unlock them first."
            )
        return self._free(self._tree.clear(namespace))

    def reset(self) -> tuple[int, ...]:
        """Removes all pages of all namespaces, and returns them. They are free now; `stats` stay.

        Raises:
          PrefixLocked: A hit is locked, even one without pages.

        >>> cache = PrefixCache(PagePool(8, 4))
        >>> cache.unlock(cache.insert(range(8), cache.alloc(2), cache.match(range(8))))
        >>> cache.reset(), cache.num_cached
        ((1, 2), 0)
        """
        if self._hits:
            raise PrefixLocked(
                f"a cache cannot be reset while requests use it. Got {len(self._hits)} locked hits. Unlock them first."
            )
        return self._free([page for namespace in [*self._tree.roots] for page in self._tree.clear(namespace)])

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raises unless every page is free, or cached, or in use: ``free + cached + in use == num_pages - 1``.

        This checks the pool, that the cache is the only owner of its pages, that the locks are those of the hits, and
        the LRU list and the counts. It takes a time proportional to the size of the tree and the pool.

        Args:
          holders: The pages that each request owns, without those of its hit. Then these must be all that are in use.

        Raises:
          TypeError: An id is not an integer.
          ForeignPage: A page in `holders` is not one of the pool.
          RuntimeError: Something is inconsistent; the message says what.

        >>> cache, pages = PrefixCache(pool := PagePool(8, 4)), pool.alloc(3)
        >>> hit = cache.insert(range(10), pages, cache.match(range(10)))
        >>> cache.check([pages[2:]])
        >>> pool.release(hit.pages[1:])
        >>> cache.check()
        Traceback (most recent call last):
        RuntimeError: page 2 is cached, and must have 1 owner, the cache. It has 0. Do not share or release the pages of
        a hit: `lock` and `unlock` it.
        """
        self._pool.check()
        pages = self._tree.check([hit._node for hit in self._hits])
        check_owners(self._pool, pages, self._cached)
        if holders is not None:
            self._pool.check([pages, *holders])

    def _hit(self, node: Node, namespace: Hashable) -> PrefixHit:
        """A hit for a lock that `node` has."""
        pages = tuple(node.path_pages())
        hit = PrefixHit(pages, len(pages) * self._pool.page_size, namespace, node)
        self._hits.add(hit)
        return hit

    def _free(self, pages: list[int]) -> tuple[int, ...]:
        """Releases pages that have left the tree."""
        self._cached[pages] = False
        self._pool.release(pages)
        return tuple(pages)
