"""One iteration of the tangent mainloop: GEMMs of scores and their tangents, weights, GEMMs of the output."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import (
    TILE,
    accumulate,
    accumulator,
    has_spare_registers,
    over_columns,
    zero_tile,
)
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.plan import GradientRequest
from pallas_kernels.program.evaluate import Product
from pallas_kernels.program.tangents import Tangent
from pallas_kernels.softmax import LEAST_EXPONENT, ScoreTile
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Accumulator, Index, Ref


def slots(requested: GradientRequest) -> tuple[int, int]:
    """Tiles in the rings of keys (K, dK) and values (V where scores have tangents, dV) for each tile of keys."""
    return 1 + requested.key, requested.moves_scores + requested.value


class TangentState(NamedTuple):
    """Sums of the rows of a consumer warp group, after some of the keys; all in registers."""

    out: jax.Array  # float32 [rows, Dv]: T V + P dV
    # float32 [rows, 8] each, over every eighth column: of T, and for the entropy of T times the exponents of base 2;
    # none without T or a softmax
    sums: tuple[jax.Array, ...]
    stage: jax.Array  # the number of the next tile of keys

    @classmethod
    def start(cls, spec: AttentionSpec, requested: GradientRequest, rows: int, stage: jax.Array) -> TangentState:
        """The state before the first tile of keys."""
        count = 1 + ("entropy" in spec.stats) if requested.moves_scores and spec.normalize == "softmax" else 0
        sums = tuple(zero_tile(rows, inline_ptx.TILE_COLUMNS) for _ in range(count))
        return cls(zero_tile(rows, spec.Dv), sums, stage)


class TangentStep(NamedTuple):
    """One iteration of the mainloop: its values for all tiles of keys that a tile of queries visits."""

    prepared: scores.Scores  # how scores are computed, with the loop-invariant values of the mods
    tangent: Tangent | None  # of the score mod; None without one
    requested: GradientRequest  # the inputs that have tangents; sinks enter through the rows of the kernel
    queries: Ref  # [1 or 2, groups, rows, D] in shared memory: Q, and dQ if it is there
    group: jax.Array  # index of the warp group
    lse_log2: jax.Array | None  # [rows]: the lse in base 2; None without a softmax
    keys: Ring  # K and dK by turns, [block_kv, D] each
    values: Ring  # V and dV by turns, [block_kv, Dv] each

    def __call__(self, state: TangentState, first: Index, is_partial: bool) -> TangentState:
        """Adds a tile of keys, without ping-pong (H200, jax 0.11.2, bf16, no mod, D 128: 736 TFLOP/s, with it 657)."""
        keys, values = ([state.stage * n + i for i in range(n)] for n in slots(self.requested))
        # Before the accumulators: they are set to zero by their first wgmma if nothing comes in between.
        for number in keys:
            self.keys.wait(number)
        operands, sums = self._weights(state.sums, keys, first, is_partial)
        for number in keys:
            self.keys.release(number)
        for number in values:
            self.values.wait(number)

        def gemms(out: Accumulator) -> None:
            zero = inline_ptx.unknown_zero()
            for operand, number in zip(operands, values, strict=True):  # O' += T V, then P dV [rows, Dv]
                plg.wgmma(out, operand, self.values.tiles[0].at[self.values.slot(number) + zero])

        out = accumulate(state.out, gemms)
        for number in values:
            self.values.release(number)
        return TangentState(out, sums, state.stage + 1)

    def _weights(
        self, sums: tuple[jax.Array, ...], numbers: list[jax.Array], first: Index, is_partial: bool
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """The A operands of the output's GEMMs, T and P as far as they are needed, and the new sums.

        They are computed part by part, a part of the keys each: so few registers hold what is between.
        """
        prepared, requested = self.prepared, self.requested
        (rows, part), block_kv = prepared.tile, self.keys.tiles[0].shape[1]
        starts = range(0, block_kv, part)

        def gemms(raw: Accumulator, d_raw: Accumulator) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
            zero = inline_ptx.unknown_zero()
            group, keys = self.group + zero, [self.keys.tiles[0].at[self.keys.slot(i) + zero].T for i in numbers]
            plg.wgmma(raw, self.queries.at[0, group], keys[0])  # S = Q K^T [rows, block_kv]
            if requested.query:
                plg.wgmma(d_raw, self.queries.at[1, group], keys[0])  # dS = dQ K^T
            if requested.key:
                plg.wgmma(d_raw, self.queries.at[0, group], keys[1])  # dS += Q dK^T
            prefetched = [scores.prefetch(prepared, first + i, is_partial) for i in starts]
            used = [raw, d_raw] if requested.query or requested.key else [raw]
            loaded = [plg.wgmma_accumulator_load(x, wait_n=0) for x in used]
            parts, new_sums = [], sums
            for i, fetched in zip(starts, prefetched, strict=True):
                columns = [inline_ptx.columns(TILE, x, i, part) for x in loaded]
                operands, new_sums = self._part(columns, first + i, is_partial, fetched, new_sums)
                parts.append(operands)
            return [inline_ptx.join_columns(TILE, *x) for x in zip(*parts, strict=True)], new_sums

        acc = accumulator(rows, block_kv)
        return pl.run_scoped(gemms, acc, acc)

    def _part(
        self,
        accumulators: list[jax.Array],
        first: Index,
        is_partial: bool,
        prefetched: scores.Prefetched,
        sums: tuple[jax.Array, ...],
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """The A operands of some keys, from QK^T and its tangent if it has one, and the new sums."""
        prepared, spec, (loaded, *moved) = self.prepared, self.prepared.spec, accumulators
        by_clause = has_spare_registers(spec.programs.score) and spec.normalize == "softmax"
        tile = scores.modify(prepared, loaded, first, is_partial, prefetched, by_clause=by_clause)
        tile = tile._replace(kept=scores.kept(prepared, first))
        if self.lse_log2 is None:
            p, terms = scores.linear_weights(prepared, tile), ()
        else:
            lse_log2 = over_columns(self.lse_log2, prepared.tile)
            p, terms = scores.weights(prepared, tile, lse_log2), (1.0,)
            if "entropy" in spec.stats:
                terms = 1.0, jnp.maximum(tile.s * prepared.log2_scale - lse_log2, LEAST_EXPONENT)
        operands = [p] if self.requested.value else []
        if self.requested.moves_scores:
            d_s = self._d_scores(tile, *moved)
            t = tile.clear(d_s) if self.lse_log2 is None else p * d_s
            if self.lse_log2 is not None and (is_partial or self.tangent is not None):
                t = jnp.where(p == 0.0, 0.0, t)  # tangents of masked scores may be infinite or NaN
            operands = [t, *operands]
            sums = tuple(x + inline_ptx.sum_columns(TILE, t * y) for x, y in zip(sums, terms, strict=True))
        return [tile.drop(x).astype(self.values.tiles[0].dtype) for x in operands], sums

    def _d_scores(self, tile: ScoreTile, d_raw: jax.Array | None = None) -> jax.Array:
        """The tangents of the modified scores."""
        scale = jnp.full((), self.prepared.spec.scale, jnp.float32)
        if self.tangent is None:
            assert d_raw is not None  # without a mod, query or key has a tangent
            return d_raw * scale
        assert tile.score is not None  # the evaluation of the mod
        moved = {} if d_raw is None else {self.tangent.d_score: Product(d_raw, scale)}
        return tile.score.child({}, moved).tile(self.tangent.output)
