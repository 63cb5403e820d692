"""Tangent kernel for Hopper: tangents of out and lse in one pass over the keys, with the lse of the forward pass.

`pallas_kernels.tangents` has the formulas: five GEMMs, fewer where an input has no tangent. Since the lse is known,
nothing is rescaled: a tile of keys adds to one accumulator. Persistent CTAs draw tiles of queries as the forward kernel
does. Two consumer warp groups own 64 queries each. The producer loads K and dK by turns into one ring of shared memory,
V and dV into another, so that a tile of keys needs no more than five slots at once: at head size 128 there is no room
for more beside Q and dQ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import log2_lse
from pallas_kernels.mosaic_gpu import schedule, smem
from pallas_kernels.mosaic_gpu.backward.stream import load_vector
from pallas_kernels.mosaic_gpu.forward.kernel import store
from pallas_kernels.mosaic_gpu.launch import (
    Grid,
    cut_rows,
    flatten_captured,
    launch,
    output,
    pad_operands,
    pad_rows,
    padded_head_sizes,
    run_roles,
)
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE, over_columns, row_vector
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.mosaic_gpu.tangent.step import TangentState, TangentStep, slots
from pallas_kernels.plan import GradientRequest, TangentPlan
from pallas_kernels.softmax import mark
from pallas_kernels.spec import LN_2, AttentionSpec, Operands
from pallas_kernels.tangents import Moved, Pushed
from pallas_kernels.types import Index, Location, Ref

PART = 32  # keys whose weights are computed at once


class TangentScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    queries: Ref  # [1 or 2, groups, rows, D]: Q, and dQ if it is there
    queries_full: Ref  # a barrier for each group: these have arrived
    queries_empty: Ref  # a barrier for each group: the tile is stored
    keys: Ring  # K and dK by turns, [block_kv, D] each
    values: Ring  # V and dV by turns, [block_kv, Dv] each
    out: Ref | None  # [groups, rows, Dv]: O, then its tangent; None if they overwrite Q
    out_full: Ref  # a barrier for each group: O has arrived
    rows: tuple[Ref, ...]  # float32 [groups, rows]: tangent of the lse, and the row sum for the entropy
    tile_ids: Ref


def declare(spec: AttentionSpec, tiles: Tiles, requested: GradientRequest) -> TangentScratch:
    """The scratch of a CTA: `num_stages` slots in the ring of keys, and one less for values."""
    groups, (D, Dv) = tiles.num_warps // 4, padded_head_sizes(spec, spec.dtype)
    rows, queries = tiles.block_q // groups, 1 + requested.query
    return TangentScratch(
        smem.tiled((queries, groups, rows, D), spec.dtype),
        smem.declared(plg.Barrier(num_arrivals=queries, num_barriers=groups)),
        smem.declared(plg.Barrier(num_barriers=groups)),
        Ring.declare(tiles.num_stages, tiles.block_kv, (D,), spec.dtype, groups),
        Ring.declare(max(tiles.num_stages - 1, slots(requested)[1]), tiles.block_kv, (Dv,), spec.dtype, groups),
        None if Dv == D else smem.tiled((groups, rows, Dv), spec.dtype),
        smem.declared(plg.Barrier(num_barriers=groups)),
        tuple(smem.declared(plg.SMEM((groups, rows), jnp.float32)) for _ in _row_results(spec)),
        schedule.tile_id_scratch(),
    )


def _row_results(spec: AttentionSpec) -> tuple[str, ...]:
    return ("lse", "logs") if "entropy" in spec.stats else ("lse",)


def tangent(plan: TangentPlan, arrays: Operands[jax.Array], moved: Moved[jax.Array]) -> Pushed[jax.Array]:
    """Computes the tangents of out and lse, NaN in the lse where the output must be repaired (`softmax.mark`).

    Args:
      plan: Its tiles have 64 queries for each of `num_warps` / 4 consumers.
      arrays: The operands, with tangents of captured arrays (`pallas_kernels.tangents.with_tangents`).
    """
    spec, tiles = plan.spec, plan.choice.tiles
    order, (T, Dv) = block_walk.row_order(spec, tiles, arrays), (spec.T, spec.Dv)
    captured = scores.CapturedShapes.from_operands(arrays)
    spec, arrays = pad_operands(spec, arrays)
    grid, padding = Grid(spec.B, spec.Hq, pl.cdiv(T, tiles.block_q)), ((0, 0), (0, 0), (0, -T % tiles.block_q))
    is_dynamic = grid.size > schedule.NUM_CTAS and grid.tiles > schedule.MAX_STATIC_TILES
    pad = lambda x, size: None if x is None else pad_rows(spec, x, size)
    moved = Moved(
        pad(moved.query, spec.D),
        pad(moved.key, spec.D),
        pad(moved.value, spec.Dv),
        pad_rows(spec, moved.out, spec.Dv),
        jnp.pad(log2_lse(moved.lse), padding, constant_values=jnp.inf),
        None if moved.d_lse is None else jnp.pad(moved.d_lse, padding),
    )
    per_row = output((spec.B, spec.Hq, grid.tiles * tiles.block_q), jnp.float32)
    out, *rows = launch(
        functools.partial(_kernel, dataclasses.replace(plan, spec=spec), captured, grid),
        (flatten_captured(arrays), moved, order, schedule.tile_counter() if is_dynamic else None),
        (output((*arrays.query.shape[:3], spec.Dv), arrays.value.dtype), *(per_row for _ in _row_results(spec))),
        declare(spec, tiles, plan.requested),
        name="jflex_tangent_sm90",
        num_ctas=min(schedule.NUM_CTAS, grid.size),
        warp_groups=tiles.num_warps // 4 + 1,
    )
    d_lse, logs, *_ = (*(x[..., :T] for x in rows), None)
    return Pushed(cut_rows(spec, out, T, Dv), d_lse, logs)


def _kernel(
    plan: TangentPlan,
    captured: scores.CapturedShapes,
    grid: Grid,
    cta_id: Index,
    # operands, tangents and rows, tile order [list batch, list heads, tiles], tile counter [1]
    inputs: tuple[Operands[Ref], Moved[Ref], Ref | None, Ref | None],
    outputs: tuple[Ref, ...],
    scratch: TangentScratch,
) -> None:
    arrays, moved, order, counter = inputs
    tile_scheduler = schedule.PersistentScheduler(grid, cta_id, counter, scratch.tile_ids)
    row_at = lambda b, h, i: (b, h, block_walk.row_at(plan.spec, order, b, h, i, grid.tiles))
    call = TangentCall(plan, captured, arrays, moved, outputs, scratch, row_at)
    produce, consume = (functools.partial(role, tile_scheduler) for role in (call.produce, call.consume))
    run_roles(scratch.queries.shape[1], produce, consume)


class TangentCall(NamedTuple):
    """A CTA: inputs, outputs and scratch of producer and consumers."""

    plan: TangentPlan  # with padded head sizes
    captured: scores.CapturedShapes  # of the score mod with their tangents
    arrays: Operands[Ref]  # of the forward pass, and tangents of the captured arrays of the score mod
    moved: Moved[Ref]  # lse in base 2, inf for fully masked rows and padding; rows are padded to whole tiles
    outputs: tuple[Ref, ...]  # the tangent of out, like the query, [..., Dv]; rows [B, Hq, rounded up T]
    scratch: TangentScratch
    # maps (batch, head, number in the tile order) to (batch, head, tile of queries)
    row_at: Callable[[jax.Array, jax.Array, jax.Array], Location]

    def produce(self, tile_scheduler: schedule.PersistentScheduler[Location]) -> None:
        """Producer warp group: draws tile ids, and loads all tiles by TMA."""
        tile_scheduler.over_tiles(self._load_tile, tile_scheduler.draw)
        sources, groups = self.scratch.queries.shape[:2]
        for group in range(groups):  # so that the consumers read that no tile is left
            # A barrier that gets arrivals of two phases at once is an illegal instruction.
            plg.barrier_wait(self.scratch.queries_empty.at[group])
            for _ in range(sources):
                plg.barrier_arrive(self.scratch.queries_full.at[group])

    def _load_tile(self, i: Index, index: Location, stage: jax.Array) -> jax.Array:
        """Loads Q and dQ, and the keys and values that they visit; returns the number of the next tile of keys.

        The queries of the second group are loaded after the first keys: the groups end a tile at different times.
        """
        spec, tiles, moved, requested = self.plan.spec, self.plan.choice.tiles, self.moved, self.plan.requested
        keys, values, location = self.scratch.keys, self.scratch.values, self.row_at(*index)
        b, h = (location[0] if spec.Bkv > 1 else 0), lax.div(location[1], jnp.int32(spec.group))
        sources, (per_step, values_per_step) = [self.arrays.value] * requested.moves_scores, slots(requested)
        sources += [] if moved.value is None else [moved.value]

        def others() -> None:
            for group in range(1, self.scratch.queries.shape[1]):
                self._load_queries(i, location, group)

        def step(j: jax.Array, first: Index, _: bool) -> jax.Array:
            at = smem.rows_at(spec, b, h, first, tiles.block_kv)
            keys.fill(j * per_step, self.arrays.key.at[at])
            pl.when(j == stage)(others)
            if moved.key is not None:
                keys.fill(j * per_step + 1, moved.key.at[at])
            for n, source in enumerate(sources):
                values.fill(j * values_per_step + n, source.at[at])
            return j + 1

        self._load_queries(i, location, 0)
        end = block_walk.over_keys(spec, tiles, self.arrays, location, stage, step)
        pl.when(end == stage)(others)
        return end

    def _load_queries(self, i: Index, location: Location, group: int) -> None:
        """Loads Q and dQ of a group, once it has stored the tile before."""
        scratch, (b, h, row), rows = self.scratch, location, self.scratch.queries.shape[2]
        pl.when(i > 0)(lambda: plg.barrier_wait(scratch.queries_empty.at[group]))
        at = smem.rows_at(self.plan.spec, b, h, row * self.plan.choice.tiles.block_q + group * rows, rows)
        sources = (self.arrays.query, self.moved.query)
        for n, source in enumerate(x for x in sources if x is not None):
            plg.copy_gmem_to_smem(source.at[at], scratch.queries.at[n, group], scratch.queries_full.at[group])

    def consume(self, tile_scheduler: schedule.PersistentScheduler[Location], group: jax.Array) -> None:
        """Consumer warp group: computes its rows of each tile of queries."""

        def next_tile(i: Index) -> jax.Array:
            plg.barrier_wait(self.scratch.queries_full.at[group])
            return tile_scheduler.tile_id(i)

        plg.barrier_wait(self.scratch.queries_full.at[group])
        tile_scheduler.over_tiles(functools.partial(self._consume_tile, group), next_tile)

    def _consume_tile(self, group: jax.Array, _: Index, index: Location, stage: jax.Array) -> jax.Array:
        """Prologue, mainloop and epilogue of a consumer's rows; returns the number of the next tile of keys."""
        spec, tiles, scratch, tangent = self.plan.spec, self.plan.choice.tiles, self.scratch, self.plan.tangent
        (b, h, row), rows = location, _ = self.row_at(*index), scratch.queries.shape[2]
        first = row * tiles.block_q + group * rows
        prepared = scores.prepare(
            spec, self.arrays, self.captured, (rows, min(tiles.block_kv, PART)), b, h, q_first=first,
            may_end=spec.T % tiles.block_q != 0, nodes=None if tangent is None else tangent.nodes,
            walked=tiles.block_kv,
        )  # fmt: skip
        if prepared.visible is not None and prepared.visible.is_mask:
            prepared = prepared._replace(visible=None)  # limits of rows take registers: 132 bytes spilled, without 16
        lse_log2 = None
        if spec.normalize == "softmax":
            lse_log2 = load_vector(self.moved.lse.at[b, h, pl.ds(first, rows)], ROW)
        step = TangentStep(
            prepared, tangent, self.plan.requested, scratch.queries, group, lse_log2, scratch.keys, scratch.values
        )
        start = TangentState.start(spec, self.plan.requested, rows, stage)
        state = block_walk.over_keys(spec, tiles, self.arrays, location, start, step)
        self._finish(state, group, (b, h, first))
        return state.stage

    def _finish(self, state: TangentState, group: jax.Array, index: Location) -> None:
        """Epilogue: subtracts dlse * O, and stores by TMA."""
        (b, h, first), spec, scratch, moved = index, self.plan.spec, self.scratch, self.moved
        staged = scratch.queries.at[0, group] if scratch.out is None else scratch.out.at[group]
        out, rows = state.out * spec.kept_scale, scratch.queries.shape[2]
        d_lse, logs, *_ = (*(jnp.sum(x, axis=1) for x in state.sums), row_vector(rows), row_vector(rows))
        moves_rows = bool(state.sums) or (spec.normalize == "softmax" and moved.d_lse is not None)
        if moves_rows:
            plg.commit_smem()  # all warps have read Q, which O overwrites
            source = moved.out.at[smem.rows_at(spec, b, h, first, rows)]
            plg.copy_gmem_to_smem(source, staged, scratch.out_full.at[group])
        if moved.d_lse is not None:
            d_lse = d_lse + load_vector(moved.d_lse.at[b, h, pl.ds(first, rows)], ROW)
        if moves_rows:
            plg.barrier_wait(scratch.out_full.at[group])
            out = out - over_columns(d_lse, out.shape) * smem.load(staged, TILE).astype(jnp.float32)
        d_lse = d_lse + mark(out) if spec.needs_marks else d_lse
        targets = staged, *(x.at[group] for x in scratch.rows)
        store(spec, targets, (out, d_lse, logs * LN_2)[: len(targets)], self.outputs, index)
        plg.wait_smem_to_gmem(0, wait_read_only=True)
        plg.barrier_arrive(scratch.queries_empty.at[group])
