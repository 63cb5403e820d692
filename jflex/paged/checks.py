"""Checks of caches, and the rules on the values of a batch, for numpy arrays and for traced ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflex._check.arguments import check_int32, describe_array, known_values
from jflex.paged.eight_bits import WRITTEN
from jflex.paged.store import PageStore, is_eight_bits
from jflex.types import AnyArray

_MAX_INT32 = 2**31 - 1


class Rule(NamedTuple):
    """Faults of a rule, the message for one of them, and the values in it, arrays of one shape."""

    fault: AnyArray
    message: str
    values: dict[str, AnyArray]


def check_rules(rules: Iterable[Rule]) -> None:
    """Raises ValueError for the first rule that known values break.

    >>> check_rules(indptr_rules(np.array([0, 3, 1]), num_tokens=8))
    Traceback (most recent call last):
    ValueError: `qo_indptr` must ascend. Request 1 has its queries from 3 to 1. Take the cumulative sum of the query
    counts.
    """
    for rule in rules:
        fault = np.asarray(rule.fault)
        if fault.any():
            first = int(fault.argmax())
            values = {name: int(np.asarray(x).reshape(-1)[first]) for name, x in rule.values.items()}
            raise ValueError(rule.message.format(**values))


def indptr_rules(qo_indptr: AnyArray, num_tokens: int) -> Iterator[Rule]:
    """The rules on where queries begin, an array of numpy or of JAX.

    >>> [rule.fault.tolist() for rule in indptr_rules(np.array([0, 3, 1]), num_tokens=8)]
    [[False], [False, True], [False]]
    """
    first, last, begins, ends = qo_indptr[:1], qo_indptr[-1:], qo_indptr[:-1], qo_indptr[1:]
    yield Rule(
        first != 0,
        "`qo_indptr` must begin with 0, where the queries of the first request begin. It begins with {first}. "
        "Prepend a 0 to the cumulative sums of the query counts.",
        {"first": first},
    )
    yield Rule(
        ends < begins,
        "`qo_indptr` must ascend. Request {request} has its queries from {begin} to {end}. Take the cumulative sum of "
        "the query counts.",
        {"request": _iota_like(begins), "begin": begins, "end": ends},
    )
    yield Rule(
        last > num_tokens,
        f"`qo_indptr` must end at N, the number of packed queries, or before. It ends at {{last}}, and there are "
        f"{num_tokens} queries. Pack the queries of all requests.",
        {"last": last},
    )


def length_rules(kv_lengths: AnyArray, max_pages: int, num_pages: int, page_size: int) -> Iterator[Rule]:
    """The rules on lengths, for a table of `max_pages` columns and a cache of pages.

    >>> [rule.fault.tolist() for rule in length_rules(np.array([48, 49]), max_pages=3, num_pages=8, page_size=16)]
    [[False, False], [False, True], [False, False]]
    """
    request = _iota_like(kv_lengths)
    values = {"request": request, "length": kv_lengths}
    yield Rule(
        kv_lengths < 0,
        "`kv_lengths` must not be negative. Request {request} has {length} keys. Give a request that has ended 0 keys.",
        values,
    )
    usable = num_pages - 1
    yield Rule(
        kv_lengths > min(max_pages * page_size, _MAX_INT32),
        f"`page_table` is too narrow: its {max_pages} entries of {page_size} tokens hold {max_pages * page_size} keys. "
        "Request {request} has {length}. Make the table wider, or the cache with the page size that the table is for.",
        values,
    )
    yield Rule(
        kv_lengths > usable * page_size,
        f"`kv_lengths` must fit in the cache, whose {usable} pages of {page_size} tokens (page 0 is reserved) hold "
        f"{usable * page_size} keys. Request {{request}} has {{length}}. Make a cache with more pages.",
        values,
    )


def table_rule(kv_lengths: AnyArray, page_table: AnyArray, num_pages: int, page_size: int) -> Rule:
    """The rule on the entries that requests of these lengths use.

    >>> table_rule(np.array([17]), np.array([[3, 8, 9]]), num_pages=8, page_size=16).fault.tolist()
    [[False, True, False]]
    """
    numpy = np if isinstance(page_table, np.ndarray) else jnp
    used = kv_lengths // page_size + (kv_lengths % page_size > 0).astype(numpy.int32)
    entry = numpy.arange(page_table.shape[1], dtype=numpy.int32)
    request = numpy.broadcast_to(_iota_like(kv_lengths)[:, None], page_table.shape)
    entries = numpy.broadcast_to(entry[None], page_table.shape)
    fault = (entries < used[:, None]) & ((page_table < 1) | (page_table >= num_pages))
    return Rule(
        fault,
        f"`page_table` must hold pages within 1 and {num_pages - 1}, the last page of the cache; page 0 is "
        "reserved. Request {request} uses {used} entries, and entry {entry} is {page}. Take pages from the `PagePool` "
        "of this cache.",
        {
            "request": request,
            "used": numpy.broadcast_to(used[:, None], page_table.shape),
            "entry": entries,
            "page": page_table,
        },
    )


def _iota_like(x: AnyArray) -> AnyArray:
    return (np if isinstance(x, np.ndarray) else jnp).arange(x.shape[0], dtype=np.int32)


def check_tokens(cache: PageStore, k: AnyArray, v: AnyArray, slots: AnyArray) -> None:
    """Raises unless keys and values of tokens fit a cache, and as many slots."""
    for name, x, pages in (("k", k, cache.keys), ("v", v, cache.values)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
        if is_eight_bits(pages.dtype):
            if str(x.dtype) not in WRITTEN:
                raise TypeError(
                    f"`{name}` must be one of {', '.join(WRITTEN)}: the cache holds {pages.dtype} with scales, and "
                    f"`write` rounds to it. Got {describe_array(x)}. Pass what is not yet quantised."
                )
        elif x.dtype != pages.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of the cache, {pages.dtype}. Got {describe_array(x)}. Cast it with "
                "`.astype`."
            )
        if x.ndim != 3 or x.shape[1:] != pages.shape[-2:]:
            raise ValueError(
                f"`{name}` must be [N, Hkv, {'D' if name == 'k' else 'Dv'}], with the heads of the cache: "
                f"[N, {pages.shape[-2]}, {pages.shape[-1]}]. Got {describe_array(x)}. Reshape batch and tokens to one "
                "axis."
            )
    check_int32("slots", slots, "slots")
    if not k.shape[:1] == v.shape[:1] == slots.shape:
        raise ValueError(
            "`k`, `v` and `slots` must be of the same tokens: [N, ...], [N, ...] and [N]. Got k: "
            f"{describe_array(k)}, v: {describe_array(v)}, slots: {describe_array(slots)}. Give padding the slot -1."
        )


def check_slots_differ(slots: AnyArray, num_pages: int, page_size: int, name: str) -> None:
    """Raises ValueError if known slots repeat: such a slot would hold either token."""
    known = known_values(slots)
    if known is None:
        return
    used, counts = np.unique(known, return_counts=True)
    twice = used[(counts > 1) & (used >= page_size) & (used < num_pages * page_size)]
    if twice.size:
        raise ValueError(
            f"`{name}` must not give a slot twice. Got slot {twice[0]} (page {twice[0] // page_size}) for "
            f"{counts[used == twice[0]][0]} tokens. Give all but one of them the slot -1."
        )


def check_copies(src: AnyArray, dst: AnyArray, num_pages: int) -> None:
    """Raises ValueError if known pages are read outside of the cache, or written twice."""
    sources, targets = known_values(src), known_values(dst)
    if sources is None or targets is None:
        return
    inside = (targets >= 0) & (targets < num_pages)
    wrong = sources[inside & ((sources < 0) | (sources >= num_pages))]
    if wrong.size:
        raise ValueError(f"`src` must hold pages within 0 and {num_pages - 1}, the last page. Got {wrong[0]}.")
    pages, counts = np.unique(targets[inside], return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"`dst` must not hold a page twice. Got page {pages[counts > 1][0]} more than once. Replace one by -1."
        )
