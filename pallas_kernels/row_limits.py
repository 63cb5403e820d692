"""Limits of a mask: the first and the last key that each query attends to, and the transpose.

Documents, windows and causal masks show consecutive keys to each query. Then a kernel compares the index along its loop
with two values of a row, and loads no ids. The limits are derived from the program of a mask once, where a mask is
made, and the values of its captured arrays decide whether they are the mask.

H100, jax 0.11.2, bf16, 12 documents in 16384 tokens, 16 heads, us with limits and without: forward 310 and 327.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.block_intervals import Grid, evaluation_at
from pallas_kernels.plan import Refusal, program_of
from pallas_kernels.program.build import IndexRanges
from pallas_kernels.program.intervals import MAX_LOADED, Interval, IntervalAnalysis, Span
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.program.ranges import Range, Solver
from pallas_kernels.types import Mod


class RowLimits(NamedTuple):
    """Beginnings and ends of the visible indices of rows, int32; a kernel reads them as captured arrays of the mask.

    Both ascend, and each is the mask. If none are, all rows begin at -1 and end at the length: so they hide nothing.
    """

    keys: jax.Array  # [2, T]: of each query the first visible key, and the one after the last
    queries: jax.Array  # [2, S]: of each key the first query that sees it, and the one after the last


def row_limits(
    mod: Mod, operands: Sequence[jax.Array], b: jax.Array, batch: int, lengths: tuple[int, int]
) -> RowLimits | None:
    """The limits of a mask at a batch entry; None if its program is no conjunction of limits, or captures nothing.

    A clause compares the key, or a distance from it or a quotient of it, with a value of the query; or, for equality, a
    function of the key with one. It may not use the head. What compares indices alone has no need of arrays.
    """
    program = program_of(mod, IndexRanges(batch, 1, *lengths))
    if isinstance(program, Refusal) or not program.loads or max(lengths) > MAX_LOADED:
        return None
    evaluation = evaluation_at(program, operands, (b, jnp.int32(0)), Grid(lengths, lengths))
    solver = _RowSolver(Axes.COLUMN, lengths[1], _RowAnalysis(evaluation, {Axes.COLUMN: Span(0, lengths[1] - 1)}))
    visible = solver.visible(program.output)
    return solver.limits(visible, lengths) if solver.decides_all else None


class _RowAnalysis(IntervalAnalysis):
    """Values of the query are known exactly: their intervals are arrays [T] of two equal ends."""

    def _of_rows(self, node: Node) -> Interval | None:
        if node.dtype not in (np.int32, np.bool_):
            return None
        value = self.values(node).astype(jnp.int32)
        self.out_of_range.append(jnp.any((value < -MAX_LOADED) | (value > MAX_LOADED)))
        return Interval(value, value, (-MAX_LOADED, MAX_LOADED))

    def values(self, node: Node) -> jax.Array:
        """The values of a node that depends on one index."""
        assert self.evaluation is not None
        value = self.evaluation(node)
        return value if node.kind == Axes.UNIFORM else value[0]


class _RowSolver(Solver):
    """The visible keys of each query; of integers that are equal, both may be any functions of their index."""

    analysis: _RowAnalysis

    def visible(self, node: Node, *, negated: bool = False) -> Range:
        if Axes.COLUMN not in node.kind:
            return self._of_other(node, negated=negated)
        kinds = {x.kind: x for x in node.inputs[::-1] if x.dtype.kind in "iu"}
        if node.op != "eq" or negated or Axes.TILE in kinds or len(kinds) < 2:
            return super().visible(node, negated=negated)
        key = kinds.pop(Axes.COLUMN)
        return self._equal(*map(self.analysis.values, (*kinds.values(), key)))

    def _equal(self, of_query: jax.Array, of_key: jax.Array) -> Range:
        """The keys whose value is that of the query; exact if all keys between the first and the last have it."""
        order = jnp.argsort(of_key).astype(jnp.int32)
        ranks = lambda side: jnp.searchsorted(of_key[order], of_query, side=side, method="scan_unrolled")
        begin, end = ranks("left"), ranks("right")
        first, last = order[jnp.minimum(begin, order.size - 1)], order[end - 1]
        self.analysis.out_of_range.append(jnp.any((end > begin) & (last - first != end - 1 - begin)))
        return Range(first, jnp.where(end > begin, last + 1, 0), first, last + 1)

    def limits(self, visible: Range, lengths: tuple[int, int]) -> RowLimits:
        """The limits in both directions; limits of keys must ascend to have a transpose."""
        T, S = lengths
        first, end = (jnp.broadcast_to(x, T) for x in visible[:2])
        empty = first >= end
        reached = lax.cummax(jnp.where(empty, 0, end))  # an empty row comes between its neighbors
        first, end = (jnp.where(empty, reached, x) for x in (first, end))
        exact = jnp.all(first[1:] >= first[:-1]) & jnp.all(end[1:] >= end[:-1])
        for unsafe in self.analysis.out_of_range:
            exact &= ~unsafe
        key = jnp.arange(S, dtype=jnp.int32)
        count = lambda x: jnp.searchsorted(x, key, side="right", method="scan_unrolled").astype(jnp.int32)
        either = lambda first, end, length: jnp.where(exact, jnp.stack([first, end]), jnp.array([[-1], [length]]))
        return RowLimits(either(first, end, S), either(count(end), count(first), T))
