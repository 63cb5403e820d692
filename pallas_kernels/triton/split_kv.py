"""Dividing the keys of uneven rows among programs, inside of the kernels.

Each row (a sequence, or a tile of its queries) has its own number of tiles of keys, known only on the device. Rows get
parts in proportion to their tiles, so that a few long ones keep the whole GPU busy (as the planner of FlashInfer does
on the host: Ye et al. 2025, arXiv:2501.01005, section 3.3). Every program computes the plan for itself, from one load
of the counts: a kernel for it alone would take 2 to 3 us, of the 70 to 130 that decoding takes on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

MULTIPROCESSORS = 132  # of an H200
ENOUGH_PROGRAMS = 2 * MULTIPROCESSORS  # as many as run at once; with 528 and 1056, 2 to 8 % and 5 to 15 % slower
LEAST_TILES = 2  # of a part: with fewer, starting and merging would take longer than they do
LEAST_BUSY = 0.75  # of the multiprocessors, for one program on each to be enough
MERGING_PROGRAMS = 16 * MULTIPROCESSORS  # of one warp each: what runs at once
SORTED = 64  # rows that are put in order by comparing each with each
# What is added to the share of a row before it is cut to a whole number of parts: 1.2 shares are halved, else they
# would end last; of 8.25 or 16.5 the rest is little, and another part for each row would be more than run at once.
ROUND_UP, ROUND_MANY = 0.8, 2.0


def shares_for(heads: int) -> int:
    """How many shares the work of each of so many key heads is divided into: no more than run at once.

    With more, the last programs run alone: H200, jax 0.11.2, bf16, 64 queries of 32 heads over 8192 keys of their own
    head, D 128, the kernel alone: 49.5 us in 9 shares (288 programs), 45.7 in 8.
    """
    return max(1, ENOUGH_PROGRAMS // heads)


def even_parts(rows: int) -> int:
    """Into how many parts each of so many equal rows is divided: one program for each multiprocessor, if that may be.

    H200, jax 0.11.2, bf16, one query, kernels and merging in us, with one and with two programs for each: (B, Hq, Hkv,
    S, D) = (8, 32, 8, 16384, 128) 132 and 134, (1, 32, 8, 65536, 128) 74.1 and 77, (4, 16, 16, 16384, 64) 75.1 and
    76.4. Twice as many parts as programs run at once: (32, 32, 8, 4096, 128) 132 undivided, 138 in two.
    """
    parts = max(1, MULTIPROCESSORS // rows)
    idle = rows * parts < LEAST_BUSY * MULTIPROCESSORS
    return max(1, ENOUGH_PROGRAMS // rows) if idle else parts


def most_items(rows: int, shares: int) -> int:
    """The most parts that `parts_of` makes of so many rows."""
    return rows + shares


def parts_of(tiles: jax.Array, copies: jax.Array, shares: int, least: int = LEAST_TILES) -> jax.Array:
    """How many parts each row is divided into; 0 where there are no copies of it.

    Args:
      tiles: Tiles of keys that a row visits, int32 [rows].
      copies: How many rows there are of that kind, int32 [rows].
      shares: Into how many the work is divided; the parts of all rows are at most ``most_items`` of it.
      least: Fewest tiles of a part.
    """
    total = jnp.sum((tiles * copies).astype(jnp.float32))
    share = tiles.astype(jnp.float32) * (shares / jnp.maximum(total, 1.0))
    most = jnp.maximum(lax.div(tiles, least), 1)
    rounded = jnp.floor(share + jnp.minimum(ROUND_UP, ROUND_MANY / jnp.maximum(share, 1.0))).astype(jnp.int32)
    parts = jnp.minimum(jnp.maximum(rounded, 1), most)
    return jnp.where(copies > 0, parts, 0)


def locate(counts: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In which row an item is, where each row has so many, and which of the row's it is.

    Past the last item, the row is ``len(counts)``.
    """
    before = jnp.cumsum(counts) <= item
    return jnp.sum(before.astype(jnp.int32)), item - jnp.sum(jnp.where(before, counts, 0))


def locate_longest_first(tiles: jax.Array, counts: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `locate`, rows with the longest parts first, so that short ones fill what long ones leave; few rows only.

    Args:
      tiles: Of each row.
      counts: Parts of each row, 0 for rows that there are not.
      item: The item.
    """
    if counts.shape[0] > SORTED:
        return locate(counts, item)
    length = lax.div(tiles + (counts - 1), jnp.maximum(counts, 1))
    nth = lax.broadcasted_iota(jnp.int32, counts.shape, 0)
    longer = (length[None, :] > length[:, None]) | (
        (length[None, :] == length[:, None]) & (nth[None, :] < nth[:, None])
    )
    before = jnp.sum(jnp.where(longer, counts[None, :], 0), axis=1)
    here = (before <= item) & (item < before + counts)
    row = jnp.min(jnp.where(here, nth, counts.shape[0]))
    return row, item - jnp.sum(jnp.where(here, before, 0))


def at(values: jax.Array, row: jax.Array) -> jax.Array:
    """The value of one row; 0 past the last."""
    return jnp.sum(jnp.where(lax.broadcasted_iota(jnp.int32, values.shape, 0) == row, values, 0))


def by_turns(rows: jax.Array, take: Callable[[jax.Array], None]) -> None:
    """Calls ``take(row)`` for each row that is this program's, where all of a grid of one axis take rows by turns."""
    first, programs = pl.program_id(0), pl.num_programs(0)  # not in the loop, where the interpreter does not know them
    turns = lax.div(jnp.maximum(rows - first, 0) + (programs - 1), programs)

    def turn(nth: jax.Array, done: Any) -> Any:
        take(nth * programs + first)
        return done

    lax.fori_loop(0, turns, turn, 0)


def part_of(total: jax.Array, nth: jax.Array, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the nth of so many even parts of a walk starts and ends."""
    share = lax.div(total + (parts - 1), jnp.maximum(parts, 1))
    return jnp.minimum(nth * share, total), jnp.minimum((nth + 1) * share, total)
