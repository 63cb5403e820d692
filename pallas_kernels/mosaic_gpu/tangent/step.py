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
from pallas_kernels.spec import LN_2, AttentionSpec
from pallas_kernels.types import Accumulator, Index, Ref


class Directions(NamedTuple):
    """The inputs that have tangents; sinks enter through the rows of the kernel."""

    query: bool
    key: bool
    value: bool
    captured: bool  # whether any captured array of the score mod has one

    @classmethod
    def from_request(cls, requested: GradientRequest) -> Directions:
        """The directions of a request."""
        return cls(*requested[:3], any(requested.score_operands))

    @property
    def scores(self) -> bool:
        """True if scores have tangents."""
        return self.query or self.key or self.captured

    @property
    def keys(self) -> int:
        """Tiles in the ring of keys for each tile of keys: K, and dK."""
        return 1 + self.key

    @property
    def values(self) -> int:
        """Tiles in the ring of values: V where scores have tangents, and dV."""
        return self.scores + self.value


class TangentState(NamedTuple):
    """Sums of the rows of a consumer warp group, after some of the keys; all in registers."""

    out: jax.Array  # float32 [rows, Dv]: T V + P dV
    row_sum: jax.Array | None  # float32 [rows, 8]: sums of T, each over every eighth column; None without T
    row_logs: jax.Array | None  # [rows, 8]: sums of T times the exponents of base 2, for the entropy; None without it
    stage: jax.Array  # the number of the next tile of keys

    @classmethod
    def start(cls, spec: AttentionSpec, directions: Directions, rows: int, stage: jax.Array) -> TangentState:
        """The state before the first tile of keys."""
        sums = directions.scores and spec.normalize == "softmax"
        partial = lambda exists: zero_tile(rows, inline_ptx.TILE_COLUMNS) if exists else None
        logs = partial(sums and "entropy" in spec.stats)
        return cls(zero_tile(rows, spec.Dv), partial(sums), logs, stage)

    def rows(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Row sums of T, and of T times natural exponents."""
        total = lambda x: None if x is None else jnp.sum(x, axis=1)
        logs = total(self.row_logs)
        return total(self.row_sum), None if logs is None else logs * LN_2


class TangentStep(NamedTuple):
    """One iteration of the mainloop: its values for all tiles of keys that a tile of queries visits."""

    prepared: scores.Scores  # how scores are computed, with the loop-invariant values of the mods
    tangent: Tangent | None  # of the score mod; None without one
    directions: Directions
    queries: Ref  # [1 or 2, groups, rows, D] in shared memory: Q, and dQ if it is there
    group: jax.Array  # index of the warp group
    lse_log2: jax.Array | None  # [rows]: the lse in base 2; None without a softmax
    keys: Ring  # K and dK by turns, [block_kv, D] each
    values: Ring  # V and dV by turns, [block_kv, Dv] each

    def __call__(self, state: TangentState, first: Index, is_partial: bool) -> TangentState:
        """Adds a tile of keys.

        The warp groups are not in ping-pong at the GEMMs: it costs 12 % (noop, head size 128: 657 TFLOP/s against 736).
        """
        directions = self.directions
        keys, values = ([state.stage * n + i for i in range(n)] for n in (directions.keys, directions.values))
        # Before the accumulators: they are set to zero by their first wgmma if nothing comes in between.
        for number in keys:
            self.keys.wait(number)
        operands, row_sum, row_logs = self._weights(state, keys, first, is_partial)
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
        return TangentState(out, row_sum, row_logs, state.stage + 1)

    def _weights(
        self, state: TangentState, numbers: list[jax.Array], first: Index, is_partial: bool
    ) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
        """The A operands of the output's GEMMs, T and P as far as they are needed, and the new row sums.

        They are computed part by part, a part of the keys each: so few registers hold what is between.
        """
        prepared, directions = self.prepared, self.directions
        (rows, part), count = prepared.tile, self.keys.tiles[0].shape[1] // prepared.tile[1]

        def gemms(raw: Accumulator, d_raw: Accumulator) -> list[jax.Array]:
            zero = inline_ptx.unknown_zero()
            group, keys = self.group + zero, [self.keys.tiles[0].at[self.keys.slot(i) + zero].T for i in numbers]
            plg.wgmma(raw, self.queries.at[0, group], keys[0])  # S = Q K^T [rows, block_kv]
            if directions.query:
                plg.wgmma(d_raw, self.queries.at[1, group], keys[0])  # dS = dQ K^T
            if directions.key:
                plg.wgmma(d_raw, self.queries.at[0, group], keys[1])  # dS += Q dK^T
            firsts = [first + i * part for i in range(count)]
            prefetched = [scores.prefetch(prepared, x, is_partial) for x in firsts]
            used = [raw, d_raw] if directions.query or directions.key else [raw]
            loaded = [plg.wgmma_accumulator_load(x, wait_n=0) for x in used]
            parts, row_sum, row_logs = [], state.row_sum, state.row_logs
            for i, x in enumerate(firsts):
                columns = loaded if count == 1 else [inline_ptx.columns(TILE, y, i * part, part) for y in loaded]
                operands, row_sum, row_logs = self._part(columns, x, is_partial, prefetched[i], (row_sum, row_logs))
                parts.append(operands)
            joined = [x[0] if count == 1 else inline_ptx.join_columns(TILE, *x) for x in zip(*parts, strict=True)]
            return [*joined, *(x for x in (row_sum, row_logs) if x is not None)]

        acc = accumulator(rows, part * count)
        results = [*pl.run_scoped(gemms, acc, acc), None, None]
        return results[: directions.values], *results[directions.values :][:2]

    def _part(
        self,
        accumulators: list[jax.Array],
        first: Index,
        is_partial: bool,
        prefetched: scores.Prefetched,
        sums: tuple[jax.Array | None, jax.Array | None],
    ) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
        """The A operands of some keys, from QK^T and its tangent if it has one, and the new row sums."""
        prepared, spec, (loaded, *moved), (row_sum, row_logs) = self.prepared, self.prepared.spec, accumulators, sums
        by_clause = has_spare_registers(spec.programs.score) and spec.normalize == "softmax"
        tile = scores.modify(prepared, loaded, first, is_partial, prefetched, by_clause=by_clause)
        tile = tile._replace(kept=scores.kept(prepared, first))
        p, exponent = self._probabilities(tile)
        operands = [p] if self.directions.value else []
        if self.directions.scores:
            t = self._moved(tile, p, self._d_scores(tile, *moved), is_partial)
            operands = [t, *operands]
            row_sum = None if row_sum is None else row_sum + inline_ptx.sum_columns(TILE, t)
            if row_logs is not None:
                assert exponent is not None  # of the entropy
                row_logs = row_logs + inline_ptx.sum_columns(TILE, t * jnp.maximum(exponent, LEAST_EXPONENT))
        return [tile.drop(x).astype(self.values.tiles[0].dtype) for x in operands], row_sum, row_logs

    def _probabilities(self, tile: ScoreTile) -> tuple[jax.Array, jax.Array | None]:
        """P, and the exponents of base 2 for the entropy; without a softmax the scores."""
        if self.lse_log2 is None:
            return scores.linear_weights(self.prepared, tile), None
        lse_log2 = over_columns(self.lse_log2, self.prepared.tile)
        if "entropy" not in self.prepared.spec.stats:
            return scores.weights(self.prepared, tile, lse_log2), None
        exponent = tile.s * self.prepared.log2_scale - lse_log2
        return inline_ptx.exp2(TILE, exponent), exponent

    def _d_scores(self, tile: ScoreTile, d_raw: jax.Array | None = None) -> jax.Array:
        """The tangents of the modified scores."""
        scale = jnp.full((), self.prepared.spec.scale, jnp.float32)
        if self.tangent is None:
            assert d_raw is not None  # without a mod, query or key has a tangent
            return d_raw * scale
        assert tile.score is not None  # the evaluation of the mod
        moved = {} if d_raw is None else {self.tangent.d_score: Product(d_raw, scale)}
        return tile.score.child({}, moved).tile(self.tangent.output)

    def _moved(self, tile: ScoreTile, p: jax.Array, d_s: jax.Array, is_partial: bool) -> jax.Array:
        """T, which is 0 where P is: tangents of masked scores may be infinite or NaN."""
        if self.lse_log2 is None:
            return tile.clear(d_s)
        t = p * d_s
        return jnp.where(p == 0.0, 0.0, t) if is_partial or self.tangent is not None else t
