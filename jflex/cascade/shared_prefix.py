"""A paged batch whose requests begin alike, as two levels of a cascade: what they share, and what follows it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jflex._check.arguments import check_int32, describe_array, known_values
from jflex.cascade.level import CascadeLevel
from jflex.paged.batch import PagedBatch, check_fields
from jflex.paged.cache import PagedCache
from jflex.types import AnyArray


def shared_prefix_levels(
    cache: PagedCache,
    batch: PagedBatch,
    requests: int | Int32[AnyArray, ""],
    tokens: int | Int32[AnyArray, ""],
    *,
    layer: int | Int[AnyArray, ""] | None = None,
) -> tuple[CascadeLevel, CascadeLevel]:
    """The levels of a paged batch whose first requests begin with the same pages: these pages, and what follows them.

    Both numbers are data: other values do not recompile anything. 0 and 0: nothing is shared.

    Args:
      requests: How many requests share their first pages, counted from the first request.
      tokens: How many keys are on these pages, a multiple of the page size. Each of these requests has as many.
      layer: Which layer of a stacked cache.

    Returns:
      The shared keys, and the other keys of each request.

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: `requests` or `tokens` is known and out of range, or the batch has trees.

    >>> cache = PagedCache.create(16, 64, 8, 128, dtype=jnp.bfloat16)
    >>> table = jnp.array([[3, 9, 1], [3, 9, 5], [7, 0, 0]])
    >>> batch = PagedBatch(jnp.arange(4), jnp.array([130, 129, 20]), table)  # one query each
    >>> shared, own = shared_prefix_levels(cache, batch, requests=2, tokens=128)
    >>> shared.groups.kv_lengths.tolist(), own.groups.kv_lengths.tolist(), own.start.tolist()
    ([128], [2, 1, 20], [128, 128, 0])
    """
    check_fields(batch)
    if batch.ancestors is not None:
        raise ValueError("`batch` must have no `ancestors`: levels have no trees. Got some. Use `paged_attention`.")
    size, rows = cache.page_size, batch.requests
    count = _checked_number("requests", requests, rows)
    keys = _checked_number("tokens", tokens, batch.max_pages * size, size)
    lengths, indptr, table = (jnp.asarray(x) for x in (batch.kv_lengths, batch.qo_indptr, batch.page_table))
    few = min(rows, 1)
    ends = jnp.stack([jnp.zeros((), jnp.int32), indptr[count]])[: few + 1]
    shared = PagedBatch(ends, keys[None][:few], table[:few])
    start = jnp.where(jnp.arange(rows, dtype=jnp.int32) < count, keys, 0)
    columns = jnp.arange(batch.max_pages, dtype=jnp.int32)[None] + (start // size)[:, None]
    table_after = jnp.take_along_axis(table, jnp.minimum(columns, batch.max_pages - 1), axis=1)
    private = PagedBatch(indptr, jnp.maximum(lengths - start, 0), table_after)
    return CascadeLevel.paged(cache, shared, layer=layer), CascadeLevel.paged(cache, private, start=start, layer=layer)


def _checked_number(name: str, x: int | AnyArray, most: int, unit: int = 1) -> Int32[Array, ""]:
    number = np.asarray(x, np.int32) if type(x) is int else x
    check_int32(name, number, "one number")
    assert not isinstance(number, int)  # a bool was refused
    known = known_values(number)
    if number.shape or (known is not None and not (0 <= int(known) <= most and int(known) % unit == 0)):
        multiple = f", a multiple of the page size {unit}" if unit > 1 else ""
        got = describe_array(number) if known is None or known.shape else known
        raise ValueError(f"`{name}` must be one number from 0 to {most}{multiple}. Got {got}.")
    return jnp.asarray(number)
