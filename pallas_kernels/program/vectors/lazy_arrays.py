"""Arrays of a vector mod as functions of an index: what moves lanes becomes index arithmetic.

A mod on scalars holds a few values, which `primitive_rules` handles one by one. A vector of a head is too long for
that. Here an array is a function from indices to a node, and an index is a number or a node: the lane that a tile
computes. Nothing is evaluated before the result is indexed, so only what the lanes of a tile need remains of a mod.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.program.ir import Graph, Node
from pallas_kernels.program.rules.primitive_rules import choose
from pallas_kernels.program.rules.views import NotOnTile

Position = int | Node
"""An index along one dimension; nodes are int32 and have bounds."""

MAX_CHOICES = 16  # values between which a computed index may choose


class LazyArray:
    """An array whose elements are computed when they are indexed, each once."""

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[tuple[Position, ...]], Node]) -> None:
        self.shape, self.dtype, self._element = tuple(int(size) for size in shape), np.dtype(dtype), element
        self._elements: dict[tuple[object, ...], Node] = {}

    def at(self, index: Sequence[Position]) -> Node:
        """The element at an index, which must be in range."""
        assert len(index) == len(self.shape)
        key = tuple(i if isinstance(i, int) else ("node", i.number) for i in index)
        if key not in self._elements:
            self._elements[key] = self._element(tuple(index))
        return self._elements[key]

    def broadcast_at(self, index: Sequence[Position]) -> Node:
        """The element at an index of an array that this one is broadcast to: of the same rank, or from a scalar."""
        if not self.shape:
            return self.at(())
        return self.at([0 if size == 1 else i for size, i in zip(self.shape, index, strict=True)])


def scalar(node: Node) -> LazyArray:
    """An array without dimensions."""
    return LazyArray((), node.dtype, lambda _: node)


def captured(graph: Graph, operand: int, shape: Sequence[int], dtype: DTypeLike) -> LazyArray:
    """An array that a mod captures."""
    return LazyArray(shape, dtype, lambda index: graph.load(operand, dtype, [as_node(graph, i) for i in index]))


def constant(graph: Graph, value: npt.ArrayLike, dtype: DTypeLike | None = None) -> LazyArray:
    """A constant of the program; few different values, if it is indexed by lanes."""
    array = np.asarray(value)
    dtype = np.dtype(dtype or array.dtype)

    def element(index: tuple[Position, ...]) -> Node:
        if (array == array.flat[0]).all():
            return graph.literal(array.flat[0], dtype)
        flat = ravel(graph, index, array.shape)
        if isinstance(flat, int):
            return graph.literal(array.flat[flat], dtype)
        if array.size > MAX_CHOICES:
            raise NotOnTile(f"it indexes a constant of shape {list(array.shape)} by lanes: capture the array instead")
        return chosen(graph, flat, [graph.literal(x, dtype) for x in array.flat])

    return LazyArray(array.shape, dtype, element)


def as_node(graph: Graph, i: Position) -> Node:
    """An index as a node."""
    return graph.literal(i, np.int32) if isinstance(i, int) else i


def as_position(graph: Graph, node: Node, size: int) -> Position:
    """A computed index, clamped to the size of its dimension; a number where it is known."""
    node = graph.clamp(graph.cast(node, np.int32), 0, size - 1)
    return node.bounds[0] if node.bounds is not None and node.bounds[0] == node.bounds[1] else node


def added(graph: Graph, i: Position, by: Position) -> Position:
    """The sum of two indices; numbers are summed up at once, so that ``lane + 64 - 64`` is the lane."""
    if isinstance(i, int):
        i, by = by, i
    if isinstance(i, int) and isinstance(by, int):
        return i + by
    assert isinstance(i, Node)
    if isinstance(by, int):
        i, offset = _split_offset(i)
        by += offset
        if by == 0:
            return i
    return graph.same_dtype("add", lax.add, i, as_node(graph, by))


def multiplied(graph: Graph, i: Position, by: int) -> Position:
    """An index times a number."""
    if isinstance(i, int):
        return i * by
    return i if by == 1 else graph.same_dtype("mul", lax.mul, i, as_node(graph, by))


def divided(graph: Graph, i: Position, by: int) -> tuple[Position, Position]:
    """Quotient and remainder of an index."""
    if isinstance(i, int):
        return divmod(i, by)
    if by == 1:
        return i, 0
    base, offset = _split_offset(i)
    if _is_multiple(base, by) and 0 <= offset < by:
        return base.inputs[0], offset
    if offset and offset % by == 0 and base.bounds is not None and base.bounds[0] >= 0:
        quotient, remainder = divided(graph, base, by)
        return added(graph, quotient, offset // by), remainder
    if i.bounds is not None and i.bounds[0] // by == i.bounds[1] // by:
        return i.bounds[0] // by, added(graph, i, -(i.bounds[0] // by) * by)
    divisor = as_node(graph, by)
    return graph.same_dtype("div", lax.div, i, divisor), graph.same_dtype("rem", lax.rem, i, divisor)


def _split_offset(i: Node) -> tuple[Node, int]:
    """An index as a node and a number that is added to it."""
    if i.op == "add" and i.inputs[1].op == "literal":
        return i.inputs[0], int(i.inputs[1].value)
    return i, 0


def _is_multiple(i: Node, factor: int) -> bool:
    """True if an index is another one, not negative, times a number."""
    if i.op != "mul" or i.inputs[1].bounds != (factor, factor):
        return False
    bounds = i.inputs[0].bounds
    return bounds is not None and bounds[0] >= 0


def clamped(graph: Graph, i: Position, size: int) -> Position:
    """An index, forced into range."""
    return min(max(i, 0), size - 1) if isinstance(i, int) else as_position(graph, i, size)


def is_below(graph: Graph, i: Position, limit: int) -> Node:
    """True if an index is below a number."""
    return graph.compare("lt", as_node(graph, i), as_node(graph, limit))


def ravel(graph: Graph, index: Sequence[Position], shape: Sequence[int]) -> Position:
    """The index in an array of one dimension."""
    flat: Position = 0
    for i, size in zip(index, shape, strict=True):
        flat = added(graph, multiplied(graph, flat, size), i)
    return flat


def unravel(graph: Graph, flat: Position, shape: Sequence[int]) -> list[Position]:
    """The inverse of `ravel`, for an index that is in range."""
    index: list[Position] = []
    for d in reversed(range(len(shape))):
        if math.prod(shape[:d]) == 1:
            index.append(flat)
            flat = 0
        else:
            flat, i = divided(graph, flat, shape[d])
            index.append(i)
    return index[::-1]


def chosen(graph: Graph, i: Position, values: Sequence[Node]) -> Node:
    """The value at an index among a few."""
    return values[i] if isinstance(i, int) else choose(graph, i, values)
