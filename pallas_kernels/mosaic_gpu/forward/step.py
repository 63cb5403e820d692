"""One iteration of the forward mainloop: QK^T of a tile of keys, and PV of the tile before it (see `kernel`)."""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import (
    ROW,
    TILE,
    fits_beside_gemm,
    has_spare_registers,
    over_columns,
    row_vector,
    uses_sfu,
    zero_tile,
)
from pallas_kernels.mosaic_gpu.smem import PingPong, Ring
from pallas_kernels.program import patterns
from pallas_kernels.softmax import LEAST_EXPONENT, mark
from pallas_kernels.spec import LN_2, LOG2_E, AttentionSpec
from pallas_kernels.types import Accumulator, Index, Ref


class ForwardState(NamedTuple):
    """Online softmax state of the rows of a consumer warp group, after some of the keys; all in registers."""

    out: jax.Array  # the O accumulator [rows, Dv] float32: sum of weights times values, without the last tile's
    row_max: jax.Array  # [rows]: the largest score so far, in base 2; 0 where scores are bounded
    row_sum: jax.Array  # [rows, 8]: partial sums of the weights, each over every eighth column
    # [rows, keys]: weights of the last tile, in the dtype of the values: the A operand of the next PV wgmma
    p: jax.Array
    stage: jax.Array  # of the ring: holds the next keys and the values of the last tile
    # [rows, 8]: like `row_sum`, of the weights times their exponents, for the entropy; None without it
    row_logs: jax.Array | None = None


class ForwardStep(NamedTuple):
    """One iteration of the mainloop: its values for all tiles of keys that a tile of queries visits."""

    prepared: scores.Scores  # how scores are computed, with the loop-invariant values of the mods
    queries: Ref  # [rows, D] of the warp group, in shared memory
    ring: Ring  # stages of keys [block_kv, D], values [block_kv, Dv] and bias tiles [block_q, block_kv]
    ping_pong: PingPong  # with the other consumer warp group
    rows: slice | pl.Slice  # the rows of a bias tile that belong to the warp group
    end: Index | None = None  # one past the last key, where tiles may pass it; None for the end of the walk

    @property
    def bounded(self) -> bool:
        """True if scores are bounded, so that no row_max is subtracted and nothing is rescaled."""
        return is_bounded(self.prepared.spec, self.ring.tiles[1].dtype)

    @property
    def at_exponentials(self) -> bool:
        """True if the ping-pong is at the exponentials, which start once row_max is known."""
        return bottleneck(self.prepared.spec) is Bottleneck.SFU and not self.bounded

    def __call__(self, state: ForwardState, first: Index, is_partial: bool) -> ForwardState:
        """QK^T of the tile of keys from `first` on, PV of the tile before it, and the online softmax update.

        Both wgmma GEMMs are issued together, so that the tensor cores go from one to the other without a bubble. The
        next stage is waited for while they run. In the first iteration the PV GEMM has weights of zero.
        """
        prepared = self.prepared
        out, s, row_max, safe_max = self._start_gemms(state, first, is_partial)
        self.ring.release(state.stage)
        drop = functools.partial(scores.drop, prepared, first)
        if prepared.spec.normalize == "none":  # these are the weights
            return state._replace(out=out, p=drop(s).astype(state.p.dtype), stage=state.stage + 1)
        exponent, row_sum, row_logs = s * prepared.log2_scale, state.row_sum, state.row_logs
        if not self.bounded:
            exponent = exponent - over_columns(safe_max, s.shape)
            alpha = inline_ptx.exp2(ROW, state.row_max - safe_max)  # rescale factor of O and row_sum
            if row_logs is not None:
                row_logs = _rescaled_logs(row_logs, row_sum, alpha, state.row_max - safe_max)
            row_sum, out = row_sum * over_columns(alpha, row_sum.shape), out * over_columns(alpha, out.shape)
        p = inline_ptx.exp2(TILE, exponent)  # P = exp2(S - m) [rows, block_kv]
        row_sum = row_sum + inline_ptx.sum_columns(TILE, p)
        if row_logs is not None:
            row_logs = row_logs + inline_ptx.sum_columns(TILE, p * jnp.maximum(exponent, LEAST_EXPONENT))
        if self.at_exponentials:
            row_sum = self.ping_pong.release_after(TILE, row_sum)
        return ForwardState(out, row_max, row_sum, drop(p).astype(state.p.dtype), state.stage + 1, row_logs)

    def _start_gemms(self, state: ForwardState, first: Index, is_partial: bool) -> tuple[jax.Array, ...]:
        """Issues both GEMMs; returns O of the tiles before, S of this tile, row_max, and row_max with 0 for -inf."""
        (keys, values, *bias), spec = self.ring.stage(state.stage), self.prepared.spec
        at_gemms = bottleneck(spec) is Bottleneck.GEMMS

        def gemms(sums: Accumulator, raw: Accumulator) -> tuple[jax.Array, ...]:
            if at_gemms:
                self.ping_pong.acquire()
            plg.wgmma(raw, self.queries, keys.T)  # S = Q K^T [rows, block_kv]
            plg.wgmma(sums, state.p, values)  # O += P V [rows, Dv], of the tile before
            if at_gemms:
                self.ping_pong.release()
            prefetched = scores.prefetch(self.prepared, first, is_partial)
            self.ring.wait(state.stage + 1)
            # The PV GEMM may still run, unless the mod needs the registers of its weights.
            loaded = plg.wgmma_accumulator_load(raw, wait_n=int(fits_beside_gemm(spec.programs.score)))
            by_clause = has_spare_registers(spec.programs.score) and spec.normalize == "softmax"
            rows = [tile.at[self.rows] for tile in bias]
            tile = scores.modify(self.prepared, loaded, first, is_partial, prefetched, rows, by_clause=by_clause)
            if spec.normalize == "none":
                return scores.linear_weights(self.prepared, tile), state.row_max, state.row_max
            s = tile.s if self.end is None else scores.mask_from(self.end, first, tile.s)
            return self._rescale_inputs(s, state.row_max)

        def start(refs: tuple[Ref, ...]) -> None:
            raw = plg.WGMMAAccumulatorRef(self.prepared.tile, jnp.float32)
            for ref, x in zip(refs[1:], pl.run_scoped(functools.partial(gemms, refs[0]), raw), strict=True):
                ref[...] = x

        tile, row = zero_tile(*self.prepared.tile), row_vector(self.prepared.tile[0])
        run: Any = pl.run_state(start)
        return run((plg.WGMMAAccumulatorRef.init(state.out), tile, row, row))

    def _rescale_inputs(self, s: jax.Array, old_max: jax.Array) -> tuple[jax.Array, ...]:
        """Scores, the new row_max, and row_max with 0 for -inf, which is subtracted in the exponent."""
        spec = self.prepared.spec
        if self.bounded:
            return s, old_max, old_max
        row_max = jnp.maximum(old_max, jnp.max(s, axis=1) * self.prepared.log2_scale)
        may_be_empty = spec.programs.mask is not None or spec.programs.score is not None
        safe_max = jnp.where(row_max == -jnp.inf, 0.0, row_max) if may_be_empty else row_max
        return s, row_max, self.ping_pong.acquire_before(ROW, safe_max) if self.at_exponentials else safe_max


