"""Types of arrays inside of `jax.shard_map`: over which mesh axes their values vary."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.typing import ArrayLike

T = TypeVar("T")


def varying_axes(*arrays: ArrayLike) -> frozenset[str]:
    """Mesh axes of an enclosing `jax.shard_map` over which any of the arrays varies; none outside of it."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Types an array as varying over (at least) `axes`; its values do not change."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_manual_axes(tree: T) -> T:
    """Types all arrays of a pytree as varying over the same axes.

    The transpose sums the cotangents of arrays that the shards share.
    """
    axes = varying_axes(*jax.tree.leaves(tree))
    return jax.tree.map(lambda x: vary(x, axes), tree)
