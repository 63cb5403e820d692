"""Checks of the arguments of a `PrefixCache`, and of its pages against those of the pool."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int, Int64

from jflex._check.arguments import checked_integers
from jflex.paged.errors import ForeignPage, StaleHit
from jflex.paged.pool import PagePool
from jflex.paged.prefix.hit import PrefixHit
from jflex.paged.prefix.tree import Prefix

Tokens: TypeAlias = Sequence[int] | Int[np.ndarray, " N"]
"""The tokens of one request, from its first on."""


def checked_tokens(tokens: Tokens) -> Int64[np.ndarray, " N"]:
    """Tokens as an array of int64.

    >>> checked_tokens(range(3))
    array([0, 1, 2])
    """
    array = checked_integers(tokens, "tokens")
    if array.ndim != 1:
        raise ValueError(f"`tokens` must be [N], the tokens of one request. Got shape {array.shape}.")
    if not np.can_cast(array.dtype, np.int64):
        raise TypeError(f"`tokens` must fit in int64, as which they are compared. Got {array.dtype}. Cast them.")
    return array.astype(np.int64)


def whole_pages(tokens: Int64[np.ndarray, " N"], page_size: int) -> Int64[np.ndarray, "n page_size"]:
    """The tokens of each page that they fill."""
    n = len(tokens) // page_size
    return tokens[: n * page_size].reshape(n, page_size)


def checked_namespace(namespace: Hashable) -> Hashable:
    """A namespace, if it is hashable."""
    try:
        hash(namespace)
    except TypeError as error:
        raise TypeError(
            f"`namespace` must be hashable, like the keys of a dict. Got {type(namespace).__name__} ({error}). Take a "
            "string, an integer, or a tuple of them."
        ) from None
    return namespace


def checked_time(time: float, name: str) -> float:
    """A time, if it is a finite real number."""
    if isinstance(time, bool) or not isinstance(time, numbers.Real):
        raise TypeError(f"`{name}` must be a time, a real number. Got {time!r} ({type(time).__name__}).")
    if not math.isfinite(time):
        raise ValueError(f"`{name}` must be finite. Got {time}.")
    return time


def next_time(clock: Callable[[], float] | None, before: float) -> float:
    """Reads the clock; without one, counts.

    >>> next_time(None, 3.0), next_time(lambda: 3.5, 3.0)
    (4.0, 3.5)
    """
    if clock is None:
        return before + 1
    now = checked_time(clock(), "clock()")
    if now < before:
        raise ValueError(f"`clock` must not go back. It gave {now} after {before}. Pass `time.monotonic`, or None.")
    return now


def checked_hit(hit: PrefixHit, locked: Collection[PrefixHit]) -> PrefixHit:
    """A hit that is among those that a cache holds locked."""
    if not isinstance(hit, PrefixHit):
        raise TypeError(f"`hit` must be a PrefixHit, from `match`, `lock` or `insert`. Got {type(hit).__name__}.")
    if hit not in locked:
        raise StaleHit(
            f"`hit` is not locked by this cache: {len(hit.pages)} pages of namespace {hit.namespace!r}. Unlock a hit "
            "once. After `insert`, use the hit that it returned."
        )
    return hit


def check_begin(prefix: Prefix, hit: PrefixHit, num_tokens: int) -> None:
    """Raises `ValueError` unless a prefix that was found, of `num_tokens` tokens, begins with that of the hit."""
    pages = prefix.node.path_pages()[: prefix.num_pages]
    if tuple(pages[: len(hit.pages)]) != hit.pages:
        agree = sum(map(operator.eq, pages, hit.pages))
        raise ValueError(
            f"`tokens` must begin with those of `hit`, {len(hit.pages)} pages. Got {num_tokens} tokens; {agree} pages "
            "agree. Pass all tokens of the request."
        )


def checked_own_pages(
    pages: Iterable[int], num_full: int, hit: PrefixHit, pool: PagePool, cached: Bool[np.ndarray, " P"]
) -> list[int]:
    """The full pages that a request owns itself: those behind the pages of its hit, as far as its tokens fill them."""
    ids = checked_integers([*pages], "pages").reshape(-1)
    owners, start = pool.owner_counts(ids, "pages"), len(hit.pages)
    if len(ids) < num_full:
        raise ValueError(
            f"`pages` must hold the {num_full} pages that `tokens` fill. Got {len(ids)}. Pass all pages of the "
            "request, and only tokens that are written."
        )
    if tuple(ids[:start].tolist()) != hit.pages:
        raise ValueError(
            f"`pages` must begin with those of `hit`, {_listed(hit.pages)}. Got {_listed(ids[:start])}. Pass "
            "`hit.pages`, and then the pages that the request owns."
        )
    wrong = (owners == 0) | cached[ids] | (owners > 1) & (np.arange(len(ids)) < num_full)
    if wrong[start:].any():
        entry = start + int(wrong[start:].argmax())
        raise _wrong_page(int(ids[entry]), int(owners[entry]), bool(cached[ids[entry]]))
    distinct, times = np.unique(ids[start:], return_counts=True)
    if len(distinct) < len(ids) - start:
        page = distinct[times > 1][0]
        raise ValueError(
            f"`pages` must list each page once. Page {page} is there twice or more. Leave out all but one."
        )
    return ids[start:num_full].tolist()


def _wrong_page(page: int, owners: int, cached: bool) -> ValueError:
    if not owners:
        return ForeignPage(f"`pages` holds page {page}, which is free. Do not use a page after its release.")
    if cached:
        return ForeignPage(
            f"`pages` holds page {page}, which is cached and not of `hit`. Pass the hit that the last `insert` of the "
            "request returned, and its pages."
        )
    return ValueError(
        f"`pages` must hold pages of one owner where `tokens` fill them. Page {page} has {owners}. Insert pages before "
        "another request uses them, and `lock` the hit for that request."
    )


def check_owners(pool: PagePool, pages: list[int], cached: Bool[np.ndarray, " P"]) -> None:
    """Raises `RuntimeError` unless the pages in the tree are those that are marked, and each has one owner."""
    marked = np.flatnonzero(cached)
    if not np.array_equal(np.sort(np.array(pages, int)), marked):
        raise RuntimeError("the prefix cache is inconsistent: other pages are marked as cached than are in the tree.")
    owners = pool.owner_counts(marked)
    if (owners != 1).any():
        page = int(marked[owners != 1][0])
        raise RuntimeError(
            f"page {page} is cached, and must have 1 owner, the cache. It has {pool.owners(page)}. Do not share or "
            "release the pages of a hit: `lock` and `unlock` it."
        )


def _listed(pages: Sequence[int] | np.ndarray) -> str:
    """Pages for a message: the first eight."""
    return f"[{', '.join(map(str, pages[:8]))}{', ...' if len(pages) > 8 else ''}]"
