"""One tile of keys by a consumer warp group of the decoding kernel: QK^T, online softmax, PV (see `kernel`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE, accumulate, accumulator, over_columns, row_vector, zero_tile
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.mosaic_gpu.split_kv import clear_values, finite, scores_of
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Accumulator, Ref

_ROWS = smem.WARP_GROUP_ROWS


class DecodeState(NamedTuple):
    """Online softmax state after some of the tiles."""

    out: jax.Array  # [rows, Dv] float32: sum of weights times values
    row_max: jax.Array  # [rows]: the largest score so far, in base 2
    row_sum: jax.Array  # [rows, 8]: partial sums of the weights, each over every eighth column


def start(spec: AttentionSpec) -> DecodeState:
    """The state before the first tile."""
    row_max = row_vector(_ROWS, -jnp.inf)
    return DecodeState(zero_tile(_ROWS, spec.Dv), row_max, zero_tile(_ROWS, inline_ptx.TILE_COLUMNS))


class DecodeStep(NamedTuple):
    """The mainloop of a consumer warp group: its values for all tiles of a work item."""

    prepared: scores.Scores  # how scores are computed
    queries: Ref  # [rows, D] in shared memory
    ring: Ring  # stages of keys [keys, D] and values [keys, Dv]
    length: jax.Array  # keys of the request

    def __call__(self, state: DecodeState, number: jax.Array, tile: jax.Array) -> DecodeState:
        """The state after another tile, the one of this number in the ring."""
        self.ring.wait(number)
        keys, values = self.ring.stage(number)
        first = tile * TILE_KEYS

        def qk(raw: Accumulator) -> jax.Array:
            plg.wgmma(raw, self.queries, keys.T)  # S = Q K^T [rows, keys]
            return scores_of(self.prepared, plg.wgmma_accumulator_load(raw), first, self.length)

        s = pl.run_scoped(qk, accumulator(_ROWS, TILE_KEYS))
        log2_scale = self.prepared.log2_scale
        row_max = jnp.maximum(state.row_max, jnp.max(s, axis=1) * log2_scale)
        safe_max = finite(row_max)
        p = inline_ptx.exp2(TILE, s * log2_scale - over_columns(safe_max, s.shape))  # P = exp2(S - m)
        alpha = inline_ptx.exp2(ROW, state.row_max - safe_max)  # rescale factor of O and row_sum
        row_sum = state.row_sum * over_columns(alpha, state.row_sum.shape) + inline_ptx.sum_columns(TILE, p)
        out, weights = state.out * over_columns(alpha, state.out.shape), p.astype(values.dtype)
        clear_values(values, self.length - first)
        out = accumulate(out, lambda ref: plg.wgmma(ref, weights, values))  # O += P V [rows, Dv]
        self.ring.release(number)
        return DecodeState(out, row_max, row_sum)
