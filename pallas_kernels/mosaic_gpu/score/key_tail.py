"""Keys past the end of a request, which may be NaN: their scores are masked, and their values are overwritten."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.score.tile import COLUMN, TILE
from pallas_kernels.types import Index, Ref


def mask_scores(s: jax.Array, first: Index, end: Index) -> jax.Array:
    """Scores [rows, keys] of the tile of keys from `first` on, with -inf from `end` on."""
    keys = s.shape[1]

    def cut(s: jax.Array) -> jax.Array:
        exists = first + plg.broadcasted_iota(jnp.int32, (keys,), 0, layout=COLUMN) < end
        return inline_ptx.mask_scores(TILE, s, [lax.broadcast_in_dim(exists, s.shape, (1,))])

    return lax.cond(first + keys <= end, lambda s: s, cut, s)


def clear_values(ref: Ref, valid: jax.Array) -> None:
    """Overwrites rows of values from `valid` on with zeros, where there are any: a weight of 0 times NaN is NaN."""
    pl.when(valid < ref.shape[0])(functools.partial(_clear_rows, ref, valid))


def _clear_rows(ref: Ref, valid: jax.Array) -> None:
    keys, size = ref.shape
    width = smem.swizzle_of(size, 2) // 2
    row = plg.broadcasted_iota(jnp.int32, (keys, width), 0, layout=TILE)
    for column in range(0, size, width):
        part = ref.at[:, pl.ds(column, width)]
        part[...] = jnp.where(row < valid, smem.load(part, TILE), jnp.zeros((), ref.dtype))
    plg.commit_smem()