class Bottleneck(enum.Enum):
    """The place of the ping-pong: the GEMMs, the special-function unit (SFU), or none."""

    GEMMS = enum.auto()
    SFU = enum.auto()
    NONE = enum.auto()


def bottleneck(spec: AttentionSpec) -> Bottleneck:
    """The part of a tile that takes longest: the consumers ping-pong there.

    One exponential for each score, at 16 a cycle and SM, takes as long as the GEMMs at head size 64: the kernel is
    MUFU-bound up to there. H200, jax 0.11.2, bf16, S 16384, TFLOP/s with ping-pong at the GEMMs and at the
    exponentials: 451 and 501 at head size 64, 716 and 658 at 128 (no mod, earlier forms of the kernel), 617 and 646 at
    96 (causal).

    A mod with special functions keeps the SFU busy by itself: a soft cap under a causal mask gives 380 at head size 64
    without ping-pong, 358 with ping-pong at the GEMMs, 359 with ping-pong at both functions; 646, 624 and 622 at 128.

    Without a softmax there are no exponentials but in the mod (not measured).

    QK^T of eight bits runs at twice the rate. At head size 128 a tile of 64 by 128 then takes 256 cycles of an SM for
    QK^T, 512 for PV and 512 for exponentials, as head size 96 does with 16 bits. As above, without a mod and causal,
    819 and 832 with ping-pong at the GEMMs, 846 and 854 at the exponentials.
    """
    if uses_sfu(spec.programs.score):
        return Bottleneck.NONE
    qk_cost = spec.D if spec.qk_dtype is None else spec.D / 2
    return Bottleneck.GEMMS if qk_cost + spec.Dv > 192 or spec.normalize == "none" else Bottleneck.SFU


MAX_EXPONENT = 80  # sums of 2 ** 80 times values fit into float32 while the values sum up to less than 2 ** 48


def is_bounded(spec: AttentionSpec, dtype: DTypeLike) -> bool:
    """True if the score mod bounds scores so tightly, whatever QK^T, that no running row_max is needed (a soft cap).

    It saves a fifth of the instructions of a tile: 595 became 624 TFLOP/s at head size 128 (as `bottleneck`). Weights
    are then as large as the exponential of the bound, which float16 does not hold. Statistics of rows need the row_max.
    """
    size = None if spec.stats else patterns.bound(spec.programs.score)
    return size is not None and size * LOG2_E <= MAX_EXPONENT and jnp.dtype(dtype) == jnp.bfloat16


