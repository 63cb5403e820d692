"""Patterns in the programs of mods, for peephole rewrites that cut per-element work in the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pallas_kernels.program.build import Program
from pallas_kernels.program.ir import Axes, Node, reachable

MIN_SCALE = 2.0**-24  # an addend may be multiplied by its inverse


class Addend(NamedTuple):
    """An additive score mod: ``score + sign * factor * term``, with a uniform factor, or None for 1."""

    sign: int
    factor: Node | None
    term: Node


def addend(program: Program | None, scale: float) -> Addend | None:
    """Matches a mod that only adds to the score (ALiBi, a bias, a table), where QK^T has this scale."""
    if program is None or scale < MIN_SCALE or program.output.op not in ("add", "sub"):
        return None
    score, (lhs, rhs) = program.argument("score"), program.output.inputs
    if rhs is score and program.output.op == "add":
        lhs, rhs = rhs, lhs
    if lhs is not score or score in reachable([rhs]):
        return None
    sign = 1 if program.output.op == "add" else -1
    if rhs.op == "mul" and rhs.kind == Axes.TILE:
        for factor, term in (rhs.inputs, rhs.inputs[::-1]):
            if factor.kind == Axes.UNIFORM:
                return Addend(sign, factor, term)
    return Addend(sign, None, rhs)


class Multiple(NamedTuple):
    """A score mod that multiplies last: ``factor * term``, with a positive constant factor."""

    factor: float
    term: Node


def multiple(program: Program | None) -> Multiple | None:
    """Matches a mod that multiplies last by a positive constant (a soft cap), which the softmax scale can absorb."""
    if program is None or program.output.op != "mul":
        return None
    for factor, term in (program.output.inputs, program.output.inputs[::-1]):
        if factor.op == "literal" and term.kind == Axes.TILE and 0.0 < float(factor.value) < float("inf"):
            return Multiple(float(factor.value), term)
    return None


# Functions whose values are at most 1 in size, whatever their arguments.
_AT_MOST_ONE = frozenset({"tanh", "logistic", "sin", "cos", "erf", "sign"})


def bound(program: Program | None) -> float | None:
    """A bound of the size of scores, whatever QK^T is, if the program of the mod implies one (a soft cap)."""
    if program is None:
        return None
    result: dict[Node, float | None] = {}
    for node in program.nodes:
        sizes = [result.get(x) for x in node.inputs]
        bounded = [x for x in sizes if x is not None]
        result[node] = None if node.op not in _AT_MOST_ONE and len(bounded) < len(sizes) else _size(node, bounded)
    size = result[program.output]
    return None if size is None or not np.isfinite(size) else size


def _size(node: Node, inputs: list[float]) -> float | None:
    """A bound of the size of a node's value, from those of its inputs."""
    match node.op:
        case "literal":
            return abs(float(node.value)) if node.dtype.kind == "f" else None
        case op if op in _AT_MOST_ONE:
            return 1.0
        case "mul":
            return inputs[0] * inputs[1]
        case "add" | "sub":
            return sum(inputs)
        case "div":
            divisor = node.inputs[1]
            return inputs[0] / abs(float(divisor.value)) if divisor.op == "literal" and divisor.value != 0 else None
        case "neg" | "abs":
            return inputs[0]
        case "call" | "stop_gradient" | "convert_element_type":
            return inputs[0] if node.dtype.kind == "f" else None
        case _:
            return None


class Distance(NamedTuple):
    """A float32 node ``walked_sign * (index along the loop) + other_sign * other``, with a loop-invariant `other`."""

    node: Node
    walked_sign: int
    other_sign: int
    other: Node


