"""Visible ranges of a mask: the keys that a tile of queries may attend to, and the transpose.

A mask that compares indices (causal, a window, a prefix, chunks) is solved for the index along a walk. What depends on
the other axis is bounded over a tile by `intervals`; so a range is a few int32 scalars of the number of the tile.
Where a mask has several ranges (sinks beside a window), the range that contains all is walked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation, Space
from pallas_kernels.program.intervals import IntervalAnalysis, Span
from pallas_kernels.program.ir import Bounds, Node, reachable
from pallas_kernels.types import Index

_INT32 = np.iinfo(np.int32)
_SIDES = {"ge": (1, 0), "gt": (1, 1), "le": (-1, 0), "lt": (-1, 1)}  # ``sign * (a - b) >= least``
_OPPOSITE = {"ge": "lt", "lt": "ge", "le": "gt", "gt": "le", "and": "or", "or": "and", "eq": "ne", "ne": "eq"}


class Range(NamedTuple):
    """A range of indices, int32; Python numbers are known while tracing, and empty ranges end at or before 0 or first.

    All visible indices are in [first, end). All of [full_first, full_end) are visible at each index of the tile.
    """

    first: Index
    end: Index
    full_first: Index
    full_end: Index


def visible_range(program: Program, walked: str, length: int, fixed: Span, at: Mapping[str, jax.Array]) -> Range | None:
    """The visible range along an axis of this length; None if nothing is known of it.

    Args:
      program: Of a mask.
      walked: The axis, ``"k"`` or ``"q"``.
      fixed: First and last index of a tile along the other axis; the last may be padding. Int32 of any shape.
      at: Batch entry ``"b"`` and query head ``"h"``, of a shape that broadcasts against `fixed`.
    """
    values = {node: at[node.value] for node in program.arguments if node.value in at}
    analysis = IntervalAnalysis(Evaluation(_Numbers(), values), {"q" if walked == "k" else "k": fixed})
    result = _Solver(walked, length, analysis).visible(program.output)
    is_known = all(isinstance(x, int) for x in result)
    return None if is_known and result == Range(0, length, 0, 0) else result


class _Bounded(NamedTuple):
    """Minimum and maximum over a tile, and static bounds of both."""

    low: Index
    high: Index
    bounds: Bounds


class _Numbers(Space):
    """Values that depend on the batch entry and the head alone."""

    def literal(self, node: Node) -> jax.Array:
        return jnp.full((), node.value.item(), node.dtype)

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        return x

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        raise AssertionError("captured arrays are not read")


class _Solver:
    """Ranges of the boolean nodes of a program."""

    def __init__(self, walked: str, length: int, analysis: IntervalAnalysis) -> None:
        self.walked, self.length, self.analysis = walked, length, analysis
        self.undecided = Range(0, length, 0, 0)

    def visible(self, node: Node, *, negated: bool = False) -> Range:
        """The range of a boolean node, or of its negation."""
        op = _OPPOSITE.get(node.op, node.op) if negated else node.op
        match op:
            case "call":
                return self.visible(node.inputs[0], negated=negated)
            case "not":
                return self.visible(node.inputs[0], negated=not negated)
            case "and" | "or":
                a, b = (self.visible(x, negated=negated) for x in node.inputs)
                return _intersection(a, b) if op == "and" else _union(a, b)
            case "select_n" if len(node.inputs) == 3 and node.inputs[0].dtype == np.bool_:
                which, *cases = node.inputs
                if_false, if_true = (self.visible(x, negated=negated) for x in cases)
                if_false = _intersection(self.visible(which, negated=True), if_false)
                return _union(if_false, _intersection(self.visible(which), if_true))
            case _ if self.walked not in node.kind:
                return self._of_fixed(node, negated=negated)
            case "ge" | "gt" | "le" | "lt":
                return self._compared(op, node)
            case "eq":
                return _intersection(self._compared("ge", node), self._compared("le", node))
            case "ne":
                return _union(self._compared("gt", node), self._compared("lt", node))
        return self.undecided

    def _of_fixed(self, node: Node, *, negated: bool) -> Range:
        """The range of a condition on the other axis: all indices or none."""
        interval = self._interval(node)
        if interval is None:
            return self.undecided
        low, high = interval[:2]
        return self._all_where(*((high == 0, low == 0)[::-1] if negated else (high != 0, low != 0)))

    def _all_where(self, some: _Condition, everything: _Condition) -> Range:
        return Range(0, _where(some, self.length, 0), 0, _where(everything, self.length, 0))

    def _interval(self, node: Node) -> _Bounded | None:
        """Bounds of a value of the other axis; None where an array is read, or an integer may wrap."""
        if node.bounds is not None and node.bounds[0] == node.bounds[1]:
            return _Bounded(*node.bounds, node.bounds)
        if any(x.op == "load" or x.bounds is None for x in reachable([node])):
            return None
        interval = self.analysis.interval(node)
        return None if interval is None else _Bounded(*interval)

    def _compared(self, op: str, node: Node) -> Range:
        """The range of a comparison of two integers."""
        if any(x.dtype != np.int32 or x.bounds is None for x in node.inputs):
            return self.undecided
        (sign, least), (a, b) = _SIDES[op], node.inputs
        return self._at_least([(sign, a), (-sign, b)], _Bounded(least, least, (least, least)))

    def _at_least(self, terms: Sequence[tuple[int, Node]], value: _Bounded) -> Range:
        """The range in which a sum of multiples is at least a value of the other axis."""
        factors: dict[Node, int] = {}
        for factor, node in terms:
            self._add(factors, factor, node)
        unknown: list[tuple[Node, int]] = []
        for node, factor in factors.items():
            if self.walked in node.kind:
                unknown += [(node, factor)] if factor else []
                continue
            interval = self._interval(node)
            difference = None if interval is None else _minus(value, factor, interval)
            if difference is None:
                return self.undecided
            value = difference
        if not unknown:
            return self._all_where(value.low <= 0, value.high <= 0)
        [(node, factor), *others] = unknown
        quotient = None if others else _quotient(value, abs(factor))
        return self.undecided if quotient is None else self._solved(node, 1 if factor > 0 else -1, quotient)

    def _add(self, factors: dict[Node, int], factor: int, node: Node) -> None:
        """Adds a multiple of a node to a sum, term by term as far as it depends on the walked index."""
        terms = [(factor, node)] if self.walked not in node.kind or node.bounds is None else _terms(node, factor)
        if terms == [(factor, node)]:
            factors[node] = factors.get(node, 0) + factor
            return
        for term in terms:
            self._add(factors, *term)

    def _solved(self, node: Node, sign: int, value: _Bounded) -> Range:
        """The range in which a node, or with a sign of -1 its negative, is at least a value."""
        length, inputs = self.length, node.inputs
        match node.op:
            case "input" if sign > 0:
                low, high, _ = _clipped(value, (0, length))
                return Range(low, length, high, length)
            case "input":
                low, high, _ = _clipped(value, (1 - length, 1))
                return Range(0, 1 - low, 0, 1 - high)
            case "div" if inputs[1].op == "literal" and inputs[0].bounds and node.bounds and inputs[0].bounds[0] >= 0:
                divisor, largest = int(inputs[1].value), node.bounds[1]
                if divisor > 0 and (largest + 1) * divisor <= _INT32.max:
                    least = 0 if sign > 0 else 1 - divisor  # -x // d >= v where -x >= v * d - (d - 1)
                    value = _clipped(value, (0, largest + 1) if sign > 0 else (-largest, 1))
                    ends = [x * divisor + least for x in (*value[:2], *value.bounds)]
                    return self._at_least([(sign, inputs[0])], _Bounded(*ends[:2], (ends[2], ends[3])))
            case "abs":
                both = [self._at_least([(one, inputs[0])], value) for one in (1, -1)]
                return _union(*both) if sign > 0 else _intersection(*both)
            case "max" | "min":
                both = [self._at_least([(sign, x)], value) for x in inputs]
                return _union(*both) if (node.op == "max") == (sign > 0) else _intersection(*both)
        return self.undecided


def _terms(node: Node, factor: int) -> list[tuple[int, Node]]:
    """The terms of a multiple of a sum; a node that is none is its own."""
    match node.op:
        case "call" | "neg":
            return [(factor if node.op == "call" else -factor, node.inputs[0])]
        case "add" | "sub":
            return [(factor, node.inputs[0]), (factor if node.op == "add" else -factor, node.inputs[1])]
        case "mul":
            for number, other in (node.inputs, node.inputs[::-1]):
                if number.op == "literal":
                    return [(factor * int(number.value), other)]
    return [(factor, node)]


# --- arithmetic on Python numbers and int32 arrays: what is known while tracing stays known

_Condition = bool | jax.Array


def _where(condition: _Condition, x: Index, y: Index) -> Index:
    if isinstance(condition, bool):
        return x if condition else y
    return jnp.where(condition, x, y)


def _greatest(x: Index, y: Index) -> Index:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def _least(x: Index, y: Index) -> Index:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def _intersection(a: Range, b: Range) -> Range:
    return Range(*(function(x, y) for function, x, y in zip((_greatest, _least) * 2, a, b, strict=True)))


def _union(a: Range, b: Range) -> Range:
    """The range around two; of the indices that are visible throughout, the longer range if they are apart."""
    hull = Range(*(function(x, y) for function, x, y in zip((_least, _greatest) * 2, a, b, strict=True)))
    pick = lambda i: _where(a.end <= a.first, b[i], _where(b.end <= b.first, a[i], hull[i]))
    together = _greatest(a.full_first, b.full_first) <= _least(a.full_end, b.full_end)
    longer = a.full_end - a.full_first >= b.full_end - b.full_first
    pick_full = lambda i: _where(together, hull[i], _where(longer, a[i], b[i]))
    return Range(pick(0), pick(1), pick_full(2), pick_full(3))


def _clipped(x: _Bounded, limits: Bounds) -> _Bounded:
    clip = lambda end: _least(_greatest(end, limits[0]), limits[1])
    low, high, first, last = map(clip, (*x[:2], *x.bounds))
    return _Bounded(low, high, (first, last))


def _minus(x: _Bounded, factor: int, y: _Bounded) -> _Bounded | None:
    """``x - factor * y``; None if it might wrap."""
    low, high = (y.high, y.low) if factor > 0 else (y.low, y.high)
    first, last = y.bounds[::-1] if factor > 0 else y.bounds
    bounds = x.bounds[0] - factor * first, x.bounds[1] - factor * last
    if bounds[0] < _INT32.min or bounds[1] > _INT32.max:
        return None
    return _Bounded(x.low - factor * low, x.high - factor * high, bounds)


def _quotient(x: _Bounded, divisor: int) -> _Bounded | None:
    """``ceil(x / divisor)`` of a positive divisor; None if it might wrap."""
    if divisor == 1:
        return x
    more = max(0, -x.bounds[0] // divisor + 1)  # `lax.div` rounds toward 0: so the dividend is made positive
    if x.bounds[1] + (more + 1) * divisor > _INT32.max:
        return None
    ceil = lambda end: (
        -(-end // divisor) if isinstance(end, int) else lax.div(end + (more * divisor + divisor - 1), divisor) - more
    )
    return _Bounded(ceil(x.low), ceil(x.high), (ceil(x.bounds[0]), ceil(x.bounds[1])))