def start(spec: AttentionSpec, rows: int, keys: int, dtype: DTypeLike, stage: jax.Array) -> ForwardState:
    """The state before the first tile of keys, which is in the given stage."""
    least = 0.0 if is_bounded(spec, dtype) else -jnp.inf
    row_sum, p = zero_tile(rows, inline_ptx.TILE_COLUMNS), zero_tile(rows, keys, dtype)
    row_logs = zero_tile(rows, inline_ptx.TILE_COLUMNS) if "entropy" in spec.stats else None
    return ForwardState(zero_tile(rows, spec.Dv), row_vector(rows, least), row_sum, p, stage, row_logs)


def finish(
    spec: AttentionSpec, ring: Ring, state: ForwardState, sink: jax.Array | None, visits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Epilogue: PV of the last tile, then `normalized`; without a softmax the output as it is, and zeros.

    `visits` says whether any tile was visited: else the stage of values was never filled.
    """
    values = ring.stage(state.stage)[1]
    add: Any = pl.run_state(lambda ref: plg.wgmma(ref, state.p, values))  # O += P V, of the last tile
    out, row_sum = add(plg.WGMMAAccumulatorRef.init(state.out)), jnp.sum(state.row_sum, axis=1)
    if spec.normalize == "none":
        out, lse = jnp.where(visits, out * spec.kept_scale, 0.0), row_vector(*row_sum.shape)
        return out, lse + mark(out) if spec.needs_marks else lse
    return normalized(out, state.row_max, row_sum, sink, spec.kept_scale, marks=spec.needs_marks)


def stats(spec: AttentionSpec, state: ForwardState, sink: jax.Array | None) -> tuple[jax.Array, ...]:
    """``spec.stats`` of the rows after all keys: the max as a natural score, without the sink; the entropy with it."""
    values = {"max": lambda: state.row_max * LN_2, "entropy": lambda: _entropy(state, sink)}
    return tuple(values[name]() for name in spec.stats)


def _entropy(state: ForwardState, sink: jax.Array | None) -> jax.Array:
    assert state.row_logs is not None  # the state was started with it
    row_sum, row_logs = jnp.sum(state.row_sum, axis=1), jnp.sum(state.row_logs, axis=1)
    if sink is not None:
        row_max, alpha, total = _with_sink(state.row_max, row_sum, sink)
        safe_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        exponent = jnp.maximum(sink * LOG2_E - safe_max, LEAST_EXPONENT)
        row_logs = _rescaled_logs(row_logs, row_sum, alpha, state.row_max - safe_max)
        row_sum, row_logs = total, row_logs + inline_ptx.exp2(ROW, exponent) * exponent
    row_sum = jnp.where(row_sum == 0.0, 1.0, row_sum)
    return jnp.log(row_sum) - LN_2 * row_logs / row_sum


def _rescaled_logs(row_logs: jax.Array, row_sum: jax.Array, alpha: jax.Array, log2_alpha: jax.Array) -> jax.Array:
    """``row_logs`` after a new row_max: each weight is multiplied by alpha, and its exponent grows by log2_alpha."""
    spread = lambda x: x if row_sum.ndim == 1 else over_columns(x, row_sum.shape)
    return (row_logs + row_sum * spread(jnp.maximum(log2_alpha, LEAST_EXPONENT))) * spread(alpha)


def normalized(
    out: jax.Array,
    row_max: jax.Array,
    row_sum: jax.Array,
    sink: jax.Array | None,
    kept_scale: float = 1.0,
    *,
    marks: bool,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse (natural log) of the sums of all keys; zeros and -inf for fully masked rows.

    With `marks` the lse is NaN where the output is not finite. `sink` is the natural logit of the head's sink, a
    scalar, or None; it is the lse of fully masked rows. Dropout multiplies the output by `kept_scale`.
    """
    masked = empty = row_sum == 0.0
    alpha = kept_scale
    if sink is not None:
        row_max, alpha, row_sum = _with_sink(jnp.where(masked, -jnp.inf, row_max), row_sum, sink)
        alpha = alpha * kept_scale
        empty = row_sum == 0.0  # masked, and the sink is -inf
    row_sum = jnp.where(empty, 1.0, row_sum)
    lse = jnp.where(empty, -jnp.inf, row_max * LN_2 + jnp.log(row_sum))
    # Where no tile is visited, the stage of values was never filled.
    out = jnp.where(over_columns(masked, out.shape), 0.0, out)
    return out * over_columns(alpha / row_sum, out.shape), lse + mark(out) if marks else lse


def _with_sink(row_max: jax.Array, row_sum: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row_max, rescale factor of the output and row_sum, once a natural logit has entered the denominator."""
    sink_log2 = sink * LOG2_E
    new_max = jnp.maximum(row_max, sink_log2)
    safe_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    alpha = inline_ptx.exp2(ROW, row_max - safe_max)
    return new_max, alpha, row_sum * alpha + inline_ptx.exp2(ROW, sink_log2 - safe_max)
