"""Along which axes a load always reads the same element: there its cotangents can be summed before they are written."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.program.ir import Node, is_exact_in_float, reachable
from pallas_kernels.spec import AttentionSpec


class Invariance(NamedTuple):
    """Axes along which a load of the size of a tile does not change.

    Attributes:
      batch: It is the same in the whole batch.
      heads: It is the same for all query heads.
      diagonal: It depends on query and key by ``q - k`` alone, so it is the same in all tiles on a diagonal.
    """

    batch: bool
    heads: bool
    diagonal: bool


NO_AXES = Invariance(False, False, False)


def invariance(spec: AttentionSpec, load: Node) -> Invariance:
    """What is known of a load of kind ``"qk"``; an axis of length 1 is none."""
    nodes = reachable([load])
    used = {n.value for n in nodes if n.op == "input"}
    if "score" in used:  # which differs everywhere
        return NO_AXES
    slopes: dict[Node, int | None] = {}
    of_difference: dict[Node, bool] = {}
    for node in nodes:  # inputs come first
        slopes[node] = _slope(node, [slopes[n] for n in node.inputs])
        by_inputs = bool(node.inputs) and all(of_difference[n] for n in node.inputs)
        of_difference[node] = slopes[node] == 0 or by_inputs
    return Invariance(
        "b" not in used and spec.B > 1,
        "h" not in used and spec.Hq > 1,
        all(of_difference[index] for index in load.inputs),
    )


def _slope(node: Node, slopes: list[int | None]) -> int | None:
    """By how much a node grows when query and key both grow by 1; None if that is not known to be constant."""
    if node.kind == "":
        return 0
    if node.op == "input":
        return 1 if node.value in ("q", "k") else None
    known = [x for x in slopes if x is not None]
    if len(known) < len(slopes):
        return None
    if node.op == "convert_element_type":
        return known[0] if _keeps_slope(node.inputs[0], node.dtype) else None
    if node.dtype.kind == "f" and not all(_is_exact(n) for n in node.inputs):
        return None  # sums of other numbers are rounded, here up and there down
    if node.op == "sub":
        return known[0] - known[1]
    return {"add": sum(known), "neg": -known[0]}.get(node.op) if known else None


def _keeps_slope(node: Node, dtype: np.dtype) -> bool:
    """Whether a cast keeps the slope: it is exact, or to integers that wrap as often."""
    if dtype == np.float32:
        return is_exact_in_float(node)
    wraps = node.bounds is None  # as far as is known; then a larger integer would show the jumps
    return node.dtype.kind in "iu" and dtype.kind in "iu" and not (wraps and dtype.itemsize > node.dtype.itemsize)


def _is_exact(node: Node) -> bool:
    return node.op == "convert_element_type" and is_exact_in_float(*node.inputs)
