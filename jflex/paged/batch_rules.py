"""What must hold of the values of a batch, once for numpy arrays and for traced ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jflex.paged.cache import PagedCache

_MAX_INT32 = 2**31 - 1


class Rule(NamedTuple):
    """Where a rule is broken, the message for one such place, and the values that it names, alike in shape."""

    fault: Any
    message: str
    values: dict[str, Any]


def value_rules(fields: tuple[Any, Any, Any], max_pages: int, cache: PagedCache, num_tokens: int) -> Iterator[Rule]:
    """The rules on values, in numpy or in JAX.

    Args:
      fields: `qo_indptr`, `kv_lengths` and `page_table`, all of one kind; rules on one that is None are left out.
      max_pages: The width of the table.
      cache: The cache.
      num_tokens: N, the number of packed queries.

    Yields:
      Every rule, broken or not.

    >>> cache = PagedCache.create(4, 16, 1, 1, dtype="float32")
    >>> [rule.fault.tolist() for rule in value_rules((np.array([0, 3, 1]), None, None), 2, cache, num_tokens=8)]
    [[False], [False, True], [False]]
    """
    qo_indptr, kv_lengths, page_table = fields
    if qo_indptr is not None:
        yield from _indptr_rules(qo_indptr, num_tokens)
    if kv_lengths is not None:
        yield from _length_rules(kv_lengths, max_pages, cache)
        if page_table is not None:
            yield _table_rule(kv_lengths, page_table, cache)


def _indptr_rules(qo_indptr: Any, num_tokens: int) -> Iterator[Rule]:
    first, last, begins, ends = qo_indptr[:1], qo_indptr[-1:], qo_indptr[:-1], qo_indptr[1:]
    yield Rule(
        first != 0,
        "`qo_indptr` must begin with 0, where the queries of the first request begin. It begins with {first}. Put the "
        "sums of the query counts behind a 0.",
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


def _length_rules(kv_lengths: Any, max_pages: int, cache: PagedCache) -> Iterator[Rule]:
    request = _iota_like(kv_lengths)
    values = {"request": request, "length": kv_lengths}
    yield Rule(
        kv_lengths < 0,
        "`kv_lengths` must not be negative. Request {request} has {length} keys. Give a request that has ended 0 keys.",
        values,
    )
    size, usable = cache.page_size, cache.num_pages - 1
    yield Rule(
        kv_lengths > min(max_pages * size, _MAX_INT32),
        f"`page_table` is too narrow: its {max_pages} entries of {size} tokens hold {max_pages * size} keys. Request "
        "{request} has {length}. Make the table wider, or the cache with the page size that the table is for.",
        values,
    )
    yield Rule(
        kv_lengths > usable * size,
        f"`kv_lengths` must fit in the cache, whose {usable} pages of {size} tokens (page 0 is reserved) hold "
        f"{usable * size} keys. Request {{request}} has {{length}}. Make a cache with more pages.",
        values,
    )


def _table_rule(kv_lengths: Any, page_table: Any, cache: PagedCache) -> Rule:
    numpy = np if isinstance(page_table, np.ndarray) else jnp
    size = cache.page_size
    used = kv_lengths // size + (kv_lengths % size > 0).astype(numpy.int32)
    entry = numpy.arange(page_table.shape[1], dtype=numpy.int32)
    request = numpy.broadcast_to(_iota_like(kv_lengths)[:, None], page_table.shape)
    entries = numpy.broadcast_to(entry[None], page_table.shape)
    fault = (entries < used[:, None]) & ((page_table < 1) | (page_table >= cache.num_pages))
    return Rule(
        fault,
        f"`page_table` must hold pages within 1 and {cache.num_pages - 1}, the last page of the cache; page 0 is "
        "reserved. Request {request} uses {used} entries, and entry {entry} is {page}. Take pages from the `PagePool` "
        "of this cache.",
        {
            "request": request,
            "used": numpy.broadcast_to(used[:, None], page_table.shape),
            "entry": entries,
            "page": page_table,
        },
    )


def _iota_like(x: Any) -> Any:
    return (np if isinstance(x, np.ndarray) else jnp).arange(x.shape[0], dtype=np.int32)
