"""The inverse of a page table: from slots to positions of a request."""

from __future__ import annotations

import dataclasses
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jflex._check.arguments import check_int32, describe_array, known_values
from jflex.mods.reindex import Positions
from jflex.paged.batch import check_rules, length_rules, table_rule
from jflex.paged.cache import checked_pages
from jflex.types import AnyArray


@dataclasses.dataclass(frozen=True, eq=False)
class SlotMap:
    """From slots to positions, for each request: the inverse of a page table."""

    # [B, P]: the position of a page's first token; -1 if the request does not have the page
    starts: Int32[Array, "B P"]
    lengths: Int32[Array, " B"]
    page_size: int

    def positions(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, slot: jax.Array) -> Positions:
        """The position of the key in a slot, and whether the slot belongs to the request; if not, the position is 0."""
        row = b if self.starts.shape[0] > 1 else 0
        start = self.starts[row, slot // self.page_size]
        position = start + slot % self.page_size
        holds = (start >= 0) & (position < self.lengths[row])
        return Positions(b, h, q_idx, jnp.where(holds, position, 0), exists=holds)


def slot_map(
    page_table: AnyArray, kv_lengths: AnyArray | None, num_pages: SupportsIndex, page_size: SupportsIndex
) -> SlotMap:
    """Inverts a page table; memory is B times P.

    Args:
      page_table: [B, max_pages]; entries of 0 or below, and those for positions beyond a length, are ignored.
      kv_lengths: [B], or None: as many as the table has entries for.

    Returns:
      The map; for a table without rows, one row without pages. If a row lists a page twice, the first entry counts.

    >>> slots = slot_map(jnp.array([[3, 1]]), jnp.array([3]), num_pages=4, page_size=2)
    >>> slots.starts.tolist(), slots.lengths.tolist()
    ([[-1, 2, -1, 0]], [3])
    """
    num_pages, page_size = checked_pages(num_pages, page_size)
    _check_table(page_table, kv_lengths, num_pages, page_size)
    table = jnp.asarray(page_table)
    requests, max_pages = table.shape
    starts = jnp.arange(max_pages, dtype=jnp.int32)[None] * page_size
    lengths = jnp.full(requests, max_pages * page_size, jnp.int32)
    if kv_lengths is not None:
        lengths = jnp.minimum(lengths, jnp.asarray(kv_lengths))
    if not requests:  # nothing can be read from an array without rows, not even while it is traced
        requests, table, lengths = 1, jnp.zeros((1, max_pages), jnp.int32), jnp.zeros(1, jnp.int32)
    used = (table > 0) & (starts < lengths[:, None])
    nowhere = max_pages * page_size
    # The minimum, so that the first entry counts for a page that is listed twice.
    inverse = jnp.full((requests, num_pages), nowhere, jnp.int32)
    row = jnp.arange(requests, dtype=jnp.int32)[:, None]
    inverse = inverse.at[row, jnp.where(used, table, num_pages)].min(starts, mode="drop")
    return SlotMap(jnp.where(inverse == nowhere, -1, inverse), lengths, page_size)


def _check_table(page_table: AnyArray, kv_lengths: AnyArray | None, num_pages: int, page_size: int) -> None:
    check_int32("page_table", page_table, "pages")
    if page_table.ndim != 2:
        raise ValueError(
            f"`page_table` must be [B, max_pages]. Got {describe_array(page_table)}. Give one request an axis, "
            "`x[None]`."
        )
    max_pages = page_table.shape[1]
    table = known_values(page_table)
    lengths = None
    if kv_lengths is not None:
        check_int32("kv_lengths", kv_lengths, "counts")
        if kv_lengths.shape != page_table.shape[:1]:
            raise ValueError(
                "`kv_lengths` must be [B], one for each row of `page_table`. Got "
                f"{describe_array(kv_lengths)} and {describe_array(page_table)}."
            )
        lengths = known_values(kv_lengths)
        if lengths is not None:
            check_rules(length_rules(lengths, max_pages, num_pages, page_size))
    if table is None or (lengths is None and kv_lengths is not None):
        return
    if lengths is not None:
        check_rules([table_rule(lengths, table, num_pages, page_size)])
    _check_pages(table, lengths, num_pages, page_size)


def _check_pages(table: np.ndarray, lengths: np.ndarray | None, num_pages: int, page_size: int) -> None:
    """Raises unless known pages are in the cache, and a request lists each once."""
    used = table > 0
    if lengths is not None:
        used &= np.arange(table.shape[1]) * page_size < lengths[:, None]
    beyond = used & (table >= num_pages)
    if beyond.any():
        request, entry = np.argwhere(beyond)[0].tolist()
        raise ValueError(
            f"`page_table` must hold pages below `num_pages`, {num_pages}. Entry {entry} of request {request} is "
            f"{table[request, entry]}. Put 0 where a request has no page, or pass the `num_pages` of the cache."
        )
    # Unused entries get distinct negative numbers.
    ordered = np.sort(np.where(used, table, -1 - np.arange(table.shape[1])), axis=1)
    twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    if twice.size:
        request, entry = twice[0].tolist()
        raise ValueError(
            f"`page_table` must not hold a page twice for one request: one slot would map to two positions. "
            f"Request {request} has page {ordered[request, entry]} twice. Use `jflex.paged_attention`, which "
            "looks pages up, or pass `kv_lengths` if the entries after the first are unused."
        )
