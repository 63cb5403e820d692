"""Meshes: traces outside of the caller's mesh, sharding by XLA in explicit ones, varying types in `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Tree = TypeVar("_Tree")


def no_mesh() -> AbstractContextManager[object]:
    """A context without a mesh that keeps the current abstract device, for which a program may be lowered."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def as_known(known: bool) -> AbstractContextManager[object]:
    """Computes at once what is known, also while tracing; outside of the mesh of an enclosing `jax.shard_map`."""
    stack = ExitStack()
    if known:
        stack.enter_context(eval_context())
        stack.enter_context(no_mesh())
    return stack


def without_mesh(arrays: _Tree) -> _Tree:
    """Constants for the inside of `jax.shard_map`, of arrays computed at once in a mesh with explicit axes."""
    is_typed = lambda x: jax.typeof(x).sharding.mesh.explicit_axes and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    return jax.tree.map(lambda x: np.asarray(x) if is_typed(x) else x, arrays)


def replicated(x: jax.Array) -> jax.Array | np.ndarray:
    """A captured array that mods may index: replicated in a mesh with explicit axes, a constant inside `shard_map`."""
    with nullcontext() if isinstance(x, Tracer) else eval_context():
        if jax.sharding.get_abstract_mesh().explicit_axes:
            return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))
        return x if isinstance(x, Tracer) else without_mesh(x)


def isolated_trace(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Traces kernels and programs apart from the caller's settings.

    That is without ``jax_enable_x64``, which would give Python numbers in them 64 bits, and outside the mesh of an
    enclosing `jax.shard_map`, which would put sharding annotations into derivatives.
    """

    @functools.wraps(function)
    def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.enable_x64(False), no_mesh():
            return function(*args, **kwargs)

    return traced


def varying_axes(*arrays: ArrayLike) -> frozenset[str]:
    """Mesh axes of an enclosing `jax.shard_map` over which any of the arrays varies; none outside of it."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Types an array as varying over (at least) `axes`; its values do not change."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_manual_axes(tree: _Tree) -> _Tree:
    """Types all arrays of a pytree as varying over the same axes; the transpose sums cotangents of shared arrays."""
    axes = varying_axes(*jax.tree.leaves(tree))
    return jax.tree.map(lambda x: vary(x, axes), tree)


def compiled_in_shard_map(function: Callable[_P, _R], static_argnums: tuple[int, ...]) -> Callable[_P, _R]:
    """Compiles a function inside of `jax.shard_map`, which evaluates no `custom_vjp` with symbolic zeros by itself."""
    compiled = jax.jit(function, static_argnums=static_argnums, inline=True)  # inline: nothing of it is left in a `jit`

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return function(*args, **kwargs)
        with jax.disable_jit(False):
            return compiled(*args, **kwargs)

    return call


def partitioned_by_xla(compute: Callable[..., _R], out_sharding: Callable[[], PartitionSpec]) -> Callable[..., _R]:
    """Lets XLA choose the shardings inside of a function of arrays.

    `out_sharding`, the sharding of all results, is called only if the mesh has explicit axes.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return compute
    automatic: Any = jax.sharding.auto_axes
    return automatic(compute, out_sharding=out_sharding())


def placed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array with the sharding of another, in a mesh with explicit axes, where the sharding is part of the type."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(x, sharding) if sharding.mesh.explicit_axes else x


def leading_axes(x: jax.Array, count: int) -> PartitionSpec:
    """The sharding of the first axes of an array, and of no others."""
    return PartitionSpec(*jax.typeof(x).sharding.spec[:count])
