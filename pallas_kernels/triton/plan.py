"""Dividing the keys of uneven rows among programs, inside of the kernels.

Each row (a sequence, or a tile of its queries) has its own number of tiles of keys, known only on the device. Rows get
parts in proportion to their tiles, so that a few long ones keep the whole GPU busy (as the planner of FlashInfer does
on the host: Ye et al. 2025, arXiv:2501.01005, section 3.3). Every program computes the plan for itself, from one load
of the counts: a kernel for it alone would take 2 to 3 us, of the 70 to 130 that decoding takes on an H200.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H200; with 528 and 1056, 2 to 8 % and 5 to 15 % slower
LEAST_TILES = 2  # of a part: with fewer, starting and merging would take longer than they do
ROUND_UP = 0.8  # a row whose share is 1.2 parts stays whole: another part costs a merge, and gains nothing with 2 waves


def shares_for(heads: int) -> int:
    """How many shares the work of each of so many key heads is divided into."""
    return max(1, pl.cdiv(ENOUGH_PROGRAMS, heads))


def most_items(rows: int, shares: int) -> int:
    """The most parts that `parts_of` makes of so many rows."""
    return rows + shares


def parts_of(tiles: jax.Array, copies: jax.Array, shares: int) -> jax.Array:
    """How many parts each row is divided into; 0 where there are no copies of it.

    Args:
      tiles: Tiles of keys that a row visits, int32 [rows].
      copies: How many rows there are of that kind, int32 [rows].
      shares: Into how many the work is divided; the parts of all rows are at most ``most_items`` of it.
    """
    total = jnp.sum((tiles * copies).astype(jnp.float32))
    share = tiles.astype(jnp.float32) * (shares / jnp.maximum(total, 1.0))
    most = jnp.maximum(lax.div(tiles, LEAST_TILES), 1)
    parts = jnp.minimum(jnp.maximum(jnp.floor(share + ROUND_UP).astype(jnp.int32), 1), most)
    return jnp.where(copies > 0, parts, 0)


def locate(counts: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In which row an item is, where each row has so many, and which of the row's it is.

    Past the last item, the row is ``len(counts)``.
    """
    before = jnp.cumsum(counts) <= item
    return jnp.sum(before.astype(jnp.int32)), item - jnp.sum(jnp.where(before, counts, 0))


def at(values: jax.Array, row: jax.Array) -> jax.Array:
    """The value of one row; 0 past the last."""
    return jnp.sum(jnp.where(lax.broadcasted_iota(jnp.int32, values.shape, 0) == row, values, 0))


def part_of(total: jax.Array, nth: jax.Array, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the nth of so many even parts of a walk starts and ends."""
    share = lax.div(total + (parts - 1), jnp.maximum(parts, 1))
    return jnp.minimum(nth * share, total), jnp.minimum((nth + 1) * share, total)
