"""Visible ranges of a mask: the keys that a tile of queries may attend to, and the transpose.

A mask that compares indices (causal, a window, a prefix, chunks) is solved for the index along a walk. What depends on
the other axis is bounded over a tile by interval arithmetic; so a range is four int32 scalars of the number of the
tile. Where a mask has several ranges (sinks beside a window), the range around all of them is walked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program import patterns
from pallas_kernels.program.build import Program
from pallas_kernels.program.intervals import MAX_LOADED, IntervalAnalysis, Span
from pallas_kernels.program.ir import Node, reachable
from pallas_kernels.types import Index

COMPARISONS = {"ge": (1, 0), "gt": (1, 1), "le": (-1, 0), "lt": (-1, 1)}  # ``sign * (a - b) >= least``
_OPPOSITE = {"ge": "lt", "lt": "ge", "le": "gt", "gt": "le", "and": "or", "or": "and", "eq": "ne", "ne": "eq"}


class Range(NamedTuple):
    """A range of indices or of tiles: the visible ones are in [first, end), and all of [full_first, full_end) are.

    A range that ends before it begins is empty.
    """

    first: Index
    end: Index
    full_first: Index
    full_end: Index

    def in_tiles(self, tile: int) -> Range:
        """The range in tiles of so many indices, ordered: first, full_first, full_end, end."""
        first, full_end = _quotient(self.first, tile), _quotient(self.full_end, tile)
        end, full_first = (_quotient(x + (tile - 1), tile) for x in (self.end, self.full_first))
        end = _where(self.end > self.first, end, first)
        full_first = _clip(full_first, first, end)
        return Range(first, end, full_first, _clip(full_end, full_first, end))


def visible_range(program: Program, walked: str, length: int, spans: Mapping[str, Span]) -> Range:
    """The visible range of a mask along ``"k"`` or ``"q"``, an axis of this length.

    `spans` are the first and last index of a tile along the other axis, where the last may be padding, of the batch
    entry ``"b"``, and of the query head ``"h"``: int32 of any shapes that broadcast.
    """
    return Solver(walked, length, IntervalAnalysis(None, dict(spans))).visible(program.output)


@functools.lru_cache(maxsize=256)
def is_range(program: Program, walked: str) -> bool:
    """True if a mask shows to an index of the other axis all of its `visible_range`: its clauses compare sums."""

    def compares_sums(clause: Node) -> bool:
        nodes, sums = reachable(clause.inputs), ("input", "literal", "add", "sub", "neg")
        exact = all(x.op in sums and x.dtype == np.int32 for x in nodes) and _are_small(nodes)
        return exact and clause.op in COMPARISONS and walked in clause.kind

    return all(compares_sums(clause) for part in patterns.clauses(program) for clause in part)


def has_range(program: Program, walked: str) -> bool:
    """True if `visible_range` knows anything of a mask."""
    return _solution(program, walked)[0]


def is_prefix(program: Program) -> bool:
    """True if a mask surely shows each query all keys up to one of them (causal)."""
    return is_range(program, "k") and all(_solution(program, "k"))


@functools.lru_cache(maxsize=256)
def _solution(program: Program, walked: str) -> tuple[bool, ...]:
    """Answers if `visible_range` knows anything, and for an `is_range` if both of its ranges begin at 0."""

    def solve() -> None:
        span = Span(jnp.int32(0), jnp.int32(0))
        solver = Solver(walked, 1, IntervalAnalysis(None, dict.fromkeys("bh" + "qk".replace(walked, ""), span)))
        visible = solver.visible(program.output)
        answers.extend((solver.decides, *(isinstance(x, int) and x == 0 for x in visible[::2])))

    answers: list[bool] = []
    jax.eval_shape(solve)
    return tuple(answers)


class Solver:
    """Ranges of the boolean nodes of a program, by the intervals of what depends on the other axis alone."""

    def __init__(self, walked: str, length: int, analysis: IntervalAnalysis) -> None:
        self.walked, self.length, self.analysis = walked, length, analysis
        self.decides = False  # whether anything is known
        self.decides_all = True  # whether all is known, and no range is around several

    def visible(self, node: Node, *, negated: bool = False) -> Range:
        """The range of a boolean node, or of its negation."""
        op = _OPPOSITE.get(node.op, node.op) if negated else node.op
        match op:
            case "call" | "not":
                return self.visible(node.inputs[0], negated=negated != (op == "not"))
            case "and" | "or":
                both = (self.visible(x, negated=negated) for x in node.inputs)
                return _intersection(*both) if op == "and" else self._union(*both)
            case "select_n" if node.inputs[0].dtype == np.bool_:
                which, *cases = node.inputs
                taken = (self.visible(which, negated=x) for x in (True, False))
                both = (_intersection(x, self.visible(y, negated=negated)) for x, y in zip(taken, cases, strict=True))
                return self._union(*both)
            case _ if self.walked not in node.kind:
                return self._of_other(node, negated=negated)
            case "ge" | "gt" | "le" | "lt":
                return self._compared(op, node)
            case "eq":
                return _intersection(self._compared("ge", node), self._compared("le", node))
            case "ne":
                return self._union(self._compared("gt", node), self._compared("lt", node))
        return self._undecided()

    def _union(self, a: Range, b: Range) -> Range:
        """The range around two; of the indices that are visible throughout, the longer range if they are apart."""
        self.decides_all = False
        hull = Range(*(function(x, y) for function, x, y in zip((_least, _greatest) * 2, a, b, strict=True)))
        pick = lambda i: _where(a.end <= a.first, b[i], _where(b.end <= b.first, a[i], hull[i]))
        together = _greatest(a.full_first, b.full_first) <= _least(a.full_end, b.full_end)
        is_longer = a.full_end - a.full_first >= b.full_end - b.full_first
        pick_full = lambda i: _where(together, hull[i], _where(is_longer, a[i], b[i]))
        return Range(pick(0), pick(1), pick_full(2), pick_full(3))

    def _of_other(self, node: Node, *, negated: bool) -> Range:
        """The range of a boolean of the other axis, or of its negation: all indices, or none."""
        ends = self._ends(node)
        return self._undecided() if ends is None else self._where_zero(*(x if negated else 1 - x for x in ends))

    def _undecided(self) -> Range:
        self.decides_all = False
        return Range(0, self.length, 0, 0)

    def _where_zero(self, *ends: Index) -> Range:
        """The range of all indices where a value of the other axis with these bounds is at most 0, else of none."""
        self.decides = True
        low, high = _least(*ends), _greatest(*ends)
        return Range(0, _where(low <= 0, self.length, 0), 0, _where(high <= 0, self.length, 0))

    def _ends(self, node: Node) -> tuple[Index, Index] | None:
        """Minimum and maximum of a value of the other axis; None where an array is read, or an integer is large."""
        if not self._is_small(node):
            return None
        if node.op == "literal" and self.analysis.evaluation is None:
            return int(node.value), int(node.value)
        interval = self.analysis.interval(node)
        return None if interval is None else interval[:2]

    def _is_small(self, node: Node) -> bool:
        """True if sums of multiples of the nodes behind an integer surely do not wrap; known ones are checked."""
        nodes = reachable([node])
        if self.analysis.evaluation is not None:
            nodes = [x for x in nodes if self.walked in x.kind and x.op not in ("add", "sub", "neg", "call")]
        return _are_small(nodes)

    def _compared(self, op: str, node: Node) -> Range:
        """The range of a comparison of two integers."""
        if not all(x.dtype == np.int32 and self._is_small(x) for x in node.inputs):
            return self._undecided()
        (sign, least), (a, b) = COMPARISONS[op], node.inputs
        return self._at_least([(sign, a), (-sign, b)], least, least)

    def _at_least(self, terms: Sequence[tuple[int, Node]], low: Index, high: Index) -> Range:
        """The range in which a sum of multiples is at least a value of the other axis, with these bounds."""
        factors: dict[Node, int] = {}
        for term in terms:
            self._add(factors, *term)
        for node in [x for x in factors if self.walked not in x.kind]:
            factor, ends = factors.pop(node), self._ends(node)
            if ends is None:
                return self._undecided()
            least, most = ends if factor < 0 else ends[::-1]
            low, high = low - factor * least, high - factor * most
        unknowns = [(node, factor) for node, factor in factors.items() if factor]
        if not unknowns:
            return self._where_zero(low, high)
        return self._solved(*unknowns[0], low, high) if len(unknowns) == 1 else self._undecided()

    def _add(self, factors: dict[Node, int], factor: int, node: Node) -> None:
        """Adds a multiple of a node to a sum, term by term as far as it depends on the walked index."""
        numbers = [x for x in node.inputs if x.op == "literal"]
        match node.op:
            case "call" | "add" | "sub" | "neg" if self.walked in node.kind:
                signs = {"sub": (1, -1), "neg": (-1,)}.get(node.op, (1, 1))
                for sign, x in zip(signs, node.inputs, strict=False):
                    self._add(factors, sign * factor, x)
            case "mul" if self.walked in node.kind and numbers:
                [other] = (x for x in node.inputs if x is not numbers[0])
                self._add(factors, factor * int(numbers[0].value), other)
            case _:
                factors[node] = factors.get(node, 0) + factor

    def _solved(self, node: Node, factor: int, low: Index, high: Index) -> Range:
        """The range in which a multiple of a node is at least a value of the other axis, with these bounds."""
        sign, size, length = (1 if factor > 0 else -1), abs(factor), self.length
        if node.op == "input":
            self.decides = True
            if sign > 0:  # the index is at least the quotient, rounded up
                first, full_first = (_quotient(_clip(x, 0, length * size) + (size - 1), size) for x in (low, high))
                return Range(first, length, full_first, length)
            end, full_end = (_quotient(size - _clip(x, (1 - length) * size, size), size) for x in (low, high))
            return Range(0, end, 0, full_end)
        if node.op in ("abs", "max", "min") and size == 1:
            terms = [(1, node.inputs[0]), (-1, node.inputs[0])]
            terms = terms if node.op == "abs" else [(sign, x) for x in node.inputs]
            both = (self._at_least([term], low, high) for term in terms)
            return self._union(*both) if (node.op != "min") == (sign > 0) else _intersection(*both)
        if node.op == "div" and size == 1 and node.bounds is not None:
            number, divisor = node.inputs
            if number.bounds is not None and number.bounds[0] >= 0 and divisor.op == "literal" and divisor.value > 0:
                by, most = int(divisor.value), node.bounds[1] + 1
                # -(x // n) >= v where -x >= v * n - (n - 1)
                limits, least = ((0, most), 0) if sign > 0 else ((-most, 1), 1 - by)
                low, high = (_clip(x, *limits) * by + least for x in (low, high))
                return self._at_least([(sign, number)], low, high)
        return self._undecided()


def _are_small(nodes: Iterable[Node]) -> bool:
    bounds = [x.bounds for x in nodes]
    return all(x is not None and max(-x[0], x[1]) <= MAX_LOADED for x in bounds)


# --- arithmetic on int32 arrays and on Python numbers, which stay known while tracing


def _where(condition: bool | jax.Array, x: Index, y: Index) -> Index:
    """Chooses by arithmetic: in Pallas' Triton a number that `select_n` chooses gets the type of the condition."""
    if isinstance(condition, bool):
        return x if condition else y
    return y + condition.astype(jnp.int32) * (x - y)


def _greatest(x: Index, y: Index) -> Index:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def _least(x: Index, y: Index) -> Index:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def _clip(x: Index, low: Index, high: Index) -> Index:
    return _least(_greatest(x, low), high)


def _quotient(x: Index, divisor: int) -> Index:
    """The quotient of a number that is not negative."""
    return x // divisor if isinstance(x, int) else x if divisor == 1 else lax.div(x, jnp.int32(divisor))


def _intersection(a: Range, b: Range) -> Range:
    return Range(*(function(x, y) for function, x, y in zip((_greatest, _least) * 2, a, b, strict=True)))
