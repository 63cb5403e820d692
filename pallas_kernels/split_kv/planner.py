"""Split-KV: divides the keys of ragged rows into splits, inside of the kernels, and maps programs to work items.

Each row (a sequence, or a tile of its queries) has its own number of tiles of keys, known only on the device. Rows get
splits in proportion to their tiles, so that a few long ones keep the whole GPU busy (as the planner of FlashInfer does
on the host: Ye et al. 2025, arXiv:2501.01005, section 3.3). Every program computes the plan for itself, from one load
of the counts: a kernel for it alone would take 2 to 3 us, of the 70 to 130 that decoding takes on an H200.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.types import Index

NUM_SMS = 132  # of an H200
MAX_RESIDENT_PROGRAMS = 2 * NUM_SMS  # one wave at occupancy 2; with 528 and 1056, 2 to 8 % and 5 to 15 % slower
MIN_TILES_PER_SPLIT = 2  # tiles of keys; with fewer, starting and merging would take longer than they do
MIN_BUSY_FRACTION = 0.75  # of the SMs, for one program on each to be enough
MAX_MERGE_PROGRAMS = 16 * NUM_SMS  # of one warp each: those resident at once
# Where there are several requests, of which few are split. H200, us of 2112 and 528 programs that plan and find none:
# 64 requests 2.9 and 1.9, 32 requests 2.0 and 1.7; 8 requests of 16384 keys, all split, 2.6 and 2.8.
FEW_MERGE_PROGRAMS = 4 * NUM_SMS
MAX_SORTED_ROWS = 64  # rows that are sorted by comparing each with each
# Added to the exact number of splits of a row before it is rounded down: 1.2 becomes 2, else such rows would end last;
# of 8.25 or 16.5 the fraction is little, and one more split for each row would be more than are resident at once.
ROUND_UP, ROUND_MANY = 0.8, 2.0


def num_splits(heads: int, resident: int = MAX_RESIDENT_PROGRAMS) -> int:
    """KV splits for each of so many key heads, over all rows: no more than are resident at once.

    With more, the last programs run alone (tail wave): H200, D 128, 49.5 us in 9 splits (288 programs), 45.7 in 8.
    """
    return max(1, resident // heads)


def even_splits(rows: int) -> int:
    """Splits of each of so many equal rows: one program for each SM, if that keeps enough SMs busy.

    H200, jax 0.11.2, bf16, one query, kernels and merging in us, with one and with two programs for each: (B, Hq, Hkv,
    S, D) = (8, 32, 8, 16384, 128) 132 and 134, (1, 32, 8, 65536, 128) 74.1 and 77.
    """
    splits = max(1, NUM_SMS // rows)
    idle = rows * splits < MIN_BUSY_FRACTION * NUM_SMS
    return max(1, MAX_RESIDENT_PROGRAMS // rows) if idle else splits


def max_items(rows: int, target: int) -> int:
    """The most work items (splits) that `row_splits` makes of so many rows."""
    return rows + target


def row_splits(tiles: jax.Array, copies: jax.Array, target: int, min_tiles: int = MIN_TILES_PER_SPLIT) -> jax.Array:
    """Splits of each row, int32 [rows]; 0 where there are no copies of it.

    Args:
      tiles: Tiles of keys that a row visits, int32 [rows].
      copies: How many rows there are of that kind, int32 [rows].
      target: Splits to aim at, over all rows; there are at most ``max_items`` of it.
      min_tiles: Fewest tiles of a split.
    """
    total = jnp.sum((tiles * copies).astype(jnp.float32))
    size = tiles.astype(jnp.float32) * (target / jnp.maximum(total, 1.0))
    limit = jnp.maximum(lax.div(tiles, min_tiles), 1)
    rounded = jnp.floor(size + jnp.minimum(ROUND_UP, ROUND_MANY / jnp.maximum(size, 1.0))).astype(jnp.int32)
    splits = jnp.minimum(jnp.maximum(rounded, 1), limit)
    return jnp.where(copies > 0, splits, 0)


def find_work_item(counts: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row of a work item, where row i has ``counts[i]`` items, and the item's index in the row.

    Past the last item, the row is ``len(counts)``.
    """
    before = jnp.cumsum(counts) <= item
    return jnp.sum(before.astype(jnp.int32)), item - jnp.sum(jnp.where(before, counts, 0))


def find_longest_first(tiles: jax.Array, counts: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds a work item with the longest splits first, so that short ones fill the tail; for few rows only.

    `tiles` are tiles of keys of each row, `counts` its splits, 0 for padding rows.
    """
    if counts.shape[0] > MAX_SORTED_ROWS:
        return find_work_item(counts, item)
    length = lax.div(tiles + (counts - 1), jnp.maximum(counts, 1))
    i = lax.broadcasted_iota(jnp.int32, counts.shape, 0)
    longer = (length[None, :] > length[:, None]) | ((length[None, :] == length[:, None]) & (i[None, :] < i[:, None]))
    before = jnp.sum(jnp.where(longer, counts[None, :], 0), axis=1)
    is_here = (before <= item) & (item < before + counts)
    row = jnp.min(jnp.where(is_here, i, counts.shape[0]))
    return row, item - jnp.sum(jnp.where(is_here, before, 0))


def at(values: jax.Array, row: jax.Array) -> jax.Array:
    """The value of one row; 0 past the last."""
    return jnp.sum(jnp.where(lax.broadcasted_iota(jnp.int32, values.shape, 0) == row, values, 0))


def program_of(axis: int = 0) -> tuple[Index, Index]:
    """This program and the number of programs of an axis; the interpreter knows neither in loops and branches."""
    return pl.program_id(axis), pl.num_programs(axis)


def grid_stride(program: tuple[Index, Index], rows: jax.Array, work: Callable[[jax.Array], None]) -> None:
    """Grid-stride loop: calls ``work(row)`` for every row of a program, from `program_of`."""
    first, programs = program
    rounds = lax.div(jnp.maximum(rows - first, 0) + (programs - 1), programs)

    def round_(i: jax.Array, done: jax.Array) -> jax.Array:
        work(i * programs + first)
        return done

    lax.fori_loop(0, rounds, round_, 0)


def split_range(total: Index, i: Index, splits: Index) -> tuple[jax.Array, jax.Array]:
    """First tile and end of the ith of so many even splits of a walk."""
    size = lax.div(total + (splits - 1), jnp.maximum(splits, 1))
    return jnp.minimum(i * size, total), jnp.minimum((i + 1) * size, total)