def distances(program: Program, walked: str, fixed: str) -> list[Distance]:
    """Matches distances between query and key; exact in float32 in whatever order they are summed."""
    result = []
    for node in program.nodes:
        if node.op not in ("add", "sub") or node.kind != Axes.TILE or node.dtype != "float32":
            continue
        second = 1 if node.op == "add" else -1
        (a, b), integers = node.inputs, [x.inputs[0] for x in node.inputs if x.op == "convert_element_type"]
        if len(integers) != 2 or not _sum_is_exact(*integers):
            continue
        if integers[0] is program.argument(walked) and integers[1].kind == fixed:
            result.append(Distance(node, 1, second, b))
        elif integers[1] is program.argument(walked) and integers[0].kind == fixed:
            result.append(Distance(node, second, 1, a))
    return result


def _sum_is_exact(*integers: Node) -> bool:
    sizes = [max(map(abs, x.bounds)) for x in integers if x.bounds is not None and x.dtype.kind in "iu"]
    return len(sizes) == len(integers) and sum(sizes) <= 1 << 23


def runs(program: Program, walked: str, shapes: Sequence[tuple[int, ...]]) -> list[Node]:
    """Contiguous loads: their last index is the loop axis (`docs[b, k]`), along an array axis of even length.

    Also of a one-dimensional array: under `jax.vmap` it is a row of another.
    """
    index = program.argument(walked)
    is_run = lambda load: load.inputs[-1:] == (index,) and all(x.kind == Axes.UNIFORM for x in load.inputs[:-1])
    return [load for load in program.loads if is_run(load) and shapes[load.value][-1] % 2 == 0]


def step(load: Node, axis: str, shape: tuple[int, ...]) -> int | None:
    """The stride of a load, in elements, from one index of an axis to the next, if it is constant."""
    steps, stride = [], 1
    for index, size in zip(load.inputs[::-1], shape[::-1], strict=True):
        factor = _factor(index, axis)
        if factor is None:
            return None
        steps.append(factor * stride)
        stride *= size
    return sum(steps)


def _factor(node: Node, axis: str) -> int | None:
    """The coefficient of an axis in an index that is affine in it; None otherwise."""
    if axis not in node.kind:
        return 0
    if node.dtype != np.int32:
        return None
    if node.op == "input":
        return 1
    factors = [_factor(x, axis) for x in node.inputs]
    bounded = [x for x in factors if x is not None]
    if node.op not in ("add", "sub", "neg", "mul") or len(bounded) < len(factors):
        return None
    if node.op == "mul":
        numbers = [int(x.value) for x in node.inputs if x.op == "literal"]
        return sum(bounded) * numbers[0] if numbers else None
    return bounded[0] + bounded[1] if node.op == "add" else bounded[0] - bounded[1] if node.op == "sub" else -bounded[0]


def is_linear_in(program: Program | None, op: str) -> bool:
    """True if values of `op` are summed up to the output, with factors that are no tile values and with other terms.

    Then a NaN of such a value is one of the output, which no select drops, and a small error stays as small: a
    logarithm, or another factor, would make it large.
    """
    if program is None:
        return False
    result: dict[Node, bool] = {}  # whether values of `op` enter a node
    for node in program.nodes:
        entered = any(result[x] for x in node.inputs)
        if entered and not _is_term(node):
            return False
        result[node] = entered or (node.op == op and node.kind == Axes.TILE)
    return True


def _is_term(node: Node) -> bool:
    """True if a node is a sum of its inputs, or a multiple by a value that is no tile value."""
    if node.dtype.kind in "biu":
        return False
    if node.op == "mul":
        return sum(x.kind == Axes.TILE for x in node.inputs) == 1
    return node.op in ("add", "sub", "neg", "call", "stop_gradient", "convert_element_type")


def clauses(program: Program | None) -> tuple[list[Node], list[Node]]:
    """The conjuncts of a mask: first those that compare indices alone, then the rest."""
    ordered, others, pending = [], [], [] if program is None else [program.output]
    while pending:
        node = pending.pop()
        if node.op == "and" and node.dtype == np.bool_:
            pending += node.inputs
        else:
            (ordered if _is_of_indices(node) else others).append(node)
    return ordered, others


def _is_of_indices(node: Node) -> bool:
    return node.kind != Axes.UNIFORM and not any(
        x.kind and (x.op == "load" or x.dtype.kind == "f") for x in reachable([node])
    )
