"""Shared memory of a CTA: swizzled layouts, declarations, and their size in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Axis, Index, Ref, RegisterLayout

LIMIT = 232448  # bytes that a CTA may have on Hopper: 227 KiB
BARRIER_BYTES = 8  # bytes
WARP_GROUP_ROWS = 64  # M of a wgmma


def swizzle_of(size: int, itemsize: int) -> int:
    """The widest swizzle, in bytes, that divides rows of this size.

    Rows are cut into tiles of 8 rows and so many bytes, and their 16-byte pieces are permuted, so that neither wgmma
    nor TMA has bank conflicts.

    >>> swizzle_of(128, 2), swizzle_of(96, 2), swizzle_of(80, 2)
    (128, 64, 32)
    """
    return next(s for s in (128, 64, 32) if size * itemsize % s == 0)


def rows_padded(size: int, itemsize: int) -> int:
    """The next head size that a swizzle divides.

    >>> rows_padded(80, 2), rows_padded(100, 2)
    (80, 112)
    """
    step = 32 // itemsize
    return -(-size // step) * step


def tiled(shape: tuple[int, ...], dtype: DTypeLike, swizzle: int | None = None) -> Ref:
    """Declares rows in the layout that TMA writes and wgmma reads, with the given swizzle or the widest."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle or swizzle_of(shape[-1], itemsize)
    transforms = (plg.TilingTransform((8, swizzle // itemsize)), plg.SwizzleTransform(swizzle))
    return declared(plg.SMEM(shape, dtype, transforms=transforms))


def declared(x: pl.MemoryRef | plg.Barrier) -> Ref:
    """A declaration of scratch, with the type of the ref that a kernel gets."""
    return cast("Ref", x)


def load(ref: Ref, layout: RegisterLayout) -> jax.Array:
    """Loads an array of shared memory into registers."""
    load_: Any = plg.load  # jax < 0.11: wants an index
    return load_(ref, layout=layout)


def bytes_of(declared: Iterable[Ref]) -> int:
    """Bytes of declarations: arrays, aligned as Mosaic GPU aligns them, and barriers, which are packed.

    >>> bytes_of([tiled((2, 64, 128), jnp.bfloat16), plg.Barrier(num_barriers=3)])
    32792
    """
    total = 0
    for x in declared:
        if isinstance(x, plg.Barrier):
            count = x.num_barriers if isinstance(x.num_barriers, int) else math.prod(x.num_barriers)
            total += count * BARRIER_BYTES
        else:
            total += -(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) * 1024
    return total


def rows_at(spec: AttentionSpec, b: Index, h: Index, first: Index, count: int) -> tuple[Axis, ...]:
    """The index of rows of a head, in the layout of the spec."""
    rows = pl.ds(first, count)
    return (b, rows, h) if spec.layout == "BTNH" else (b, h, rows)
