"""States of tiles of keys (empty, partial, full) under a mask, by interval arithmetic on its program.

Uniform and row values are known exactly when a walk over keys begins, so their minimum and maximum are; column and tile
values have bounds that follow from the first and last key of a tile. So a causal mask or a window decides most tiles
without evaluating their elements (Moore 1966, Interval Analysis). What cannot be bounded (a load at a key, a hash that
wraps) leaves a tile undecided (partial), which is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Axes, Bounds, Node, bounds_of, reachable
from pallas_kernels.types import Index

MAX_LOADED = 1 << 24  # assumed bound of loaded numbers; if one is larger, nothing is decided: so nothing wraps


class Interval(NamedTuple):
    """Minimum and maximum, int32 (booleans are 0 and 1), and static bounds of both."""

    low: jax.Array
    high: jax.Array
    bounds: Bounds


class Visibility(NamedTuple):
    """Booleans for tiles of keys: `some` is False for empty tiles, `all` is True for full ones only."""

    some: jax.Array
    all: jax.Array


class Span(NamedTuple):
    """The first and last index of each tile along an axis, int32; the last may be padding."""

    first: Index
    last: Index


def visibility(program: Program, evaluation: Evaluation, first: jax.Array, last: jax.Array) -> Visibility:
    """Classifies tiles by their first and last keys, int32 of any shape, which may be padding.

    The program of a mask mod is evaluated with the values of all arguments but the keys.
    """
    return IntervalAnalysis(evaluation, {"k": Span(first, last)}).visibility(program.output, jnp.shape(first))


class IntervalAnalysis:
    """Intervals of the nodes of one program.

    Without an evaluation, all nodes are bounded by the spans of the arguments, and no array is read.
    """

    def __init__(self, evaluation: Evaluation | None, spans: dict[str, Span]) -> None:
        self.evaluation, self.spans = evaluation, spans
        self.intervals: dict[Node, Interval | None] = {}
        self.out_of_range: list[jax.Array] = []  # where a loaded number is larger than assumed

    def visibility(self, output: Node, shape: tuple[int, ...]) -> Visibility:
        """The visibility of tiles, an array of this shape, by the interval of a boolean node."""
        out = self.interval(output) or _undecided()
        low, high = (jnp.broadcast_to(x, shape) for x in out[:2])
        some, everything = high != 0, low != 0
        for unsafe in self.out_of_range:
            some, everything = some | unsafe, everything & ~unsafe
        return Visibility(some, everything)

    def interval(self, output: Node) -> Interval | None:
        """The interval of a node; None if it is unknown."""
        for node in reachable([output]):
            if self._is_of_tiles(node) and node not in self.intervals:
                self.intervals[node] = self._of_tiles(node)
        return self._interval(output)

    def _is_of_tiles(self, node: Node) -> bool:
        """True if a node is bounded by the intervals of its inputs."""
        return self.evaluation is None or any(axis in node.kind for axis in self.spans)

    def _interval(self, node: Node) -> Interval | None:
        if node not in self.intervals:
            self.intervals[node] = self._of_rows(node)
        return self.intervals[node]

    def _of_rows(self, node: Node) -> Interval | None:
        """The interval of a value that is known: its minimum and maximum over the rows."""
        if node.dtype not in (np.int32, np.bool_):
            return None
        assert self.evaluation is not None  # else nothing is known exactly
        value = self.evaluation(node).astype(jnp.int32)
        low, high = (value, value) if node.kind == Axes.UNIFORM else (jnp.min(value), jnp.max(value))
        if node.bounds is not None:
            return Interval(low, high, node.bounds)
        self.out_of_range.append((low < -MAX_LOADED) | (high > MAX_LOADED))
        return Interval(low, high, (-MAX_LOADED, MAX_LOADED))

    def _of_tiles(self, node: Node) -> Interval | None:
        if node.op == "input":
            return self._indices(node.value, node.bounds) if node.value in self.spans and node.bounds else None
        if node.op == "literal" and node.bounds:
            number = jnp.int32(node.bounds[0])
            return Interval(number, number, node.bounds)
        if node.op == "call":
            return self._interval(node.inputs[0])
        is_boolean = node.dtype == np.bool_
        if node.op not in RULES or node.dtype not in (np.int32, np.bool_):
            return None
        if node.op in (("convert_element_type",) if is_boolean else ("and", "or", "not")):
            return None
        ins = [self._interval(x) for x in node.inputs]
        if any(ins) or not is_boolean:  # what the others decide still counts
            ins = [x or (_undecided() if y.dtype == np.bool_ else None) for x, y in zip(ins, node.inputs, strict=True)]
        intervals = [x for x in ins if x is not None]
        if len(intervals) < len(ins):
            return None
        intervals, bounds = (intervals, (0, 1)) if is_boolean else self._within_range(node, intervals)
        ends = None if bounds is None else RULES[node.op](*intervals)
        return None if ends is None or bounds is None else Interval(*ends, bounds)

    def _within_range(self, node: Node, ins: list[Interval]) -> tuple[list[Interval], Bounds | None]:
        """The inputs of an integer and its static bounds; None if it might wrap."""
        return ins, result_bounds(node, ins)

    def _indices(self, axis: str, bounds: Bounds) -> Interval:
        """Clamps the span: bounds are proven only for existing indices, not for padding."""
        first, last = (jnp.minimum(x, bounds[1]) for x in self.spans[axis])
        return Interval(first, last, bounds)


def _undecided() -> Interval:
    return Interval(jnp.int32(0), jnp.int32(1), (0, 1))


def result_bounds(node: Node, ins: Sequence[Interval]) -> Bounds | None:
    """Static bounds of the integer that a node computes from these inputs; None if it might wrap."""
    return bounds_of(node.op, [x.bounds for x in ins], node.dtype)


Ends = tuple[jax.Array, jax.Array]


def _number(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)


def _less(a: Interval, b: Interval) -> Ends:
    return _number(a.high < b.low), _number(a.low < b.high)


def _at_most(a: Interval, b: Interval) -> Ends:
    return _number(a.high <= b.low), _number(a.low <= b.high)


def _equal(a: Interval, b: Interval) -> Ends:
    one = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _number(one), _number((a.low <= b.high) & (b.low <= a.high))


def _reversed(ends: Ends) -> Ends:
    return 1 - ends[1], 1 - ends[0]


def _ends_of(values: list[jax.Array]) -> Ends:
    low = high = values[0]
    for x in values[1:]:
        low, high = jnp.minimum(low, x), jnp.maximum(high, x)
    return low, high


def _absolute(a: Interval) -> Ends:
    low, high = _ends_of([jnp.abs(a.low), jnp.abs(a.high)])
    return jnp.where((a.low <= 0) & (a.high >= 0), 0, low), high


def _quotient(a: Interval, b: Interval) -> Ends | None:
    if b.bounds[0] <= 0:
        return None
    return _ends_of([_div(x, y) for x in a[:2] for y in b[:2]])


def _remainder(a: Interval, b: Interval) -> Ends | None:
    if a.bounds[0] < 0 or b.bounds[0] <= 0 or b.bounds[0] != b.bounds[1]:
        return None
    within = _div(a.low, b.low) == _div(a.high, b.low)
    residue = lambda x: x - _div(x, b.low) * b.low
    return jnp.where(within, residue(a.low), 0), jnp.where(within, residue(a.high), b.low - 1)


def _div(a: jax.Array, b: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(jnp.shape(a), jnp.shape(b))
    return lax.div(jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape))


def _choice(which: Interval, *cases: Interval) -> Ends | None:
    if len(cases) != 2 or which.bounds != (0, 1):
        return None
    if_false, if_true = cases
    union = jnp.minimum(if_false.low, if_true.low), jnp.maximum(if_false.high, if_true.high)
    pick = lambda end: jnp.where(which.low == 1, if_true[end], jnp.where(which.high == 0, if_false[end], union[end]))
    return pick(0), pick(1)


def _within(low: Interval, x: Interval, high: Interval) -> Ends:
    return tuple(jnp.minimum(jnp.maximum(x[end], low[end]), high[end]) for end in (0, 1))  # pyright: ignore


RULES: dict[str, Callable[..., Ends | None]] = {
    "add": lambda a, b: (a.low + b.low, a.high + b.high),
    "sub": lambda a, b: (a.low - b.high, a.high - b.low),
    "mul": lambda a, b: _ends_of([x * y for x in a[:2] for y in b[:2]]),
    "neg": lambda a: (-a.high, -a.low),
    "abs": _absolute,
    "sign": lambda a: (jnp.clip(a.low, -1, 1), jnp.clip(a.high, -1, 1)),
    "max": lambda a, b: (jnp.maximum(a.low, b.low), jnp.maximum(a.high, b.high)),
    "min": lambda a, b: (jnp.minimum(a.low, b.low), jnp.minimum(a.high, b.high)),
    "clamp": _within,
    "div": _quotient,
    "rem": _remainder,
    "convert_element_type": lambda a: (a.low, a.high),
    "select_n": _choice,
    "lt": _less,
    "le": _at_most,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _at_most(b, a),
    "eq": _equal,
    "ne": lambda a, b: _reversed(_equal(a, b)),
    "and": lambda a, b: (a.low & b.low, a.high & b.high),
    "or": lambda a, b: (a.low | b.low, a.high | b.high),
    "not": lambda a: _reversed((a.low, a.high)),
}
