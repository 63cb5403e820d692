"""Limits of a mask: the first and the last key that each query attends to, and the transpose.

Documents, windows and causal masks show consecutive keys to each query. Then a kernel compares the index along its loop
with two values of a row, and loads no ids. The limits are derived from the program of a mask once, where a mask is
made, and the values of its captured arrays decide whether they are the mask.

H100, jax 0.11.2, bf16, 12 documents in 16384 tokens, 16 heads, us with limits and without: forward 310 and 327,
backward 916 and 982 at head size 128; 221 and 230, 589 and 600 at 64.
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
from pallas_kernels.program import patterns
from pallas_kernels.program.build import IndexRanges
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.intervals import MAX_LOADED
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.program.ranges import COMPARISONS
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

    A clause compares the key with a value of the query, or a function of the key with one for equality. It may not use
    the head. What compares indices alone has no need of arrays.
    """
    program = program_of(mod, IndexRanges(batch, 1, *lengths))
    if isinstance(program, Refusal) or not program.loads or max(lengths) > MAX_LOADED:
        return None
    analysis = _Analysis(evaluation_at(program, operands, (b, jnp.int32(0)), Grid(lengths, lengths)), lengths)
    if not all(analysis.add(clause) for part in patterns.clauses(program) for clause in part):
        return None
    return analysis.limits()


class _Analysis:
    """The limits of keys under the clauses so far, [T]."""

    def __init__(self, evaluation: Evaluation, lengths: tuple[int, int]) -> None:
        self.evaluation, self.lengths = evaluation, lengths
        self.first, self.end = jnp.zeros(lengths[0], jnp.int32), jnp.full(lengths[0], lengths[1], jnp.int32)
        self.exact = jnp.bool_(True)

    def add(self, clause: Node) -> bool:
        """Adds a clause; False if it has no limits."""
        if Axes.COLUMN not in clause.kind:
            self._within(jnp.int32(0), jnp.where(self._rows(clause), self.lengths[1], 0))
            return True
        if clause.op == "eq":
            kinds = {node.kind: node for node in clause.inputs[::-1] if node.dtype.kind in "iu"}
            key = kinds.pop(Axes.COLUMN, None)
            if key is None or not kinds or Axes.TILE in kinds:
                return False
            self._add_equal(self._rows(*kinds.values()), self.evaluation(key)[0])
            return True
        sides = [self._affine(node) for node in clause.inputs] if clause.op in COMPARISONS else []
        if not sides or None in sides:
            return False
        (slope, value), (other_slope, other) = (x for x in sides if x is not None)
        sign, least = COMPARISONS[clause.op]
        slope, value = sign * (slope - other_slope), sign * (value - other)
        if slope not in (1, -1):
            return False
        if slope == 1:
            self._within(least - value, jnp.int32(self.lengths[1]))
        else:
            self._within(jnp.int32(0), value - least + 1)
        return True

    def _within(self, first: jax.Array, end: jax.Array) -> None:
        self.first, self.end = jnp.maximum(self.first, first), jnp.minimum(self.end, end)

    def _rows(self, node: Node) -> jax.Array:
        """The values of a node that does not depend on the key, [T]."""
        value = self.evaluation(node)
        return jnp.broadcast_to(value if node.kind == Axes.UNIFORM else value[0], self.lengths[:1])

    def _affine(self, node: Node) -> tuple[int, jax.Array] | None:
        """A node as ``slope * key + value``, with a value of the query; it must not wrap."""
        if Axes.COLUMN not in node.kind:
            value = self._rows(node).astype(jnp.int32)
            self.exact &= jnp.all(jnp.abs(value) <= MAX_LOADED)
            return (0, value) if node.dtype == np.int32 else None
        if node.op == "input":
            return 1, jnp.int32(0)
        sides = [self._affine(x) for x in node.inputs] if node.op in ("add", "sub", "neg") else []
        if not sides or None in sides:
            return None
        (slope, value), *others = (x for x in sides if x is not None)
        for other_slope, other in others:
            sign = -1 if node.op == "sub" else 1
            slope, value = slope + sign * other_slope, value + sign * other
        return (-slope, -value) if node.op == "neg" else (slope, value)

    def _add_equal(self, of_query: jax.Array, of_key: jax.Array) -> None:
        """The keys whose value is that of the query; exact if all keys between the first and the last have it."""
        order = jnp.argsort(of_key).astype(jnp.int32)
        ranks = lambda side: jnp.searchsorted(of_key[order], of_query, side=side, method="scan_unrolled")
        begin, end = ranks("left"), ranks("right")
        first, last = order[jnp.minimum(begin, order.size - 1)], order[end - 1]
        self.exact &= jnp.all((end == begin) | (last - first == end - 1 - begin))
        self._within(first, jnp.where(end > begin, last + 1, 0))

    def limits(self) -> RowLimits:
        """The limits in both directions; limits of keys must ascend to have a transpose."""
        T, S = self.lengths
        empty = self.first >= self.end
        reached = lax.cummax(jnp.where(empty, 0, self.end))  # an empty row comes between its neighbors
        first, end = (jnp.where(empty, reached, x) for x in (self.first, self.end))
        exact = self.exact & jnp.all(first[1:] >= first[:-1]) & jnp.all(end[1:] >= end[:-1])
        key = jnp.arange(S, dtype=jnp.int32)
        count = lambda x: jnp.searchsorted(x, key, side="right", method="scan_unrolled").astype(jnp.int32)
        either = lambda first, end, length: jnp.where(exact, jnp.stack([first, end]), jnp.array([[-1], [length]]))
        return RowLimits(either(first, end, S), either(count(end), count(first), T))
