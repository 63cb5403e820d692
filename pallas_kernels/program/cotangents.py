"""From cotangents of loads to gradients of captured arrays.

A kernel reduces the cotangent of a load, in registers, over the axes of the tile on which the load does not depend. The
remaining row and column cotangents are reduced here: over batch and heads where the index does not use them, and then
scattered once into the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ordered_add import flat_positions, ordered_add
from pallas_kernels.program.broadcast_axes import NO_AXES, BroadcastAxes, broadcast_axes
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.evaluate import ArraySpace, Evaluation
from pallas_kernels.program.ir import Axes, Node, reachable
from pallas_kernels.types import ScoreShape


class LoadGroups(NamedTuple):
    """Loads of captured arrays with requested gradients, by how their cotangents leave a kernel."""

    rows: tuple[Node, ...]  # uniform and row loads: cotangents float32 [B, Hq, T], one value for each query
    columns: tuple[Node, ...]  # column loads: cotangents float32 [B, Hq, S]
    # tile loads that are constant along some axes, by these axes: a kernel of its own reduces them
    repeated: tuple[tuple[BroadcastAxes, tuple[Node, ...]], ...]
    stores: tuple[Node, ...]  # tile loads that read each element of their array at most once: stored tile by tile
    atomics: tuple[Node, ...]  # all other tile loads: added by element, with atomics


def group_loads(scores: ScoreShape, derivative: Derivative | None) -> LoadGroups:
    """Groups the loads with requested gradients."""
    loads = [] if derivative is None else list(derivative.d_loads)
    repeated: dict[BroadcastAxes, list[Node]] = {}
    single = []
    for load in (n for n in loads if n.kind == Axes.TILE):
        axes = broadcast_axes(scores, load)
        (repeated.setdefault(axes, []) if any(axes) else single).append(load)
    stored = [n for n in single if stores(scores, single, n, NO_AXES)]
    return LoadGroups(
        tuple(n for n in loads if n.kind in (Axes.UNIFORM, Axes.ROW)),
        tuple(n for n in loads if n.kind == Axes.COLUMN),
        tuple((axes, tuple(group)) for axes, group in repeated.items()),
        tuple(stored),
        tuple(n for n in single if n not in stored),
    )


def stores(scores: ScoreShape, loads: Sequence[Node], load: Node, axes: BroadcastAxes) -> bool:
    """True if a load of a group that is constant along these axes is stored, and not added by atomics.

    No other load of the group reads its array, and different (b, h, q, k) surely read different elements: each has its
    own dimension, up to an offset. `axes` are ignored, because the load is constant along them.
    """
    alone = sum(other.value == load.value for other in loads) == 1
    sizes = {"b": 1 if axes.batch else scores.B, "h": 1 if axes.heads else scores.Hq, "q": scores.T, "k": scores.S}
    indexing = {_argument_with_offset(index) for index in load.inputs}
    return alone and not axes.diagonal and all(size == 1 or name in indexing for name, size in sizes.items())


def is_ordered(scores: ScoreShape, groups: LoadGroups) -> bool:
    """True if all cotangents are added in a fixed order, and none by atomics."""
    stored = (stores(scores, loads, load, axes) for axes, loads in groups.repeated for load in loads)
    return not groups.atomics and all(stored)


def covers(scores: ScoreShape, load: Node, shape: tuple[int, ...]) -> bool:
    """True if a load surely reads all of its array: its indices are arguments, of the sizes of the dimensions."""
    sizes = {"b": scores.B, "h": scores.Hq, "q": scores.T, "k": scores.S}
    named = [index.value if index.op == "input" else None for index in load.inputs]
    return all(size == 1 or sizes.get(name or "") == size for name, size in zip(named, shape, strict=True))


def _argument_with_offset(node: Node) -> str | None:
    if node.op == "input":
        return node.value
    if node.op in ("add", "sub") and node.inputs[0].op == "input" and node.inputs[1].op == "literal":
        return node.inputs[0].value
    return None


def scatter(
    scores: ScoreShape,
    derivative: Derivative,
    operands: Sequence[jax.Array],
    load: Node,
    cotangent: jax.Array,
    *,
    deterministic: bool,
) -> jax.Array:
    """Gradient of the array from which a uniform, row or column load reads: float32, of its shape.

    The cotangent is float32 [B, Hq, T or S], summed over the other axis; `deterministic` adds in a fixed order.
    """
    operand = operands[load.value]
    cotangent = cotangent[:, :, None, :] if load.kind == Axes.COLUMN else cotangent[:, :, :, None]
    used = {n.value for n in reachable([load]) if n.op == "input"}
    summed = [axis for axis, name in enumerate("bhqk") if name not in used]
    cotangent = jnp.sum(cotangent, axis=summed, keepdims=True)
    if operand.ndim == 0:
        return cotangent.reshape(())
    B, H, T, S = scores.B, scores.Hq, scores.T, scores.S
    shapes = {Axes.UNIFORM: (B, H, 1, 1), Axes.ROW: (B, H, T, 1), Axes.COLUMN: (B, H, 1, S)}
    space = ArraySpace(operands, shapes)
    iota = lambda n: jax.lax.broadcasted_iota(jnp.int32, space.shapes[n.kind], "bhqk".index(n.value))
    evaluation = Evaluation(space, {n: iota(n) for n in derivative.program.arguments if n.value != "score"})
    at = [space.spread(evaluation(i), i.kind, load.kind) for i in load.inputs]
    first = tuple(slice(0, 1) if axis in summed else slice(None) for axis in range(4))
    at = tuple(i[first] for i in at)
    if deterministic:
        zeros, shape = jnp.zeros(operand.size, jnp.float32), at[0].shape
        values = jnp.broadcast_to(cotangent, shape).reshape(-1)
        return ordered_add(zeros, flat_positions(at, operand.shape), values).reshape(operand.shape)
    return jnp.zeros(operand.shape, jnp.float32).at[at].add(cotangent)
