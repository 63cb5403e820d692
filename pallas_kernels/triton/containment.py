"""Repairs: tiles with marks (`pallas_kernels.softmax`) are recomputed with cleared operands.

What is attended to keeps its NaN: for dS it comes through the scores, for weights `Attended` says which rows to leave
alone.

A repair is a launch of its own because registers are allocated for a whole kernel: in the same kernel it took decoding
from 96 registers a thread to 244, and had the forward kernel spill 1.6 KB (compiled for sm_90a, jax 0.11.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.head_chunks import Columns
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Location, Ref

MAX_TILE = 64  # of a repair, in queries and keys
MAX_PROGRAMS = 132  # of a repair of many tiles: one for each SM
MARKS_AT_ONCE = 4096  # marks that a program reads at once


def cleared(rows: Columns) -> Columns:
    """Rows with 0 for what is NaN or infinite."""
    return tuple(jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros_like(x)) for x in rows)


class Attended(NamedTuple):
    """Rows whose sums must be NaN: those that attend to a row which is not finite."""

    bad: jax.Array  # float32 [rows]: 1 or 0

    @classmethod
    def none(cls, rows: int) -> Attended:
        """Nothing was attended to."""
        return cls(jnp.zeros((rows,), jnp.float32))

    def to(self, rows: Columns, visible: jax.Array | None) -> Attended:
        """Adds a tile: rows of the other operand, and the mask [rows, rows of the other operand]."""
        has_nan = mark(*rows)
        bad = jnp.where(has_nan == has_nan, 0.0, 1.0)
        attended = jnp.max(bad) if visible is None else jnp.max(jnp.where(visible, bad[None, :], 0.0), axis=1)
        return Attended(jnp.maximum(self.bad, attended))

    def keep(self, before: Columns, clean: Columns) -> Columns:
        """The old sums where they must be NaN, the recomputed ones elsewhere."""
        bad = (self.bad > 0.0)[:, None]
        return tuple(jnp.where(bad, x.astype(y.dtype), y) for x, y in zip(before, clean, strict=True))


def repair_tiles(tiles: Tiles) -> Tiles:
    """Small tiles, for a launch that hardly ever computes; they divide the blocks of the mask as the given ones do."""
    return Tiles(min(tiles.block_q, MAX_TILE), min(tiles.block_kv, MAX_TILE), 4, 1)


class Marked(NamedTuple):
    """Marks of rows, and how they are divided into tiles."""

    spec: AttentionSpec
    heads: int
    length: int  # rows of a head
    tile: int  # rows of a tile

    @property
    def tiles(self) -> int:
        """Tiles of all heads and batch entries."""
        return self.heads * self.spec.B * pl.cdiv(self.length, self.tile)

    @property
    def programs(self) -> int:
        """Size of the grid: programs that take the tiles in a grid-stride loop."""
        return min(MAX_PROGRAMS, self.tiles)

    def launch(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[object],
        results: tuple[jax.Array, ...],
        tiles: Tiles,
        name: str,
    ) -> list[jax.Array]:
        """Runs ``kernel(self, *input refs, refs to the old results, *refs to the new ones)``, in the same memory."""
        kernel, grid = functools.partial(kernel, self), (self.programs,)
        return runner_of(self.spec).launch_in_place(kernel, inputs, results, name=name, grid=grid, tiles=tiles)

    def repair(self, marks: Ref, fix: Callable[[Location], None]) -> None:
        """Runs ``fix((b, h, index of the tile))`` for this program's tiles that hold a mark.

        The tiles of a program lie far apart, so that all programs share a sequence that is full of NaN. Marks are
        float32 [B, heads, length], or [B, heads, 1] for all of a head; NaN is a mark.
        """
        program, programs, last = pl.program_id(0), pl.num_programs(0), marks.shape[2] - 1
        count = max(1, MARKS_AT_ONCE // self.tile)

        def one(number: jax.Array) -> None:
            b, h, tile = location = self._locate(number)
            row = jnp.minimum(tile * self.tile + lax.broadcasted_iota(jnp.int32, (self.tile,), 0), last)
            pl.when(any_nan(runner_of(self.spec).load(marks.at[(b, h, row)])))(lambda: fix(location))

        def run(chunk: Index, state: jax.Array) -> jax.Array:
            start = program + chunk * count * programs
            number = start + lax.broadcasted_iota(jnp.int32, (count, self.tile), 0) * programs
            b, h, tile = self._locate(jnp.minimum(number, self.tiles - 1))
            row = jnp.minimum(tile * self.tile + lax.broadcasted_iota(jnp.int32, number.shape, 1), last)
            has_nan = any_nan(jnp.sum(runner_of(self.spec).load(marks.at[(b, h, row)]), axis=1))
            remaining = jnp.minimum(lax.div(self.tiles - start + (programs - 1), programs), count)
            each = lambda i, state: (one(start + i * programs), state)[1]
            return lax.fori_loop(0, jnp.where(has_nan, remaining, 0), each, state)

        lax.fori_loop(0, pl.cdiv(pl.cdiv(self.tiles, self.programs), count), run, jnp.int32(0))

    def _locate(self, number: jax.Array) -> Location:
        per_head = pl.cdiv(self.length, self.tile)
        head, tile = lax.div(number, per_head), lax.rem(number, per_head)
        return lax.div(head, self.heads), lax.rem(head, self.heads), tile


def any_nan(x: jax.Array) -> jax.Array:
    """True if any element is NaN."""
    return jnp.max(jnp.where(x == x, 0, 1)) > 0
