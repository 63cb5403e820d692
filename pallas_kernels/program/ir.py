"""The IR of mods: scalar programs, which kernels evaluate on tiles.

A node is one scalar value of the mod. Nodes are hash-consed (common subexpressions are one object). Each has a *kind*:
whether it is a uniform, row, column or tile value (see `Axes`), because that is the shape in which a kernel holds it;
and, if it is an integer, bounds, because an index that is proven to be in range needs neither the wrapping of negative
indices nor a clamp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.typing import DTypeLike

Bounds = tuple[int, int]


class Axes:
    """Kinds of values: the axes of a tile along which they vary, beside the batch and the head."""

    UNIFORM = ""
    ROW = "q"
    COLUMN = "k"
    TILE = "qk"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One scalar value."""

    number: int  # in topological order; inputs come before their users
    op: str  # ``input``, ``literal``, ``load``, ``call``, ``reduce_lanes``, or the name of a primitive
    kind: str  # the axes along which the value varies, one of `Axes`
    dtype: np.dtype
    inputs: tuple[Node, ...] = ()  # operands of the op; the indices of a load
    apply: Callable[..., jax.Array] | None = None  # computes a primitive from arrays of one shape
    # by `op`: a literal's number, the index of the captured array of a load, an input's name, or ``(call, output)``
    value: Any = None
    bounds: Bounds | None = None  # smallest and largest value of an integer or a boolean, if known


def join_axes(nodes: Sequence[Node]) -> str:
    """The kind of a value that is computed from these nodes."""
    return "".join(axis for axis in "qk" if any(axis in node.kind for node in nodes))


def reachable(outputs: Sequence[Node], inputs: Callable[[Node], Iterable[Node]] = lambda n: n.inputs) -> list[Node]:
    """All nodes that the outputs need, inputs first; `inputs` lists what one node needs."""
    seen: dict[int, Node] = {}
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node.number not in seen:
            seen[node.number] = node
            stack.extend(inputs(node))
    return [seen[number] for number in sorted(seen)]


_SHIFTS = frozenset({"shift_left", "shift_right_arithmetic", "shift_right_logical"})


