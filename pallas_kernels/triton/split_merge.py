"""Joins what several programs found of one row of queries, each over a part of the keys."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.head_chunks import chunks


class Parts(NamedTuple):
    """Where the parts of rows are kept: refs to out [slots, heads, rows, Dv] and lse [slots, heads, rows], float32."""

    out: Any
    lse: Any


RUN = 16  # parts that a warp reads at once: 64 registers of a thread at 128 columns
MANY_ROWS = 132  # from which on there are programs enough without more warps


def parts_at_once(most: int, rows: int) -> tuple[int, int]:
    """How many parts a program that merges reads at once, and its warps.

    Args:
      most: Parts that a row may have.
      rows: How many rows there may be to merge: if few, each of them may have many parts.
    """
    run = min(1 << (most - 1).bit_length(), RUN if rows > MANY_ROWS else 4 * RUN)
    return max(run, 2), max(1, run // RUN)


def merge_row(
    parts: Parts, run: int, slot: Any, count: Any, at: tuple[Any, Any]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Output, in chunks of columns, and lse of one row.

    Args:
      parts: The parts.
      run: How many are read at once, a power of two.
      slot: The first of the row's; the others follow.
      count: How many there are; with none, the row has seen nothing.
      at: Head and row.
    """
    size = parts.out.shape[-1]
    zeros = tuple(jnp.zeros((width,), jnp.float32) for _, width in chunks(size))
    start = (jnp.full((), -jnp.inf, jnp.float32), jnp.zeros((), jnp.float32), zeros)
    runs = lax.div(count + (run - 1), run)
    top, total, sums = lax.fori_loop(0, runs, functools.partial(_take_in, parts, run, (slot, count), at), start)
    empty = total == 0.0
    safe = jnp.where(empty, 1.0, total)
    return tuple(x / safe for x in sums), jnp.where(empty, -jnp.inf, top + jnp.log(safe))


def _take_in(parts: Parts, run: int, slots: tuple[Any, Any], at: tuple[Any, Any], number: Any, state: Any) -> Any:
    """Adds a run of parts to the weighted sums of a row."""
    (top, total, sums), (first_slot, count), size = state, slots, parts.out.shape[-1]
    nth = number * run + lax.broadcasted_iota(jnp.int32, (run,), 0)
    there, slot = nth < count, first_slot + jnp.minimum(nth, count - 1)
    lse = plgpu.load(parts.lse.at[(slot, *at)], mask=there, other=-jnp.inf)
    new_top = jnp.maximum(top, jnp.max(lse))
    shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    share, keep = jnp.exp(lse - shift), jnp.exp(top - shift)
    added = []
    for (first, width), x in zip(chunks(size), sums, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (run, width), 1)
        slot_of, exists = (jnp.broadcast_to(y[:, None], column.shape) for y in (slot, there))
        values = plgpu.load(parts.out.at[(slot_of, *at, column)], mask=(column < size) & exists, other=0.0)
        added.append(x * keep + jnp.sum(values * share[:, None], axis=0))
    return new_top, total * keep + jnp.sum(share), tuple(added)
