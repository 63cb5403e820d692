"""Meshes whose axes are explicit: what XLA may partition by itself nonetheless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec


def partitioned_by_xla(compute: Callable[..., Any], out_sharding: Callable[[], PartitionSpec]) -> Callable[..., Any]:
    """Lets XLA decide about the shardings inside of `compute`.

    Args:
      compute: A function of arrays.
      out_sharding: Makes the sharding of all that it returns; called only if the mesh has explicit axes.

    Returns:
      A function of the same arguments.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return compute
    automatic: Any = jax.sharding.auto_axes
    return automatic(compute, out_sharding=out_sharding())


def leading_axes(x: jax.Array, count: int) -> PartitionSpec:
    """How the first axes of an array are sharded, and none of the others.

    >>> import jax.numpy as jnp
    >>> tuple(leading_axes(jnp.ones((2, 3, 4)), 2))
    (None, None)
    """
    return PartitionSpec(*jax.typeof(x).sharding.spec[:count])