class Graph:
    """Builds nodes: equal ones once (hash-consing), with constant folding by bounds."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Node] = {}

    def literal(self, value: npt.ArrayLike, dtype: DTypeLike) -> Node:
        """A constant."""
        dtype = np.dtype(dtype)
        number = np.asarray(value, dtype)
        exact = number.dtype.kind in "iub"
        bounds = (int(number), int(number)) if exact else None
        return self._make(("literal", str(dtype), number.tobytes()), Axes.UNIFORM, dtype, value=number, bounds=bounds)

    def input(self, name: str, kind: str, dtype: DTypeLike, bounds: Bounds | None = None) -> Node:
        """An argument of the mod."""
        return self._make(("input", name), kind, np.dtype(dtype), value=name, bounds=bounds)

    def load(self, operand: int, dtype: DTypeLike, indices: Sequence[Node]) -> Node:
        """One element of a captured array; the indices must be in range."""
        key = ("load", operand, *(i.number for i in indices))
        bounds = (0, 1) if np.dtype(dtype) == np.bool_ else None
        return self._make(key, join_axes(indices), np.dtype(dtype), tuple(indices), value=operand, bounds=bounds)

    def call(self, inlined: Node, call: object, output: int) -> Node:
        """A value with a custom derivative rule: evaluated as `inlined`, differentiated as `call`."""
        key = ("call", id(call), output)
        return self._make(key, inlined.kind, inlined.dtype, (inlined,), value=(call, output), bounds=inlined.bounds)

    def apply(
        self,
        op: str,
        function: Callable[..., jax.Array],
        inputs: Sequence[Node],
        dtype: DTypeLike,
        params: tuple[object, ...] = (),
    ) -> Node:
        """A primitive, folded where bounds determine its value."""
        dtype = np.dtype(dtype)
        inputs = tuple(inputs)
        if op not in _TAKE_16_BITS and any(x in _FLOATS_OF_16_BITS for x in (dtype, *(n.dtype for n in inputs))):
            return self._widened(op, function, inputs, dtype, params)
        if dtype == np.bool_ and op in _OF_BOOLEANS:  # Mosaic GPU has no extremes of booleans
            op, function = _OF_BOOLEANS[op]
        folded = self._fold(op, inputs, dtype)
        if folded is not None:
            return folded
        if op in _SHIFTS and not self._is_in_range(inputs[1], dtype):
            return self._long_shift(op, function, inputs, dtype)
        if op == "div" and dtype == np.float32 and inputs[0].kind == Axes.TILE and inputs[1].kind != Axes.TILE:
            return self._multiply_by_reciprocal(*inputs)
        key = (op, str(dtype), repr(params), *(i.number for i in inputs))
        bounds = bounds_of(op, [x.bounds for x in inputs], dtype)
        return self._make(key, join_axes(inputs), dtype, inputs, function, bounds=bounds)

    def _is_in_range(self, amount: Node, dtype: np.dtype) -> bool:
        """True if a shift surely is by less than the bits of a number. LLVM defines no other."""
        return amount.bounds is not None and amount.bounds[0] >= 0 and amount.bounds[1] < 8 * dtype.itemsize

    def _long_shift(
        self, op: str, function: Callable[..., jax.Array], inputs: tuple[Node, ...], dtype: np.dtype
    ) -> Node:
        """A shift that may be by all bits of a number, or more: as in JAX, zeros or signs are left."""
        (x, amount), bits = inputs, 8 * dtype.itemsize
        limits = (("ge", 0), ("lt", bits))
        within = (self.compare(than, amount, self.literal(limit, amount.dtype)) for than, limit in limits)
        inside = self.same_dtype("and", lax.bitwise_and, *within)
        safe = self.select(inside, amount, self.literal(bits - 1, amount.dtype))
        key = (op, str(dtype), "()", x.number, safe.number)
        shifted = self._make(key, join_axes((x, safe)), dtype, (x, safe), function)
        return shifted if op == "shift_right_arithmetic" else self.select(inside, shifted, self.literal(0, dtype))

    def same_dtype(self, op: str, function: Callable[..., jax.Array], *inputs: Node) -> Node:
        """A primitive whose result has the dtype of its first input."""
        return self.apply(op, function, inputs, inputs[0].dtype)

    def reduce_lanes(self, name: str, terms: Sequence[Node]) -> Node:
        """`reduce_sum`, `reduce_max` or `reduce_min` over the columns of tiles of one shape together: a row value."""
        terms = tuple(terms)
        key = ("reduce_lanes", name, *(n.number for n in terms))
        return self._make(key, Axes.ROW, terms[0].dtype, terms, _OVER_LANES[name])

    def compare(self, op: str, a: Node, b: Node) -> Node:
        """``lt``, ``le``, ``gt``, ``ge``, ``eq`` or ``ne``."""
        return self.apply(op, getattr(lax, op), (a, b), np.bool_)

    def select(self, predicate: Node, if_true: Node, if_false: Node) -> Node:
        """One of two values, by a boolean."""
        return self.apply("select_n", lax.select_n, (predicate, if_false, if_true), if_true.dtype)

    def cast(self, node: Node, dtype: DTypeLike) -> Node:
        """Another dtype."""
        dtype = np.dtype(dtype)
        if node.dtype == dtype:
            return node
        is_wide_number = node.dtype.itemsize > 4  # of Python, under `jax_enable_x64`
        if node.op == "literal" and (is_wide_number or (node.dtype, dtype) in _EXACT_CASTS):
            return self.literal(node.value.astype(dtype), dtype)
        if np.float32 not in (node.dtype, dtype) and not _FLOATS_OF_16_BITS.isdisjoint({node.dtype, dtype}):
            return self.cast(self.cast(node, np.float32), dtype)  # compilers convert 16 bits to and from float32 alone
        by_parts = dtype == np.float32 and node.kind == Axes.TILE and node.op in _EXACT_IN_FLOAT
        if by_parts and is_exact_in_float(node, *node.inputs):
            return self.apply(node.op, _EXACT_IN_FLOAT[node.op], [self.cast(x, dtype) for x in node.inputs], dtype)
        return self.apply("convert_element_type", lambda x: lax.convert_element_type(x, dtype), (node,), dtype)

    def stop_gradient(self, node: Node) -> Node:
        """The value, without derivative; integers and booleans are left as they are."""
        if not jnp.issubdtype(node.dtype, jnp.floating):
            return node
        return self.same_dtype("stop_gradient", lambda x: lax.stop_gradient(x), node)

    def clamp(self, node: Node, low: int, high: int) -> Node:
        """An index, forced into range unless it is proven to be there."""
        if node.dtype.itemsize < 4:  # which may not hold the limits
            node = self.cast(node, np.int32)
        node = self.same_dtype("max", lax.max, node, self.literal(low, node.dtype))
        return self.same_dtype("min", lax.min, node, self.literal(high, node.dtype))

    def _make(
        self,
        key: tuple[str, *tuple[object, ...]],  # begins with the op
        kind: str,
        dtype: np.dtype,
        inputs: tuple[Node, ...] = (),
        apply: Callable[..., jax.Array] | None = None,
        *,
        value: object = None,
        bounds: Bounds | None = None,
    ) -> Node:
        if key not in self._made:
            self._made[key] = Node(len(self._made), key[0], kind, dtype, inputs, apply, value, bounds)
        return self._made[key]

    def _fold(self, op: str, inputs: tuple[Node, ...], dtype: np.dtype) -> Node | None:
        """The node that a primitive over integers or booleans folds to, where bounds determine it."""
        if op == "select_n":
            return self._fold_select(inputs)
        if op == "not" and inputs[0].op == "literal":  # Pallas' Triton cannot lower it
            return self.literal(np.invert(inputs[0].value), dtype)
        if len(inputs) != 2:
            return None
        a, b = (x.bounds for x in inputs)
        if dtype == np.bool_ and a is not None and b is not None and op in _DECIDE:
            verdict = _DECIDE[op](a, b)
            if verdict is not None:
                return self.literal(verdict, np.bool_)
        if dtype.kind not in "iub":
            return None
        for x, other in (inputs, inputs[::-1]):
            if op in _NEUTRAL and other.bounds == (_NEUTRAL[op],) * 2:
                return x
            if dtype == np.bool_ and op == "and" and other.bounds == (1, 1):
                return x
            if dtype == np.bool_ and op in _ABSORBING and other.bounds == (_ABSORBING[op],) * 2:
                return other
            if op in ("max", "min") and x.bounds and other.bounds and x.bounds[0] >= other.bounds[1]:
                return x if op == "max" else other
        if op == "sub" and b == (0, 0):
            return inputs[0]
        return None

    def _widened(
        self,
        op: str,
        function: Callable[..., jax.Array],
        inputs: tuple[Node, ...],
        dtype: np.dtype,
        params: tuple[object, ...],
    ) -> Node:
        """A primitive of 16-bit floats, computed in float32 and rounded once, where JAX rounds.

        The compilers behind Pallas lack most of them in 16 bits (division, `sqrt`, `exp`, `tanh`). For a sum, product,
        quotient or root the second rounding changes nothing: float32 has more than twice the digits, and two.
        """
        wide = [self.cast(n, np.float32) if n.dtype in _FLOATS_OF_16_BITS else n for n in inputs]
        result = self.apply(op, function, wide, np.float32 if dtype in _FLOATS_OF_16_BITS else dtype, params)
        return self.cast(result, dtype)

    def _multiply_by_reciprocal(self, a: Node, b: Node) -> Node:
        """``a / b`` by one division for a row, a column or the tile, instead of one for each element.

        Within two roundings of the quotient; XLA's Triton divides no better, in about eight instructions.
        """
        one = self.literal(1.0, np.float32)
        reciprocal = self.apply("div", lax.div, (one, b), np.float32)
        return self.apply("mul", lax.mul, (a, reciprocal), np.float32)

    def _fold_select(self, inputs: tuple[Node, ...]) -> Node | None:
        predicate, *cases = inputs
        if all(case is cases[0] for case in cases):
            return cases[0]
        if predicate.bounds is not None and predicate.bounds[0] == predicate.bounds[1]:
            return cases[predicate.bounds[0]]
        return None


def _over_lanes(combine: Callable[..., jax.Array], reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *tiles: reduce(functools.reduce(combine, tiles), axis=1)[:, None]


_OVER_LANES = {
    "reduce_sum": _over_lanes(lax.add, jnp.sum),
    "reduce_max": _over_lanes(lax.max, jnp.max),
    "reduce_min": _over_lanes(lax.min, jnp.min),
}
_FLOATS_OF_16_BITS = frozenset({np.dtype(jnp.bfloat16), np.dtype(np.float16)})
_EXACT_CASTS = frozenset((narrow, np.dtype(np.float32)) for narrow in _FLOATS_OF_16_BITS)
_TAKE_16_BITS = frozenset({"bitcast_convert_type", "convert_element_type", "select_n", "stop_gradient"})

# On integers that float32 holds exactly, these have the same result in float32: so row and column values are cast
# instead of tile values (ALiBi's distance: one subtraction for each element instead of one and a conversion).
_EXACT_IN_FLOAT = {"add": lax.add, "sub": lax.sub, "neg": lax.neg, "abs": lax.abs, "max": lax.max, "min": lax.min}


def is_exact_in_float(*nodes: Node) -> bool:
    """True if float32 holds these integers exactly."""
    return all(n.dtype.kind in "iu" and n.bounds is not None and max(map(abs, n.bounds)) <= 1 << 24 for n in nodes)


_OF_BOOLEANS = {"max": ("or", lax.bitwise_or), "min": ("and", lax.bitwise_and)}
_NEUTRAL = {"add": 0, "mul": 1, "or": 0}
_ABSORBING = {"and": 0, "or": 1}


def _lt(a: Bounds, b: Bounds) -> bool | None:
    return True if a[1] < b[0] else False if a[0] >= b[1] else None


def _le(a: Bounds, b: Bounds) -> bool | None:
    return True if a[1] <= b[0] else False if a[0] > b[1] else None


def _eq(a: Bounds, b: Bounds) -> bool | None:
    if a[0] == a[1] == b[0] == b[1]:
        return True
    return False if a[1] < b[0] or b[1] < a[0] else None


_DECIDE: dict[str, Callable[[Bounds, Bounds], bool | None]] = {
    "lt": _lt, "le": _le, "gt": lambda a, b: _lt(b, a), "ge": lambda a, b: _le(b, a), "eq": _eq,
    "ne": lambda a, b: None if _eq(a, b) is None else not _eq(a, b),
}  # fmt: skip


def bounds_of(op: str, ranges: Sequence[Bounds | None], dtype: np.dtype) -> Bounds | None:
    """Bounds of a result, from bounds of the inputs; None if it may wrap, past the range of its dtype."""
    if dtype == np.bool_:
        return (0, 1)
    if dtype.kind not in "iu":
        return None
    ranges = ranges[1:] if op == "select_n" else ranges
    if not ranges or None in ranges or op not in RANGES:
        return None
    low, high = RANGES[op](*ranges)
    limits = jnp.iinfo(dtype)
    return (low, high) if limits.min <= low and high <= limits.max else None


def _corners(function: Callable[[int, int], int]) -> Callable[[Bounds, Bounds], Bounds]:
    def of_ranges(a: Bounds, b: Bounds) -> Bounds:
        values = [function(x, y) for x in a for y in b]
        return min(values), max(values)

    return of_ranges


def _quotient(a: Bounds, b: Bounds) -> Bounds:
    if b[0] <= 0:
        size = max(abs(a[0]), abs(a[1]), 1)  # a quotient by 0 is -1
        return -size, size
    values = [int(x / y) if abs(x) < 2**52 else x for x in a for y in b]
    return min(*values, 0) if a[0] < 0 else min(values), max(values)


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    size = max(abs(b[0]), abs(b[1])) - 1
    if b[0] <= 0 <= b[1]:
        size = max(size, abs(a[0]), abs(a[1]))  # a remainder by 0 is the dividend
    return (0 if a[0] >= 0 else -size), (0 if a[1] <= 0 else min(size, a[1]) if b[0] > 0 else size)


# Bounds of an integer result from those of the inputs, as if nothing wrapped.
RANGES: dict[str, Callable[..., Bounds]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda x, y: x * y),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))),
    "sign": lambda a: ((a[0] > 0) - (a[0] < 0), (a[1] > 0) - (a[1] < 0)),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "clamp": lambda low, x, high: (min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])),
    "div": _quotient,
    "rem": _remainder,
    "convert_element_type": lambda a: a,
    "select_n": lambda *cases: (min(c[0] for c in cases), max(c[1] for c in cases)),
}
