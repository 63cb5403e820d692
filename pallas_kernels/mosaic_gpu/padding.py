"""Pads arrays with zeros to shapes that TMA takes.

TMA needs a multiple of 16 numbers in a row, and a multiple of 8 rows, which is what a swizzled tile has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.spec import AttentionSpec, Operands

ROWS = 8


def padded(spec: AttentionSpec, arrays: Operands[jax.Array]) -> tuple[AttentionSpec, Operands[jax.Array]]:
    """The spec with padded head sizes, and the arrays; lengths in the spec stay the true ones."""
    D, Dv = head_sizes(spec, arrays.value.dtype)
    wide = arrays._replace(
        query=pad_rows(spec, arrays.query, D),
        key=pad_rows(spec, arrays.key, D),
        value=pad_rows(spec, arrays.value, Dv),
    )
    return spec.replace(D=D, Dv=Dv), wide


def head_sizes(spec: AttentionSpec, dtype: DTypeLike) -> tuple[int, ...]:
    """Head sizes of query and key, and of value, which has the given dtype, padded to a multiple of a swizzle."""
    sizes = (spec.D, spec.qk_dtype or dtype), (spec.Dv, dtype)
    return tuple(smem.rows_padded(size, jnp.dtype(of).itemsize) for size, of in sizes)


def pad_rows(spec: AttentionSpec, x: jax.Array, size: int) -> jax.Array:
    """An array in the layout of the spec, with rows of `size` and a number of them that is a multiple of 8."""
    axis = _axis(spec)
    widths = [(0, 0)] * 4
    widths[axis], widths[3] = (0, -x.shape[axis] % ROWS), (0, size - x.shape[3])
    return x if widths == [(0, 0)] * 4 else jnp.pad(x, widths)


def like_rows(x: jax.Array, size: int) -> jax.ShapeDtypeStruct:
    """The shape of an array like `x`, which is padded, with rows of `size`."""
    return jax.ShapeDtypeStruct((*x.shape[:3], size), x.dtype)


def cut_rows(spec: AttentionSpec, x: jax.Array, length: int, size: int) -> jax.Array:
    """Slices off what `pad_rows` padded."""
    return jax.lax.slice_in_dim(x, 0, length, axis=_axis(spec))[..., :size]


def _axis(spec: AttentionSpec) -> int:
    return 1 if spec.layout == "BTNH" else 2
