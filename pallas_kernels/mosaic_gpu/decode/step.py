"""One tile of keys by a consumer warp group of the decoding kernel: QK^T, online softmax, PV (see `kernel`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.pipeline import Ring
from pallas_kernels.mosaic_gpu.score import key_tail, scores
from pallas_kernels.mosaic_gpu.score.support import has_spare_registers
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Accumulator, Ref

_ROWS = smem.WARP_GROUP_ROWS


class State(NamedTuple):
    """Online softmax state after some of the tiles.

    Attributes:
      out: [rows, Dv] float32: sum of weights times values.
      row_max: [rows]: the largest score so far, in base 2.
      row_sum: [rows, 8]: partial sums of the weights, each over every eighth column.
    """

    out: jax.Array
    row_max: jax.Array
    row_sum: jax.Array


def start(spec: AttentionSpec) -> State:
    """The state before the first tile."""
    zeros = lambda columns: plg.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), TILE)
    row_max = plg.layout_cast(jnp.full((_ROWS,), -jnp.inf, jnp.float32), ROW)
    return State(zeros(spec.Dv), row_max, zeros(inline_ptx.TILE_COLUMNS))


class Step(NamedTuple):
    """What the tiles of a work item share.

    Attributes:
      prepared: How scores are computed.
      queries: [rows, D] in shared memory.
      ring: Stages of keys [keys, D] and values [keys, Dv].
      length: Keys of the request.
    """

    prepared: scores.Scores
    queries: Ref
    ring: Ring
    length: jax.Array

    def __call__(self, state: State, number: jax.Array, tile: jax.Array) -> State:
        """The state after another tile, the one of this number in the ring."""
        self.ring.wait(number)
        keys, values = self.ring.stage(number)
        first = tile * TILE_KEYS

        def scores_of(raw: Accumulator) -> jax.Array:
            plg.wgmma(raw, self.queries, keys.T)
            return self._modify(plg.wgmma_accumulator_load(raw), first)

        s = pl.run_scoped(scores_of, plg.WGMMAAccumulatorRef((_ROWS, TILE_KEYS), jnp.float32))
        log2_scale = self.prepared.log2_scale
        row_max = jnp.maximum(state.row_max, jnp.max(s, axis=1) * log2_scale)
        safe_max = finite(row_max)
        p = inline_ptx.exp2(TILE, s * log2_scale - over_columns(safe_max, s.shape))
        alpha = inline_ptx.exp2(ROW, state.row_max - safe_max)
        row_sum = state.row_sum * over_columns(alpha, state.row_sum.shape) + inline_ptx.sum_columns(TILE, p)
        out, weights = state.out * over_columns(alpha, state.out.shape), p.astype(values.dtype)
        key_tail.clear_values(values, self.length - first)
        add: Any = pl.run_state(lambda ref: plg.wgmma(ref, weights, values))
        out = add(plg.WGMMAAccumulatorRef.init(out))
        self.ring.release(number)
        return State(out, row_max, row_sum)

    def _modify(self, raw: jax.Array, first: jax.Array) -> jax.Array:
        """Scores of a tile: mods, and -inf past the end of the keys.

        A tile counts as partial without a mask, too: keys past the end may be NaN, which pairs of logistics would
        share.
        """
        by_clause = has_spare_registers(self.prepared.spec.programs.score)
        s = scores.modify(self.prepared, raw, first, is_partial=True, by_clause=by_clause).s
        return key_tail.mask_scores(s, first, self.length)


def finite(row_max: jax.Array) -> jax.Array:
    """What is subtracted from scores: 0 for rows that are masked so far."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Row values, repeated along rows."""
    return lax.broadcast_in_dim(x, shape, (0,))
