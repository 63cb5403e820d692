"""From cotangents of loads to gradients of captured arrays.

A kernel sums the cotangent of a load over the axes on which the load does not depend, in registers. What is left of
rows and columns is summed here: over batch and heads where the index does not use them, and then scattered once into
the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.program.broadcast_axes import NO_AXES, Invariance, invariance
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.evaluate import Evaluation, Space
from pallas_kernels.program.ir import Node, reachable
from pallas_kernels.spec import AttentionSpec


class LoadGroups(NamedTuple):
    """The wanted loads, by how their cotangents leave a kernel.

    Attributes:
      rows: Those that depend on the query or on nothing: float32 [B, Hq, T], one value a query.
      columns: Those that depend on the key: float32 [B, Hq, S].
      repeated: Those by element that are the same along some axes, by these axes: a kernel of its own sums them.
      stores: Those that read each element of their array at most once: stored by tile.
      atomics: All others: added by element.
    """

    rows: tuple[Node, ...]
    columns: tuple[Node, ...]
    repeated: tuple[tuple[Invariance, tuple[Node, ...]], ...]
    stores: tuple[Node, ...]
    atomics: tuple[Node, ...]


def group_loads(spec: AttentionSpec, derivative: Derivative | None) -> LoadGroups:
    """Sorts the wanted loads."""
    loads = [] if derivative is None else list(derivative.d_loads)
    repeated: dict[Invariance, list[Node]] = {}
    single = []
    for load in (n for n in loads if n.kind == "qk"):
        axes = invariance(spec, load)
        (repeated.setdefault(axes, []) if any(axes) else single).append(load)
    alone = lambda n: sum(other.value == n.value for other in single) == 1
    stores = [n for n in single if alone(n) and reads_once(spec, n)]
    return LoadGroups(
        tuple(n for n in loads if n.kind in ("", "q")),
        tuple(n for n in loads if n.kind == "k"),
        tuple((axes, tuple(group)) for axes, group in repeated.items()),
        tuple(stores),
        tuple(n for n in single if n not in stores),
    )


def reads_once(spec: AttentionSpec, load: Node, axes: Invariance = NO_AXES) -> bool:
    """Whether different (b, h, q, k) surely read different elements: each has its own dimension, up to an offset.

    `axes` are those that do not count, because the load is the same along them.
    """
    sizes = {"b": 1 if axes.batch else spec.B, "h": 1 if axes.heads else spec.Hq, "q": spec.T, "k": spec.S}
    own = {_argument_with_offset(index) for index in load.inputs}
    return not axes.diagonal and all(size == 1 or name in own for name, size in sizes.items())


def covers(spec: AttentionSpec, load: Node, shape: tuple[int, ...]) -> bool:
    """Whether a load surely reads all of its array, whose dimensions are arguments as they are."""
    sizes = {"b": spec.B, "h": spec.Hq, "q": spec.T, "k": spec.S}
    named = [index.value if index.op == "input" else None for index in load.inputs]
    return all(size == 1 or sizes.get(name or "") == size for name, size in zip(named, shape, strict=True))


def _argument_with_offset(node: Node) -> str | None:
    if node.op == "input":
        return node.value
    if node.op in ("add", "sub") and node.inputs[0].op == "input" and node.inputs[1].op == "literal":
        return node.inputs[0].value
    return None


class _DenseSpace(Space):
    """All values of a kind at once, as [B, Hq, T or 1, S or 1]."""

    def __init__(self, spec: AttentionSpec, operands: Sequence[jax.Array]) -> None:
        self.operands = operands
        B, H, T, S = spec.B, spec.Hq, spec.T, spec.S
        self.shapes = {"": (B, H, 1, 1), "q": (B, H, T, 1), "k": (B, H, 1, S)}

    def literal(self, node: Node) -> jax.Array:
        return jnp.full(self.shapes[""], node.value.item(), node.dtype)

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        return jnp.broadcast_to(x, self.shapes[to])

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        x = self.operands[node.value]
        x = x[tuple(indices)] if indices else jnp.broadcast_to(x, self.shapes[""])
        return x != 0 if node.dtype == np.bool_ else x


def scatter(
    spec: AttentionSpec, derivative: Derivative, operands: Sequence[jax.Array], load: Node, cotangent: jax.Array
) -> jax.Array:
    """Gradient of the array from which a load reads.

    Args:
      spec: The spec.
      derivative: Of the score program.
      operands: What it captures.
      load: Of kind ``""``, ``"q"`` or ``"k"``.
      cotangent: float32 [B, Hq, T or S], summed over the other axis.

    Returns:
      float32, of the shape of the array.
    """
    operand = operands[load.value]
    cotangent = cotangent[:, :, None, :] if load.kind == "k" else cotangent[:, :, :, None]
    used = {n.value for n in reachable([load]) if n.op == "input"}
    summed = [axis for axis, name in enumerate("bhqk") if name not in used]
    cotangent = jnp.sum(cotangent, axis=summed, keepdims=True)
    if operand.ndim == 0:
        return cotangent.reshape(())
    space, program = _DenseSpace(spec, operands), derivative.program
    numbers = {"b": 0, "h": 1, "q": 2, "k": 3}
    kinds = {"b": "", "h": "", "q": "q", "k": "k"}
    known = {
        n: jax.lax.broadcasted_iota(jnp.int32, space.shapes[kinds[n.value]], numbers[n.value])
        for n in program.arguments
        if n.value in numbers
    }
    evaluation = Evaluation(space, known)
    at = [space.spread(evaluation(i), i.kind, load.kind) for i in load.inputs]
    first = tuple(slice(0, 1) if axis in summed else slice(None) for axis in range(4))
    return jnp.zeros(operand.shape, jnp.float32).at[tuple(i[first] for i in at)].add(cotangent)
