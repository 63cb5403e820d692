"""Lazy views of captured arrays: indexing composes windows, and nothing is loaded before an element is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.program.ir import Graph, Node
from pallas_kernels.types import Params

MAX_VALUES = 64  # values that one mod may hold at once: vectors of positions, stacks, sums over an own axis


class NotOnTile(Exception):
    """A mod has no meaning on a tile; the message is the reason, as part of a sentence."""


Scalars = np.ndarray[Any, np.dtype[np.object_]]  # of nodes


def scalars(shape: Sequence[int], value_at: Callable[[tuple[int, ...]], object]) -> Scalars:
    """An array of nodes, ``of(index)`` at each index."""
    out = np.empty(tuple(shape), object)
    for index in np.ndindex(*shape):
        out[index] = value_at(index)
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A window on an operand."""

    operand: int  # index of the captured array
    dtype: np.dtype
    index: tuple[Node, ...]  # where the window starts, one node for each dimension of the operand
    # for each dimension of the window, the dimension of the operand along which it runs (None: repeated) and the step
    axes: tuple[tuple[int | None, int], ...]
    shape: tuple[int, ...]
    valid: Node | None = None  # whether the elements are in range; None if they surely are
    fill: npt.ArrayLike | None = None  # value of elements out of range
    stopped: bool = False  # whether a `stop_gradient` was applied

    @classmethod
    def whole(cls, graph: Graph, operand: int, shape: Sequence[int], dtype: DTypeLike) -> View:
        """All of an operand."""
        zero = graph.literal(0, np.int32)
        return cls(
            operand, np.dtype(dtype), (zero,) * len(shape), tuple((d, 1) for d in range(len(shape))), tuple(shape)
        )

    def window(self, graph: Graph, starts: Sequence[Node | int], shape: Sequence[int], steps: Sequence[int]) -> View:
        """A window on this window; the starts must be in range."""
        index, axes = list(self.index), []
        for (dimension, step), start, more in zip(self.axes, starts, steps, strict=True):
            axes.append((dimension, step * more))
            if dimension is not None:
                start = graph.literal(start, np.int32) if isinstance(start, int) else graph.cast(start, np.int32)
                offset = graph.same_dtype("mul", lax.mul, start, graph.literal(step, np.int32))
                index[dimension] = graph.same_dtype("add", lax.add, index[dimension], offset)
        return dataclasses.replace(self, index=tuple(index), axes=tuple(axes), shape=tuple(shape))

    def dynamic(self, graph: Graph, starts: Sequence[Node], sizes: Sequence[int]) -> View:
        """``lax.dynamic_slice``: starts are clamped so that the slice lies inside."""
        inside = [
            graph.clamp(start, 0, have - size) for start, have, size in zip(starts, self.shape, sizes, strict=True)
        ]
        return self.window(graph, inside, sizes, (1,) * len(sizes))

    def stop_gradient(self) -> View:
        """This window, without derivative."""
        return dataclasses.replace(self, stopped=True)

    def select_dimensions(self, kept: Sequence[int]) -> View:
        """Keeps some dimensions, in this order; the others must have size 1."""
        return dataclasses.replace(
            self, axes=tuple(self.axes[d] for d in kept), shape=tuple(self.shape[d] for d in kept)
        )

    def broadcast(self, shape: Sequence[int], dimensions: Sequence[int]) -> View:
        """``lax.broadcast_in_dim``."""
        axes: list[tuple[int | None, int]] = [(None, 0)] * len(shape)
        for have, d in enumerate(dimensions):
            if self.shape[have] == shape[d]:
                axes[d] = self.axes[have]
        return dataclasses.replace(self, axes=tuple(axes), shape=tuple(shape))

    def element(self, graph: Graph, position: Sequence[int]) -> Node:
        """Loads one element."""
        at = self.window(graph, list(position), (), (1,) * len(position)) if position else self
        loaded = graph.load(self.operand, self.dtype, at.index)
        if self.stopped:
            loaded = graph.stop_gradient(loaded)
        if self.valid is None or self.fill is None:
            return loaded
        return graph.select(self.valid, loaded, graph.literal(self.fill, self.dtype))

    def load(self, graph: Graph) -> Scalars:
        """Loads all elements.

        Raises:
          NotOnTile: They are more than `MAX_VALUES`.
        """
        if math.prod(self.shape) > MAX_VALUES:
            raise NotOnTile(
                f"it uses {list(self.shape)} values of a captured array at once, and a tile holds at most {MAX_VALUES} "
                "for each element: index the array until few are left"
            )
        return scalars(self.shape, lambda position: self.element(graph, position))


def gather(graph: Graph, source: View, indices: Scalars, params: Params) -> View | Scalars:
    """``lax.gather`` from an operand: a view if there is one start index, else the few gathered elements."""
    numbers = params["dimension_numbers"]
    sizes = params["slice_sizes"]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(sizes)) if d not in dropped]

    def at(batch: tuple[int, ...]) -> View:
        starts = [graph.literal(0, np.int32)] * len(sizes)
        valid = graph.literal(True, np.bool_)
        for number, d in enumerate(numbers.start_index_map):
            index, last = indices[(*batch, number)], source.shape[d] - sizes[d]
            if params["mode"] == lax.GatherScatterMode.CLIP and index.dtype == np.uint32:
                index = graph.clamp(index, 0, last)  # before it is negative
            start = graph.cast(index, np.int32)
            if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
                for op, limit in (("ge", 0), ("le", last)):
                    inside = graph.compare(op, start, graph.literal(limit, np.int32))
                    valid = graph.same_dtype("and", lax.bitwise_and, valid, inside)
            starts[d] = graph.clamp(start, 0, last)
        for d, batch_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            starts[d] = graph.literal(batch[batch_dim], np.int32)
        window = source.window(graph, starts, sizes, (1,) * len(sizes))
        if valid.bounds != (1, 1):
            if window.valid is not None:
                raise NotOnTile("it indexes what it has already indexed with a fill value; clip the indices instead")
            window = dataclasses.replace(window, valid=valid, fill=fill_of(window.dtype, params.get("fill_value")))
        return window.select_dimensions(kept)

    batch_shape = indices.shape[:-1]
    if batch_shape == ():
        return at(())
    rank = len(batch_shape) + len(kept)
    offsets = list(numbers.offset_dims)
    outer = [d for d in range(rank) if d not in offsets]
    shape = [0] * rank
    for d, size in [*zip(outer, batch_shape, strict=True), *zip(offsets, (sizes[k] for k in kept), strict=True)]:
        shape[d] = size
    if math.prod(shape) > MAX_VALUES:
        raise NotOnTile(f"it gathers {shape} values at once, and a tile holds at most {MAX_VALUES} for each element")
    return scalars(shape, lambda i: at(tuple(i[d] for d in outer)).element(graph, [i[d] for d in offsets]))


def fill_of(dtype: np.dtype, fill: npt.ArrayLike | None) -> npt.ArrayLike:
    """The value of elements out of range: the given one, or JAX's for the dtype."""
    if fill is not None:
        return fill
    if dtype.kind == "b":
        return True
    if dtype.kind in "iu":
        return jnp.iinfo(dtype).min if dtype.kind == "i" else jnp.iinfo(dtype).max
    return np.nan
