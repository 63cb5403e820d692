"""Masked loads and stores for Pallas' interpreter, on a JAX whose Pallas has none of its own.

A slice becomes an array of indices: the interpreter refuses a slice that is longer than its array, which a kernel
traces, and never loads, where an array is shorter than a tile.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.ref import get as ref_get
from jax.ref import set as ref_set

from pallas_kernels.types import Ref


def load(ref: Ref, mask: jax.Array | None, other: float | None) -> jax.Array:
    """As `pallas_kernels.triton.language.load`."""
    x = ref_get(*_by_arrays(ref))
    return x if mask is None or other is None else jnp.where(mask, x, jnp.full_like(x, other))


def store(ref: Ref, x: jax.Array, mask: jax.Array | None) -> None:
    """As `pallas_kernels.triton.language.store`; masked elements are written with their old values."""
    whole, index = _by_arrays(ref)
    ref_set(whole, index, x if mask is None else jnp.where(mask, x, ref_get(whole, index)))


def _by_arrays(ref: Ref) -> tuple[Any, tuple[jax.Array, ...] | None]:
    """The whole ref, and the index by arrays of one shape; None for all of it."""
    view = cast(Any, ref)
    if not getattr(view, "transforms", ()):
        return ref, None
    (indexer,) = view.transforms
    slices = [x for x in indexer.indices if isinstance(x, pl.Slice)]
    shape, found, before = (*indexer.int_indexer_shape, *(x.size for x in slices)), [], 0
    for index in indexer.indices:
        if isinstance(index, pl.Slice):
            axis = len(indexer.int_indexer_shape) + before
            positions = index.start + jnp.arange(index.size, dtype=jnp.int32)
            found.append(positions.reshape([-1 if i == axis else 1 for i in range(len(shape))]))
            before += 1
        else:
            x = jnp.asarray(index, jnp.int32)
            found.append(x.reshape(*x.shape, *[1] * len(slices)) if x.ndim else x)
    return view.ref, tuple(jnp.broadcast_to(x, shape) if x.ndim else x for x in found)
