"""Axes along which a load is constant (broadcast), so that its cotangents can be reduced before the store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.program.ir import Axes, Node, is_exact_in_float, reachable
from pallas_kernels.types import ScoreShape


class BroadcastAxes(NamedTuple):
    """Axes along which a tile load is constant."""

    batch: bool  # it is the same in the whole batch
    heads: bool  # it is the same for all query heads
    diagonal: bool  # it depends on query and key by ``q - k`` alone, so it is the same in all tiles on a diagonal


NO_AXES = BroadcastAxes(False, False, False)


def broadcast_axes(scores: ScoreShape, load: Node) -> BroadcastAxes:
    """The broadcast axes of a tile load; an axis of length 1 is none."""
    nodes = reachable([load])
    used = {n.value for n in nodes if n.op == "input"}
    if "score" in used:  # which varies along all axes
        return NO_AXES
    slopes: dict[Node, int | None] = {}
    of_difference: dict[Node, bool] = {}
    for node in nodes:  # inputs come first
        slopes[node] = _slope(node, [slopes[n] for n in node.inputs])
        by_inputs = bool(node.inputs) and all(of_difference[n] for n in node.inputs)
        of_difference[node] = slopes[node] == 0 or by_inputs
    return BroadcastAxes(
        "b" not in used and scores.B > 1,
        "h" not in used and scores.Hq > 1,
        all(of_difference[index] for index in load.inputs),
    )


def _slope(node: Node, slopes: list[int | None]) -> int | None:
    """The increment of a node when query and key both grow by 1; None if it is not known to be constant."""
    if node.kind == Axes.UNIFORM:
        return 0
    if node.op == "input":
        return 1 if node.value in ("q", "k") else None
    constants = [x for x in slopes if x is not None]
    if len(constants) < len(slopes):
        return None
    if node.op == "convert_element_type":
        return constants[0] if _keeps_slope(node.inputs[0], node.dtype) else None
    is_exact = lambda n: n.op == "convert_element_type" and is_exact_in_float(*n.inputs)
    if node.dtype.kind == "f" and not all(map(is_exact, node.inputs)):
        return None  # inexact sums round up here and down there
    if node.op == "sub":
        return constants[0] - constants[1]
    return {"add": sum(constants), "neg": -constants[0]}.get(node.op) if constants else None


def _keeps_slope(node: Node, dtype: np.dtype) -> bool:
    """True if a cast keeps the slope: it is exact, or to integers that wrap as often."""
    if dtype == np.float32:
        return is_exact_in_float(node)
    wraps = node.bounds is None  # it may; then a wider integer would show the jumps
    return node.dtype.kind in "iu" and dtype.kind in "iu" and not (wraps and dtype.itemsize > node.dtype.itemsize)
