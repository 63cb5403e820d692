"""States of blocks (empty, partial, full) under a mask, by intervals over all blocks at once.

What depends on the query alone is evaluated for each query, and what depends on the key alone for each key: so their
minimum and maximum in a block are exact, also those of captured arrays (the documents of a block). Interval arithmetic
bounds only what depends on both. Integers and booleans are bounded; what is computed from floats stays undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.plan import Refusal, program_of
from pallas_kernels.program.build import IndexRanges, Program
from pallas_kernels.program.evaluate import ArraySpace, Evaluation
from pallas_kernels.program.intervals import MAX_LOADED, Interval, IntervalAnalysis, Visibility, result_bounds
from pallas_kernels.program.ir import Axes, Bounds, Node, reachable
from pallas_kernels.types import Mod

_INTEGERS = frozenset(map(np.dtype, (np.int8, np.uint8, np.int16, np.uint16, np.int32)))  # that int32 holds


class Grid(NamedTuple):
    """A grid of blocks that covers some queries and keys; sizes are positive."""

    lengths: tuple[int, int]
    block_size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        rows, columns = (-(-n // size) for n, size in zip(self.lengths, self.block_size, strict=True))
        return rows, columns

    def positions(self, axis: int) -> jax.Array:
        """The positions in each block along an axis, int32 [blocks, size]; the last one stands for those past it."""
        blocks, size, length = self.shape[axis], self.block_size[axis], self.lengths[axis]
        return jnp.minimum(jnp.arange(blocks * size, dtype=jnp.int32), length - 1).reshape(blocks, size)


def visibility_of_blocks(
    mod: Mod, operands: Sequence[jax.Array], at: tuple[jax.Array, jax.Array], leading: tuple[int, int], grid: Grid
) -> Visibility | None:
    """Classifies all blocks, [rows, columns], of a batch entry and query head; positions past the lengths do not count.

    `leading` are the numbers of batch entries and heads. None if nothing is known of any block, or the mod has no tile
    program.
    """
    program = program_of(mod, IndexRanges(*leading, *grid.lengths))
    if isinstance(program, Refusal):
        return None
    analysis = _BlockAnalysis(evaluation_at(program, operands, at, grid), {})
    return None if analysis.interval(program.output) is None else analysis.visibility(program.output, grid.shape)


def evaluation_at(
    program: Program, operands: Sequence[jax.Array], at: tuple[jax.Array, jax.Array], grid: Grid
) -> Evaluation:
    """Starts to evaluate a mask at a batch entry and head; a row value is [rows of blocks, queries of a block]."""
    index_values = {"b": at[0], "h": at[1], "q": grid.positions(0), "k": grid.positions(1)}
    shapes = {Axes.ROW: index_values["q"].shape, Axes.COLUMN: index_values["k"].shape}
    return Evaluation(ArraySpace(operands, shapes), {node: index_values[node.value] for node in program.arguments})


def hides_all(mod: Mod, leading: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """True if bounds prove that no query attends to a key, whatever the captured arrays hold.

    `leading` are the batch entries and query heads, `lengths` the numbers of queries and of keys.
    """
    program = program_of(mod, IndexRanges(*leading, *lengths))
    return not isinstance(program, Refusal) and program.output.bounds == (0, 0)


class _BlockAnalysis(IntervalAnalysis):
    """Intervals of the nodes of one program: [rows, 1] of row values, [1, columns] of column values."""

    def _is_of_tiles(self, node: Node) -> bool:
        return node.kind == Axes.TILE

    def _of_rows(self, node: Node) -> Interval | None:
        """The exact interval of a value of one axis, or of none."""
        is_boolean = node.dtype == np.bool_
        if not (is_boolean or node.dtype in _INTEGERS) or any(x.dtype.kind not in "iub" for x in reachable([node])):
            return None
        assert self.evaluation is not None  # of all blocks at once
        value = self.evaluation(node).astype(jnp.int32)
        low, high = (value, value) if node.kind == Axes.UNIFORM else (value.min(axis=1), value.max(axis=1))
        if node.kind != Axes.UNIFORM:
            low, high = (x[:, None] if node.kind == Axes.ROW else x[None] for x in (low, high))
        limits = (0, 1) if is_boolean else (int(np.iinfo(node.dtype).min), int(np.iinfo(node.dtype).max))
        return Interval(low, high, node.bounds or limits)

    def _within_range(self, node: Node, ins: list[Interval]) -> tuple[list[Interval], Bounds | None]:
        """The inputs of an integer and its static bounds, for which large numbers are assumed not to occur."""
        bounds = result_bounds(node, ins)
        if bounds is None:
            for x in ins:
                if x.bounds[0] < -MAX_LOADED or x.bounds[1] > MAX_LOADED:
                    self.out_of_range.append((x.low < -MAX_LOADED) | (x.high > MAX_LOADED))
            ins = [x._replace(bounds=(max(x.bounds[0], -MAX_LOADED), min(x.bounds[1], MAX_LOADED))) for x in ins]
            bounds = result_bounds(node, ins)
        return ins, bounds
