"""The page allocator of a paged cache: reference counts on the host, in numpy alone.

A page is free, or it has owners: requests and prefix caches, each counted as often as it lists the page. The pool knows
how many owners a page has, not which. It never touches a device.

After the block manager of vLLM (Kwon et al., 2023, https://arxiv.org/abs/2309.06180, sections 4.3 and 4.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, Int32

from jflex._check.arguments import checked_integers, checked_size
from jflex.paged.cache import checked_pages
from jflex.paged.errors import DoubleFree, ForeignPage, OutOfPages


class PagePool:
    """The pages of a `PagedCache` of the same `num_pages` and `page_size`, except page 0, which is never allocated.

    Every method succeeds as a whole, or raises and changes nothing. A list of pages may repeat a page, which then
    counts as often. A pool is not thread-safe; ``copy.deepcopy`` copies it.

    Free pages are a stack: the page released last is allocated first. So if a request releases its pages in order, its
    tail is reused before its head; a new pool allocates 1, 2, 3 and so on.

    Writing to a shared page would change what its other owners read. Before a request appends to a partly filled page,
    `fork` it; full pages are not written again and can stay shared.

    Args:
      num_pages: Total pages, page 0 included.
      page_size: Tokens in a page, 1 to 256.

    Raises:
      TypeError: A size is not an integer.
      ValueError: A size is not positive, a page is too large, or slots would not fit in int32.

    >>> pool = PagePool(num_pages=6, page_size=16)
    >>> prompt = pool.alloc(pool.pages_for(40))
    >>> pool.share(prompt)  # a second request with the same prompt
    >>> last = pool.fork(prompt[2])  # it goes on in a page of its own: `copy_pages(cache, [3], [4])` must follow
    >>> prompt, last, pool.num_free
    ((1, 2, 3), 4, 1)
    >>> pool.release(prompt)
    >>> pool.release([*prompt[:2], last])
    >>> pool.num_free
    5
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages, self._page_size = checked_pages(num_pages, page_size)
        self._free = np.arange(self._num_pages - 1, 0, -1, dtype=np.int32)  # a stack: its top is at `_num_free - 1`
        self._num_free = self._num_pages - 1
        self._owners = np.zeros(self._num_pages, np.int32)

    @property
    def num_pages(self) -> int:
        """P: total pages, page 0 included."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._page_size

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can return now."""
        return self._num_free

    def __repr__(self) -> str:
        return f"PagePool(num_pages={self._num_pages}, page_size={self._page_size}, num_free={self._num_free})"

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that `num_tokens` tokens need.

        Raises:
          TypeError: `num_tokens` is not an integer.
          ValueError: It is negative.

        >>> [PagePool(8, 16).pages_for(tokens) for tokens in (0, 1, 16, 17)]
        [0, 1, 1, 2]
        """
        return -(-checked_size(num_tokens, "num_tokens") // self._page_size)

    def owners(self, page: int) -> int:
        """Number of owners of a page; 0 if it is free.

        Raises:
          TypeError: `page` is not an integer.
          ForeignPage: The page is not one of the pool.

        >>> pool = PagePool(8, 16)
        >>> pool.share(pool.alloc(1))
        >>> pool.owners(1), pool.owners(2)
        (2, 0)
        """
        return int(self.owner_counts([page], "page")[0])

    def owner_counts(self, ids: Iterable[int] | Int[np.ndarray, " N"], name: str = "ids") -> Int32[np.ndarray, " N"]:
        """Number of owners of each page; 0 if it is free.

        Args:
          ids: Pages of the pool.
          name: What messages of errors call `ids`.

        Raises:
          TypeError: An id is not an integer.
          ForeignPage: A page is not one of the pool.

        >>> pool = PagePool(8, 16)
        >>> pool.share(pool.alloc(1))
        >>> pool.owner_counts([1, 2]).tolist()
        [2, 0]
        """
        return self._owners[self._checked(name, ids)]

    def alloc(self, n: int) -> tuple[int, ...]:
        """Allocates free pages, each with one owner.

        Args:
          n: How many; may be 0.

        Returns:
          Their ids. The contents of the pages are arbitrary.

        Raises:
          TypeError: `n` is not an integer.
          ValueError: It is negative.
          OutOfPages: Fewer are free.

        >>> PagePool(8, 16).alloc(3)
        (1, 2, 3)
        """
        n = checked_size(n, "n")
        if n > self._num_free:
            raise OutOfPages(
                f"`n` is {n}, but {self._num_free} pages are free of {self._num_pages - 1}. Release pages, or make the "
                "cache and its pool larger."
            )
        pages = self._free[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._owners[pages] = 1
        return tuple(pages.tolist())

    def share(self, ids: Iterable[int]) -> None:
        """Gives each page one more owner.

        Raises:
          TypeError: An id is not an integer.
          ForeignPage: A page is free, or not one of the pool.

        >>> pool = PagePool(8, 16)
        >>> pool.share(pool.alloc(2))
        >>> pool.owners(2)
        2
        """
        np.add.at(self._owners, self._owned("ids", ids), 1)

    def release(self, ids: Iterable[int]) -> None:
        """Removes one owner from each page; pages without owners become free, and the last is allocated first.

        Raises:
          TypeError: An id is not an integer.
          ForeignPage: A page is not one of the pool.
          DoubleFree: A page is listed more often than it has owners.

        >>> pool = PagePool(8, 16)
        >>> pool.release(pool.alloc(3))
        >>> pool.alloc(3)
        (3, 2, 1)
        """
        pages = self._checked("ids", ids)
        distinct, times = np.unique(pages, return_counts=True)
        short = self._owners[distinct] < times
        if short.any():
            page, count = int(distinct[short][0]), int(times[short][0])
            raise DoubleFree(
                f"`ids` releases page {page} {_times(count)}, and it has {_number(self._owners[page])}. Release a page "
                "once for each `alloc`, `share` or `fork` that gave it."
            )
        self._owners[distinct] -= times.astype(np.int32)
        freed = distinct[self._owners[distinct] == 0]
        # In the order of the call, each page where it loses its last owner.
        last = {int(page): entry for entry, page in enumerate(pages)}
        self._free[self._num_free : self._num_free + freed.size] = sorted(freed.tolist(), key=last.__getitem__)
        self._num_free += freed.size

    def fork(self, page: int) -> int:
        """Copy-on-write: returns a page that the caller, an owner of `page`, owns alone.

        If the caller is the only owner, this is `page` and nothing changes. Else the caller's ownership moves to a free
        page: `page` has one owner less, the new page has one, and the caller must copy the tokens,
        ``copy_pages(cache, src, dst)``, before anything is written to either.

        Raises:
          TypeError: `page` is not an integer.
          ForeignPage: It is free, or not one of the pool.
          OutOfPages: It has several owners, and no page is free.

        >>> pool = PagePool(8, 16)
        >>> (page,) = pool.alloc(1)
        >>> pool.fork(page)
        1
        >>> pool.share([page])
        >>> pool.fork(page), pool.owners(page)
        (2, 1)
        """
        page = int(self._owned("page", [page])[0])
        if self._owners[page] == 1:
            return page
        if not self._num_free:
            raise OutOfPages(
                f"`page` {page} has {self._owners[page]} owners, and none of {self._num_pages - 1} pages is free to "
                "copy it to. Release pages, or make the cache and its pool larger."
            )
        (new,) = self.alloc(1)
        self._owners[page] -= 1
        return new

    def table(
        self, requests: Sequence[Iterable[int]], max_pages: int | None = None
    ) -> Int32[np.ndarray, "R max_pages"]:
        """The page table of requests, for `PagedBatch`, padded with the reserved page 0.

        Args:
          requests: The pages of each request, in the order of its tokens.
          max_pages: The width of the table; None: that of the longest request. A fixed width compiles once.

        Raises:
          TypeError: An id or `max_pages` is not an integer.
          ForeignPage: A page is free, or not one of the pool.
          ValueError: A request has more than `max_pages` pages.

        >>> pool = PagePool(8, 16)
        >>> pool.table([pool.alloc(2), pool.alloc(1)], max_pages=3).tolist()
        [[1, 2, 0], [3, 0, 0]]
        """
        rows = [self._owned(f"requests[{number}]", pages) for number, pages in enumerate(requests)]
        longest = max((len(row) for row in rows), default=0)
        width = longest if max_pages is None else checked_size(max_pages, "max_pages")
        if longest > width:
            number = next(number for number, row in enumerate(rows) if len(row) > width)
            raise ValueError(
                f"`max_pages` is {width}, too narrow a table: request {number} has {len(rows[number])} pages. Make the "
                "table wider."
            )
        table = np.zeros((len(rows), width), np.int32)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
        return table

    def check_table(self, page_table: ArrayLike, kv_lengths: ArrayLike | None = None) -> None:
        """Raises unless every page that a table uses has owners.

        Args:
          page_table: [R, max_pages], integers, on the host or the device.
          kv_lengths: [R]: keys of each request, which decide the entries that it uses; None: all entries but 0.

        Raises:
          TypeError: An argument does not hold integers.
          ValueError: The shapes do not match, or a length needs more entries than the table has.
          ForeignPage: A used page is free, or not one of the pool.

        >>> pool = PagePool(8, 16)
        >>> table = pool.table([pool.alloc(2)])
        >>> pool.check_table(table)
        >>> pool.release([2])
        >>> pool.check_table(table, np.array([16]))  # uses the first page only
        >>> pool.check_table(table, np.array([17]))
        Traceback (most recent call last):
        jflex.paged.errors.ForeignPage: `page_table` must hold pages with owners. Entry 1 of request 0 is page 2, which
        is free. Do not use a page after its release.
        """
        table = checked_integers(page_table, "page_table")
        if table.ndim != 2:
            raise ValueError(f"`page_table` must be [R, max_pages]. Got shape {table.shape}.")
        used = table != 0
        if kv_lengths is not None:
            used = self._used(table, checked_integers(kv_lengths, "kv_lengths"))
        inside = (table >= 1) & (table < self._num_pages)
        wrong = used & ~(inside & (self._owners[np.where(inside, table, 0)] > 0))
        if wrong.any():
            request, entry = np.argwhere(wrong)[0].tolist()
            page = int(table[request, entry])
            raise ForeignPage(
                f"`page_table` must hold pages with owners. Entry {entry} of request {request} is page {page}, which "
                f"{self._fault(page)}"
            )

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raises unless the pool is consistent: every page but 0 is either free, once, or has owners.

        Args:
          holders: The pages of each owner: then every page must have as many owners as it is listed.

        Raises:
          TypeError: An id is not an integer.
          ForeignPage: A page in `holders` is not one of the pool.
          RuntimeError: The pool is inconsistent: a page leaked, or is used by more than its owners.

        >>> pool = PagePool(8, 16)
        >>> held = pool.alloc(2)
        >>> pool.check([held])
        >>> pool.check([held[:1]])
        Traceback (most recent call last):
        RuntimeError: page 2 has 1 owner in the pool, but `holders` lists it 0 times. It leaked: release it.
        """
        free = np.sort(self._free[: self._num_free])
        if not np.array_equal(free, 1 + np.flatnonzero(self._owners[1:] == 0)) or self._owners.min() < 0:
            raise RuntimeError(
                f"{self!r} is inconsistent: {len(free)} pages are free, {np.count_nonzero(self._owners)} have owners. "
                "Change a pool only through its methods, from one thread."
            )
        if holders is None:
            return
        listed = np.zeros(self._num_pages, np.int32)
        for number, pages in enumerate(holders):
            np.add.at(listed, self._checked(f"holders[{number}]", pages), 1)
        wrong = np.flatnonzero(listed != self._owners)
        if wrong.size:
            page = int(wrong[0])
            remedy = "Share it with each." if listed[page] > self._owners[page] else "It leaked: release it."
            raise RuntimeError(
                f"page {page} has {_number(self._owners[page])} in the pool, but `holders` lists it "
                f"{_times(listed[page])}. {remedy}"
            )

    def _checked(self, name: str, ids: Iterable[int]) -> np.ndarray:
        """Ids as an array; raises unless every one is a page of the pool."""
        pages = checked_integers(ids if isinstance(ids, np.ndarray) else list(ids), name).reshape(-1)
        wrong = pages[(pages < 1) | (pages >= self._num_pages)]
        if wrong.size:
            raise ForeignPage(f"`{name}` holds page {wrong[0]}, which {self._fault(int(wrong[0]))}")
        return pages

    def _owned(self, name: str, ids: Iterable[int]) -> np.ndarray:
        pages = self._checked(name, ids)
        free = pages[self._owners[pages] == 0]
        if free.size:
            raise ForeignPage(f"`{name}` holds page {free[0]}, which {self._fault(int(free[0]))}")
        return pages

    def _used(self, table: np.ndarray, kv_lengths: np.ndarray) -> np.ndarray:
        if kv_lengths.shape != table.shape[:1]:
            raise ValueError(
                f"`kv_lengths` must be [R], one for each row of `page_table`. Got {kv_lengths.shape} and {table.shape}."
            )
        needed = -(-kv_lengths.astype(np.int64) // self._page_size)
        if (needed > table.shape[1]).any():
            request = int((needed > table.shape[1]).argmax())
            raise ValueError(
                f"`page_table` is too narrow: its {table.shape[1]} entries of {self._page_size} tokens do not hold the "
                f"{kv_lengths[request]} keys of request {request}. Make the table wider."
            )
        return np.arange(table.shape[1]) < needed[:, None]

    def _fault(self, page: int) -> str:
        """Why a page cannot be used, and what to do: the end of a sentence."""
        if page == 0:
            return "is reserved. It pads page tables and holds no tokens: leave it out."
        if not 0 < page < self._num_pages:
            return f"is not within 1 and {self._num_pages - 1}. Pass pages that `alloc` or `fork` of this pool gave."
        return "is free. Do not use a page after its release."


def _number(owners: int) -> str:
    return "1 owner" if owners == 1 else f"{owners} owners"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
