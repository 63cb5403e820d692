"""Tangent kernel for Hopper: tangents of out and lse in one pass over the keys, with the lse of the forward pass.

With P = exp(S - lse), and T = P * dS (0 where P is 0)::

    ds = scale * (dQ K^T + Q dK^T),   dS = the tangent of the score mod,   dlse = rowsum(T),
    dO = T V + P dV - dlse * O

Five GEMMs, fewer where an input has no tangent. Since the lse is known, nothing is rescaled: a tile of keys adds to one
accumulator. Persistent CTAs draw tiles of queries as the forward kernel does. Two consumer warp groups own 64 queries
each. The producer loads K and dK by turns into one ring of shared memory, V and dV into another, so that a tile of keys
needs no more than five slots at once: at head size 128 there is no room for more beside Q and dQ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import log2_lse
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.backward.stream import load_vector
from pallas_kernels.mosaic_gpu.forward import schedule
from pallas_kernels.mosaic_gpu.launch import (
    WARP_GROUP,
    Grid,
    cut_rows,
    flatten_captured,
    launch,
    output,
    pad_operands,
    pad_rows,
    padded_head_sizes,
)
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE, over_columns, row_vector
from pallas_kernels.mosaic_gpu.smem import CONSUMER_REGISTERS, PRODUCER_REGISTERS, Ring
from pallas_kernels.mosaic_gpu.tangent.step import Directions, TangentState, TangentStep
from pallas_kernels.plan import GradientRequest
from pallas_kernels.program.tangents import Tangent
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.tangents import Moved, Pushed
from pallas_kernels.types import A, Index, Location, Ref

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

    def staged(self, group: jax.Array) -> Ref:
        """Where a group stages O and its tangent."""
        return self.queries.at[0, group] if self.out is None else self.out.at[group]


class TangentInputs(NamedTuple, Generic[A]):
    """Inputs of the kernel."""

    arrays: Operands[A]  # of the forward pass, and tangents of the captured arrays of the score mod
    moved: Moved[A]  # lse in base 2, inf for fully masked rows and padding; rows are padded to whole tiles
    order: A | None  # the order of tiles, [list batch, list heads, tiles]
    counter: A | None  # of tiles, [1]


class TangentStatic(NamedTuple):
    """Statics of a launch."""

    spec: AttentionSpec
    tiles: Tiles
    directions: Directions
    tangent: Tangent | None  # of the score mod; None without one, or where no score moves
    captured: scores.CapturedShapes

    @property
    def groups(self) -> int:
        """Consumer warp groups of a CTA."""
        return self.tiles.num_warps // 4

    @property
    def rows(self) -> int:
        """Queries of a consumer warp group."""
        return self.tiles.block_q // self.groups

    @property
    def grid(self) -> Grid:
        """All tiles of queries."""
        return Grid(self.spec.B, self.spec.Hq, pl.cdiv(self.spec.T, self.tiles.block_q))

    @property
    def num_rows(self) -> int:
        """Row outputs: the tangent of the lse, and the row sum for the entropy."""
        return 2 if "entropy" in self.spec.stats else 1


def declare(spec: AttentionSpec, tiles: Tiles, directions: Directions, dtype: DTypeLike) -> TangentScratch:
    """The scratch of a CTA: `num_stages` slots in the ring of keys, and as many in that of values, or one less."""
    groups, (D, Dv) = tiles.num_warps // 4, padded_head_sizes(spec, dtype)
    rows, num_rows = tiles.block_q // groups, 2 if "entropy" in spec.stats else 1

    def declared(slots: int) -> TangentScratch:
        return TangentScratch(
            smem.tiled((1 + directions.query, groups, rows, D), dtype),
            smem.declared(plg.Barrier(num_arrivals=1 + directions.query, num_barriers=groups)),
            smem.declared(plg.Barrier(num_barriers=groups)),
            Ring.declare(tiles.num_stages, tiles.block_kv, (D,), dtype, groups),
            Ring.declare(slots, tiles.block_kv, (Dv,), dtype, groups),
            None if Dv == D else smem.tiled((groups, rows, Dv), dtype),
            smem.declared(plg.Barrier(num_barriers=groups)),
            tuple(smem.declared(plg.SMEM((groups, rows), jnp.float32)) for _ in range(num_rows)),
            schedule.tile_id_scratch(),
        )

    equal, fewer = declared(tiles.num_stages), declared(max(tiles.num_stages - 1, directions.values))
    return equal if smem.bytes_of(jax.tree.leaves(equal)) <= smem.LIMIT else fewer


def tangent(
    spec: AttentionSpec,
    tiles: Tiles,
    requested: GradientRequest,
    program: Tangent | None,
    arrays: Operands[jax.Array],
    moved: Moved[jax.Array],
) -> Pushed[jax.Array]:
    """Computes the tangents of out and lse, NaN in the lse where the output must be repaired (`softmax.mark`).

    Args:
      tiles: `block_q` queries, 64 for each of `num_warps` / 4 consumers, and `block_kv` keys; `num_stages` slots in the
        ring of keys.
      requested: The inputs that have tangents.
      program: The tangent of the score mod; None without one, or where no score moves.
      arrays: The operands, with tangents of captured arrays (`pallas_kernels.tangents.with_tangents`).
    """
    order, directions = block_walk.row_order(spec, tiles, arrays), Directions.from_request(requested)
    T, Dv, alone = spec.T, spec.Dv, arrays._replace(captured=arrays.captured._replace(score=()))
    shapes = scores.CapturedShapes.from_operands(alone)._replace(
        score=spec.score_shapes * 2
    )  # tangents have the shapes of their arrays
    spec, arrays = pad_operands(spec, arrays)
    static = TangentStatic(spec, tiles, directions, program, shapes)
    scratch, grid = declare(spec, tiles, directions, arrays.value.dtype), static.grid
    is_dynamic = grid.size > schedule.NUM_CTAS and grid.tiles > schedule.MAX_STATIC_TILES
    per_row = output((spec.B, spec.Hq, grid.tiles * tiles.block_q), jnp.float32)
    inputs = TangentInputs(
        flatten_captured(arrays),
        _padded(static, moved),
        order,
        schedule.tile_counter() if is_dynamic else None,  # pyright: ignore[reportArgumentType]  (JAX's type of refs)
    )
    out, *rows = launch(
        functools.partial(_kernel, static),
        inputs,
        (output((*arrays.query.shape[:3], spec.Dv), arrays.value.dtype), *(per_row for _ in range(static.num_rows))),
        scratch,
        name="jflex_tangent_sm90",
        num_ctas=min(schedule.NUM_CTAS, grid.size),
        warp_groups=static.groups + 1,
    )
    d_lse, *logs = (x[..., :T] for x in rows)
    return Pushed(cut_rows(spec, out, T, Dv), d_lse, logs[0] if logs else None)


def _padded(static: TangentStatic, moved: Moved[jax.Array]) -> Moved[jax.Array]:
    """The operands as the kernel reads them: see `TangentInputs`."""
    spec, end = static.spec, ((0, 0), (0, 0), (0, -static.spec.T % static.tiles.block_q))
    pad = lambda x, size: None if x is None else pad_rows(spec, x, size)
    return Moved(
        pad(moved.query, spec.D),
        pad(moved.key, spec.D),
        pad(moved.value, spec.Dv),
        pad_rows(spec, moved.out, spec.Dv),
        jnp.pad(log2_lse(moved.lse), end, constant_values=jnp.inf),
        None if moved.d_lse is None else jnp.pad(moved.d_lse, end),
    )


def _kernel(
    static: TangentStatic,
    cta_id: Index,
    inputs: TangentInputs[Ref],
    outputs: tuple[Ref, ...],  # the tangent of out, like the query, [..., Dv]; rows [B, Hq, rounded up T]
    scratch: TangentScratch,
) -> None:
    grid = static.grid
    tile_scheduler = schedule.PersistentScheduler(grid, cta_id, inputs.counter, scratch.tile_ids)
    row_at = lambda b, h, i: (b, h, block_walk.row_at(static.spec, inputs.order, b, h, i, grid.tiles))
    group = lax.axis_index(WARP_GROUP)
    call = TangentCall(static, inputs, outputs, scratch, row_at)
    pl.when(group == static.groups)(lambda: call.produce(tile_scheduler))
    pl.when(group < static.groups)(lambda: call.consume(tile_scheduler, group))


class TangentCall(NamedTuple):
    """A CTA: inputs, outputs and scratch of producer and consumers."""

    static: TangentStatic
    inputs: TangentInputs[Ref]
    outputs: tuple[Ref, ...]
    scratch: TangentScratch
    # maps (batch, head, number in the tile order) to (batch, head, tile of queries)
    row_at: Callable[[jax.Array, jax.Array, jax.Array], Location]

    def produce(self, tile_scheduler: schedule.PersistentScheduler[Location]) -> None:
        """Producer warp group: draws tile ids, and loads all tiles by TMA."""
        plg.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        tile_scheduler.over_tiles(self._load_tile, tile_scheduler.draw)
        for group in range(self.static.groups):  # so that the consumers read that no tile is left
            # A barrier that gets arrivals of two phases at once is an illegal instruction.
            plg.barrier_wait(self.scratch.queries_empty.at[group])
            for _ in range(self.scratch.queries.shape[0]):
                plg.barrier_arrive(self.scratch.queries_full.at[group])

    def _load_tile(self, i: Index, index: Location, stage: jax.Array) -> jax.Array:
        """Loads Q and dQ, and the keys and values that they visit; returns the number of the next tile of keys.

        The queries of the second group are loaded after the first keys: the groups end a tile at different times.
        """
        spec, tiles, inputs, directions = self.static.spec, self.static.tiles, self.inputs, self.static.directions
        keys, values, moved, arrays = self.scratch.keys, self.scratch.values, inputs.moved, inputs.arrays
        location = self.row_at(*index)
        b, h = (location[0] if spec.Bkv > 1 else 0), lax.div(location[1], jnp.int32(spec.group))
        others = lambda: [self._load_queries(i, location, group) for group in range(1, self.static.groups)]
        self._load_queries(i, location, 0)

        def step(j: jax.Array, first: Index, _: bool) -> jax.Array:
            at = smem.rows_at(spec, b, h, first, tiles.block_kv)
            keys.fill(j * directions.keys, arrays.key.at[at])
            pl.when(j == stage)(lambda: (others(), None)[1])
            if moved.key is not None:
                keys.fill(j * directions.keys + 1, moved.key.at[at])
            sources = [arrays.value] if directions.scores else []
            sources += [] if moved.value is None else [moved.value]
            for n, source in enumerate(sources):
                values.fill(j * directions.values + n, source.at[at])
            return j + 1

        end = block_walk.over_keys(spec, tiles, arrays, location, stage, step)
        pl.when(end == stage)(lambda: (others(), None)[1])
        return end

    def _load_queries(self, i: Index, location: Location, group: int) -> None:
        """Loads Q and dQ of a group, once it has stored the tile before."""
        static, scratch, (b, h, row) = self.static, self.scratch, location
        pl.when(i > 0)(lambda: plg.barrier_wait(scratch.queries_empty.at[group]))
        at = smem.rows_at(static.spec, b, h, row * static.tiles.block_q + group * static.rows, static.rows)
        sources = (self.inputs.arrays.query, self.inputs.moved.query)
        for n, source in enumerate(x for x in sources if x is not None):
            plg.copy_gmem_to_smem(source.at[at], scratch.queries.at[n, group], scratch.queries_full.at[group])

    def consume(self, tile_scheduler: schedule.PersistentScheduler[Location], group: jax.Array) -> None:
        """Consumer warp group: computes its rows of each tile of queries."""
        plg.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def next_tile(i: Index) -> jax.Array:
            plg.barrier_wait(self.scratch.queries_full.at[group])
            return tile_scheduler.tile_id(i)

        plg.barrier_wait(self.scratch.queries_full.at[group])
        tile_scheduler.over_tiles(functools.partial(self._consume_tile, group), next_tile)

    def _consume_tile(self, group: jax.Array, i: Index, index: Location, stage: jax.Array) -> jax.Array:
        """Prologue, mainloop and epilogue of a consumer's rows; returns the number of the next tile of keys."""
        del i
        static, scratch, inputs = self.static, self.scratch, self.inputs
        spec, tiles, rows = static.spec, static.tiles, static.rows
        b, h, row = location = self.row_at(*index)
        first = row * tiles.block_q + group * rows
        prepared = scores.prepare(
            spec, inputs.arrays, static.captured, (rows, min(tiles.block_kv, PART)), b, h, q_first=first,
            may_end=spec.T % tiles.block_q != 0, nodes=None if static.tangent is None else static.tangent.nodes,
            walked=tiles.block_kv,
        )  # fmt: skip
        lse_log2 = None
        if spec.normalize == "softmax":
            lse_log2 = load_vector(inputs.moved.lse.at[b, h, pl.ds(first, rows)], ROW)
        step = TangentStep(
            prepared, static.tangent, static.directions, scratch.queries, group, lse_log2, scratch.keys, scratch.values,
        )  # fmt: skip
        start = TangentState.start(spec, static.directions, rows, stage)
        state = block_walk.over_keys(spec, tiles, inputs.arrays, location, start, step)
        self._finish(state, group, (b, h, first))
        return state.stage

    def _finish(self, state: TangentState, group: jax.Array, index: Location) -> None:
        """Epilogue: subtracts dlse * O, and stores by TMA; TMA drops rows past the end."""
        (b, h, first), spec, scratch, rows = index, self.static.spec, self.scratch, self.static.rows
        at, staged = smem.rows_at(spec, b, h, first, rows), scratch.staged(group)
        out, (row_sum, logs) = state.out * spec.kept_scale, state.rows()
        moves_rows = spec.normalize == "softmax" and (row_sum is not None or self.inputs.moved.d_lse is not None)
        if moves_rows:
            plg.commit_smem()  # all warps have read Q, which O overwrites
            plg.copy_gmem_to_smem(self.inputs.moved.out.at[at], staged, scratch.out_full.at[group])
        d_lse = row_vector(rows) if row_sum is None else row_sum
        if self.inputs.moved.d_lse is not None:
            d_lse = d_lse + load_vector(self.inputs.moved.d_lse.at[b, h, pl.ds(first, rows)], ROW)
        if moves_rows:
            plg.barrier_wait(scratch.out_full.at[group])
            out = out - over_columns(d_lse, out.shape) * smem.load(staged, TILE).astype(jnp.float32)
        d_lse = d_lse + mark(out) if spec.needs_marks else d_lse
        logs = row_vector(rows) if logs is None else logs
        staged[...] = out.astype(staged.dtype)
        for ref, x in zip(scratch.rows, (d_lse, logs), strict=False):
            ref.at[group][...] = x
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged, self.outputs[0].at[at])
        for ref, target in zip(scratch.rows, self.outputs[1:], strict=True):
            plg.copy_smem_to_gmem(ref.at[group], target.at[b, h, pl.ds(first, rows)])
        plg.wait_smem_to_gmem(0, wait_read_only=True)
        plg.barrier_arrive(scratch.queries_empty.at[group])
