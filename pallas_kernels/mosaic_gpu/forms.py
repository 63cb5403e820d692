"""Forms of a score mod that take less on each element than its program says."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.mods import Program
from pallas_kernels.nodes import Node, reachable

LEAST_SCALE = 2.0**-24  # by whose inverse an addend may be multiplied


class Addend(NamedTuple):
    """What a score mod adds: ``score + sign * factor * term``, the factor the same for all of a tile, or None for 1."""

    sign: int
    factor: Node | None
    term: Node


def addend(program: Program | None, scale: float) -> Addend | None:
    """What a mod adds to the score, if that is all it does (ALiBi, a bias, a table), for products of this scale."""
    if program is None or scale < LEAST_SCALE or program.output.op not in ("add", "sub"):
        return None
    score, (left, right) = program.argument("score"), program.output.inputs
    if right is score and program.output.op == "add":
        left, right = right, left
    if left is not score or score in reachable([right]):
        return None
    sign = 1 if program.output.op == "add" else -1
    if right.op == "mul" and right.kind == "qk":
        for factor, term in (right.inputs, right.inputs[::-1]):
            if factor.kind == "":
                return Addend(sign, factor, term)
    return Addend(sign, None, right)


class Multiple(NamedTuple):
    """What a score mod multiplies last: ``factor * term``, the factor a positive number."""

    factor: float
    term: Node


def multiple(program: Program | None) -> Multiple | None:
    """The positive number by which a mod multiplies last, if it does (a soft cap); softmax multiplies anyway."""
    if program is None or program.output.op != "mul":
        return None
    for factor, term in (program.output.inputs, program.output.inputs[::-1]):
        if factor.op == "literal" and term.kind == "qk" and 0.0 < float(factor.value) < float("inf"):
            return Multiple(float(factor.value), term)
    return None


class Distance(NamedTuple):
    """A float32 node ``walked_sign * (index along the loop) + other_sign * other``, `other` known ahead of the loop."""

    node: Node
    walked_sign: int
    other_sign: int
    other: Node


def distances(program: Program, walked: str, fixed: str) -> list[Distance]:
    """Distances between query and key, as numbers; exact in float32 in whatever order they are summed up."""
    found = []
    for node in program.nodes:
        if node.op not in ("add", "sub") or node.kind != "qk" or node.dtype != "float32":
            continue
        second = 1 if node.op == "add" else -1
        (a, b), integers = node.inputs, [x.inputs[0] for x in node.inputs if x.op == "convert_element_type"]
        if len(integers) != 2 or not _sum_is_exact(*integers):
            continue
        if integers[0] is program.argument(walked) and integers[1].kind == fixed:
            found.append(Distance(node, 1, second, b))
        elif integers[1] is program.argument(walked) and integers[0].kind == fixed:
            found.append(Distance(node, second, 1, a))
    return found


def _sum_is_exact(*integers: Node) -> bool:
    sizes = [max(map(abs, x.bounds)) for x in integers if x.bounds is not None and x.dtype.kind in "iu"]
    return len(sizes) == len(integers) and sum(sizes) <= 1 << 23
