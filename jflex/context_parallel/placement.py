"""Placement of a context parallel call: the mesh, and its axes that divide tokens, batch and heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

Names = str | Sequence[str]
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The axes of a mesh that divide a call."""

    mesh: Any  # the mesh over which the call maps itself; None inside of the caller's `jax.shard_map`
    axis: str
    shards: int
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    batch_shards: int  # the product of their sizes
    head_shards: int

    @classmethod
    def from_mesh(cls, mesh: Any, axis: object, batch_axes: Names, head_axes: Names) -> Placement:
        """Checks the arguments of a call."""
        around = jax.sharding.get_abstract_mesh()
        resolved = around if mesh is None else mesh
        inside = mesh is None and axis in around.manual_axes
        sizes = dict(resolved.shape) if isinstance(resolved, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) else None
        if not sizes:
            raise ValueError(
                "`mesh` must be a `jax.sharding.Mesh` unless the call stands inside of `jax.shard_map` or "
                f"`jax.set_mesh`. Got {type(mesh).__name__ if mesh is not None else None}. Make one with "
                "`jax.make_mesh((8,), ('context',))`."
            )
        batch, heads = _names("batch_axes", batch_axes), _names("head_axes", head_axes)
        used = (*_names("axis", axis if isinstance(axis, str) else (axis,)), *batch, *heads)  # pyright: ignore
        for name in used:
            if name not in sizes:
                raise ValueError(
                    f"`axis`, `batch_axes` and `head_axes` must name axes of the mesh. Got {name!r}; the mesh has "
                    f"{', '.join(map(repr, sizes))}."
                )
        if len(set(used)) < len(used):
            raise ValueError(
                "`axis`, `batch_axes` and `head_axes` must name each axis of the mesh once. Got "
                f"{', '.join(map(repr, used))}."
            )
        if inside and (batch or heads):
            raise ValueError(
                "`batch_axes` and `head_axes` must be empty inside of `jax.shard_map`, whose arrays are those of the "
                f"shard. Got {batch!r} and {heads!r}."
            )
        if around.manual_axes and not inside:  # JAX has no gradients of one `jax.shard_map` inside of another
            known = "" if mesh is None else ", and `mesh` must be left out"
            raise ValueError(
                "`axis` must be one of the axes over which the enclosing `jax.shard_map` is manual, "
                f"{', '.join(map(repr, around.manual_axes))}{known}. Got {axis!r}. Add it to the `axis_names` of "
                "`jax.shard_map`, or call outside of it."
            )
        product = lambda names: math.prod(sizes[name] for name in names)
        local_mesh = None if inside else resolved
        return cls(local_mesh, str(axis), sizes[str(axis)], batch, heads, product(batch), product(heads))

    def shard(self) -> jax.Array:
        """The number of the device along `axis`, inside of its program."""
        return jax.lax.axis_index(self.axis).astype(jnp.int32)

    def mapped(self, body: Callable[..., _R], specs: tuple[PyTree, ...], out_specs: PyTree, *arrays: PyTree) -> _R:
        """Runs the program of one device on each; arrays are placed first where types say how they are sharded."""
        if jax.sharding.AxisType.Explicit in self.mesh.axis_types:
            place_one = lambda spec, x: jax.reshard(x, NamedSharding(self.mesh, spec))
            arrays = jax.tree.map(place_one, specs, arrays, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=out_specs)(*arrays)

    def rows(self, layout: str, *, batch: bool = True) -> PartitionSpec:
        """The sharding of query, key, value, output, or an lse (BNTH); `batch`: whether each entry has its own."""
        first = self.batch if batch and self.batch else None
        heads = self.heads or None
        return PartitionSpec(first, self.axis, heads) if layout == "BTNH" else PartitionSpec(first, heads, self.axis)


def _names(argument: str, names: Names) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        what = "the name of an axis" if argument == "axis" else "a name of an axis, or a sequence of names"
        raise TypeError(f"`{argument}` must be {what} of the mesh. Got {names!r}.")
    return tuple(names)
