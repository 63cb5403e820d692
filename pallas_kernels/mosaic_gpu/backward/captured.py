"""Backward kernel for Hopper for a pair bias that the batch or the heads share; it may compute dQ too.

A CTA owns a tile of scores, of 64 queries for each consumer warp group, and walks the batch entries, the heads, or
both. The sum of their cotangents stays in registers and is stored once, so memory traffic does not grow with the batch:
to store the cotangents of each entry takes four bytes for each score, twice. Where there are fewer tiles than SMs, CTAs
split what is summed. The producer warp group loads queries, keys, values, dO and row statistics by TMA; a bias tile
stays in shared memory.

dQ = dS K of a tile takes one GEMM more. The tiles of other keys belong to other CTAs: they add to dQ in global memory
by TMA, in no fixed order. The kernel for dQ, which recomputes the scores, is then not needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.gradients import Rows, score_mod_vjp, weights_vjp
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.backward.captured_work import Scratch, Work, declare
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    LSE,
    RowStats,
    Static,
    accumulator,
    load_vector,
    pack_row_stats,
    wait_and_get_all,
)
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flatten_captured, launch
from pallas_kernels.mosaic_gpu.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles, scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Accumulator, Index, Ref, S


class Location(NamedTuple):
    """What a CTA computes: split, range of what is summed, batch entry and head (0 if summed), first query and key."""

    split: jax.Array
    start: jax.Array
    end: jax.Array
    b: jax.Array
    h: jax.Array
    query: jax.Array
    key: jax.Array


class Own(NamedTuple):
    """What belongs to a consumer warp group: its index, rows in the tile of the CTA, first query, tile of scores."""

    group: jax.Array
    rows: slice | pl.Slice
    first: jax.Array
    tile: tuple[int, int]


class CapturedOutputs(NamedTuple):
    """Gradients of the arrays of the loads, float32; dQ, float32 [B, Hq, T, D] without the scale, or None."""

    loads: list[jax.Array]
    query: jax.Array | None


def captured(
    spec: AttentionSpec,
    work: Work,
    arrays: Operands[jax.Array],
    rows: Rows[jax.Array],
    derivative: Derivative,
    groups: LoadGroups,
    *,
    with_query: bool,
) -> CapturedOutputs:
    """Computes the gradients of the arrays of a group of loads.

    Args:
      spec: The spec, with padded head sizes.
      work: What to compute.
      arrays: The operands of the forward pass, padded.
      rows: dO [B, T, Hq, Dv] or [B, Hq, T, Dv]; lse and delta [B, Hq, T].
      derivative: Of the score mod.
      groups: Loads of captured arrays with requested gradients.
      with_query: Whether to compute dQ too, which is not deterministic.
    """
    tiles = work.tiles
    static = Static.of(spec, tiles, arrays, derivative, groups)
    declared = declare(spec, work, arrays.query.dtype, with_query=with_query)
    assert declared is not None  # the plan has checked
    bias = [] if declared.bias is None else [x.of(arrays.captured.score) for x in bias_tiles.bias_loads(spec)]
    states = None if spec.block_size is None else block_walk.states(spec, arrays.lists or ())
    splits, _, _, row_tiles, column_tiles = work.grid(spec)
    d_query = None
    if with_query:
        d_query = jax.new_ref(jnp.zeros((spec.B, spec.Hq, row_tiles * tiles.block_q, spec.D), jnp.float32))
    size = (row_tiles * tiles.block_q, column_tiles * tiles.block_kv)
    leading = [math.prod(spec.score_shapes[n.value][:-2]) for n in work.loads]
    shapes = [jax.ShapeDtypeStruct((splits, n, *size), jnp.float32) for n in leading]
    outs = launch(
        functools.partial(_kernel, static, work),
        (flatten_captured(arrays), states, pack_row_stats(rows, tiles.block_q), bias, d_query),
        shapes,
        declared,
        name="jflex_backward_captured_sm90",
        num_ctas=math.prod(work.grid(spec)),
        warp_groups=static.warp_groups + 1,
    )
    found = [x.sum(axis=0)[:, : spec.T, : spec.S] for x in outs]
    found = [x.reshape(spec.score_shapes[n.value]) for n, x in zip(work.loads, found, strict=True)]
    return CapturedOutputs(found, None if d_query is None else jax.freeze(d_query)[:, :, : spec.T])


def _kernel(
    static: Static,
    work: Work,
    cta_id: Index,
    inputs: tuple[
        Operands[Ref], Ref | None, RowStats[Ref], list[Ref], Ref | None
    ],  # operands, states of blocks [list batch, list heads, rows, columns] or None, `RowStats`, sources of bias tiles,
    # dQ float32 [B, Hq, rounded up T, D] or None
    outputs: tuple[Ref, ...],  # float32 [splits, leading, rounded up T, rounded up S] for each load
    scratch: Scratch,
) -> None:
    arrays, states, row_stats, refs, d_query = inputs
    program = _Program(static, work, arrays, states, scratch, _locate(static, work, cta_id))
    group = lax.axis_index(WARP_GROUP)
    pl.when(group == static.warp_groups)(lambda: program.produce(row_stats, refs))
    pl.when(group < static.warp_groups)(lambda: program.consume(group, outputs, d_query))


def _locate(static: Static, work: Work, cta_id: Index) -> Location:
    sizes, rest, at = work.grid(static.spec), jnp.int32(cta_id), []
    for size in sizes[::-1]:
        at.append(lax.rem(rest, jnp.int32(size)))
        rest = lax.div(rest, jnp.int32(size))
    column, row, h, b, split = at
    total, tiles = work.summed(static.spec), work.tiles
    size = -(-total // work.splits)
    start = split * size
    end = jnp.minimum(start + size, total)
    return Location(split, start, end, b, h, row * tiles.block_q, column * tiles.block_kv)


_State: TypeAlias = tuple[Index, tuple[jax.Array, ...]]  # how many tiles came before, and their sums


class _Program(NamedTuple):
    """A CTA of the kernel."""

    static: Static
    work: Work
    arrays: Operands[Ref]
    states: Ref | None
    scratch: Scratch
    at: Location

    def produce(self, row_stats: RowStats[Ref], refs: list[Ref]) -> None:
        """Producer warp group: loads what the tiles that are summed read, by TMA."""
        plg.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        spec, tiles, at = self.static.spec, self.static.tiles, self.at
        bias, scratch = self.static.bias(self.arrays, refs), self.scratch
        if scratch.bias is not None and self.bias_stays:
            scratch.bias.fill(0, *bias.of_head(at.b, at.h)(at.query, at.key))

        def step(i: Index, b: jax.Array, h: jax.Array, _: bool) -> Index:
            of_rows = smem.rows_at(spec, b, h, at.query, tiles.block_q)
            kv_head = lax.div(h, jnp.int32(spec.group))
            of_keys = smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_head, at.key, tiles.block_kv)
            stats = row_stats.stats.at[b, h, :, pl.ds(at.query, tiles.block_q)]
            sources = self.arrays.query.at[of_rows], row_stats.d_out.at[of_rows]
            scratch.stream.fill(i, *sources, self.arrays.key.at[of_keys], self.arrays.value.at[of_keys], stats)
            if scratch.bias is not None and not self.bias_stays:
                scratch.bias.fill(i, *bias.of_head(b, h)(at.query, at.key))
            return i + 1

        self._walk(jnp.int32(0), step)

    def consume(self, group: jax.Array, outputs: Sequence[Ref], d_query: Ref | None) -> None:
        """Consumer warp group: the mainloop over what is summed, and the epilogue of its 64 queries."""
        plg.set_max_registers(CONSUMER_REGISTERS, action="increase")
        spec, tiles, at = self.static.spec, self.static.tiles, self.at
        rows = tiles.block_q // self.static.warp_groups
        own = Own(group, pl.ds(group * rows, rows), at.query + group * rows, (rows, tiles.block_kv))
        stays = self.bias_stays
        if stays and self.scratch.bias is not None:
            self.scratch.bias.wait(0)

        def step(state: _State, b: jax.Array, h: jax.Array, is_partial: bool) -> _State:
            i, sums = state
            tile = _Tile(self, self._prepared(own, b, h), own, i, is_partial)
            d_s, more = tile.cotangents()
            if d_query is not None:
                tile.add_query(d_s, d_query.at[b, h, pl.ds(own.first, rows)])
            self.scratch.stream.release(i)
            return i + 1, tuple(x + y for x, y in zip(sums, more, strict=True))

        zeros = tuple(plg.layout_cast(jnp.zeros(own.tile, jnp.float32), TILE) for _ in self.work.loads)
        _, sums = self._walk((jnp.int32(0), zeros), step)
        prepared = self._prepared(own, at.b, at.h).score
        assert prepared is not None  # whose loads they are
        for load, ref, x in zip(self.work.loads, outputs, sums, strict=True):
            bias = bias_gradients.bias_load(spec, load)
            assert bias is not None  # the plan has checked
            leading = bias.leading(prepared, spec.score_shapes[load.value])
            ref.at[at.split, leading, pl.ds(own.first, rows), pl.ds(at.key, tiles.block_kv)][...] = x
        plg.wait_smem_to_gmem(0)

    @property
    def bias_stays(self) -> bool:
        """Whether a bias tile is loaded once, for all that are summed."""
        return self.work.is_resident(bias_tiles.bias_loads(self.static.spec))

    def _prepared(self, own: Own, b: jax.Array, h: jax.Array) -> scores.Scores:
        static = self.static
        ends = static.spec.T % static.tiles.block_q != 0
        return scores.prepare(
            static.spec, self.arrays, static.captured, own.tile, b, h, q_first=own.first, may_end=ends,
            nodes=static.nodes,
        )  # fmt: skip

    def _walk(self, state: S, step: Callable[[S, jax.Array, jax.Array, bool], S]) -> S:
        """Folds ``step(state, b, h, is_partial)`` over what is summed, but for empty blocks."""
        spec, tiles, at = self.static.spec, self.static.tiles, self.at
        heads = spec.Hq if self.work.axes.heads else 1

        def one(i: jax.Array, state: S) -> S:
            b = lax.div(i, jnp.int32(heads)) if self.work.axes.batch else at.b
            h = lax.rem(i, jnp.int32(heads)) if self.work.axes.heads else at.h
            if self.states is None or spec.block_size is None:
                return step(state, b, h, spec.programs.mask is not None or spec.S % tiles.block_kv != 0)
            block = (lax.div(at.query, jnp.int32(spec.block_size[0])), lax.div(at.key, jnp.int32(spec.block_size[1])))
            found = self.states[(*block_walk.list_position(spec, b, h), *block)]
            partial, full = (lambda x, is_partial=is_partial: step(x, b, h, is_partial) for is_partial in (True, False))
            visit = lambda x: lax.cond(found == block_walk.PARTIAL, partial, full, x)
            return lax.cond(found == block_walk.EMPTY, lambda x: x, visit, state)

        return lax.fori_loop(at.start, at.end, one, state)


class _Tile(NamedTuple):
    """A tile of scores of one batch entry and head, in a consumer warp group."""

    program: _Program
    prepared: scores.Scores
    own: Own
    i: Index
    is_partial: bool

    def cotangents(self) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """dS, as A operand of wgmma, and the cotangents of the loads."""
        static, scratch, own = self.program.static, self.program.scratch, self.own
        first, prepared = self.program.at.key, self.prepared
        scratch.stream.wait(self.i)
        queries, d_out, keys, values, stats = scratch.stream.stage(self.i)
        vector = lambda which: lax.broadcast_in_dim(load_vector(stats.at[which, own.rows], ROW), own.tile, (0,))

        def gemm(a: Ref, b: Ref) -> jax.Array:
            def run(acc: Accumulator) -> jax.Array:
                plg.wgmma(acc, a.at[own.rows], b.T)
                return plg.wgmma_accumulator_load(acc, wait_n=0)

            return pl.run_scoped(run, accumulator(*own.tile))

        tile = scores.modify(prepared, gemm(queries, keys), first, self.is_partial, bias=self._bias())
        p = scores.weights(prepared, tile, -vector(LSE))
        d_p = gemm(d_out, values)
        if scratch.bias is not None and not self.program.bias_stays:
            scratch.bias.release(self.i)
        tile = tile._replace(kept=scores.kept(prepared, first))
        d_p = weights_vjp(static.spec, tile, d_p)
        d_s = scores.scores_vjp(prepared, tile, p, d_p + vector(DELTA))
        d_s, of_load = score_mod_vjp(static.derivative, tile, d_s)
        return d_s.astype(keys.dtype), tuple(of_load(n) for n in self.program.work.loads)

    def _bias(self) -> list[Ref]:
        ring = self.program.scratch.bias
        if ring is None:
            return []
        found = ring.stage(0) if self.program.bias_stays else wait_and_get_all(ring, self.i)
        return [x.at[self.own.rows] for x in found]

    def add_query(self, d_s: jax.Array, out: Ref) -> None:
        """Adds dS K to dQ, float32 in global memory, by TMA reduction."""
        scratch = self.program.scratch
        assert scratch.d_query is not None  # to stage it
        keys, staged = scratch.stream.stage(self.i)[2], scratch.d_query.at[self.own.group]

        def gemm(acc: Accumulator) -> jax.Array:
            plg.wgmma(acc, d_s, keys)
            return plg.wgmma_accumulator_load(acc, wait_n=0)

        x = pl.run_scoped(gemm, accumulator(self.own.tile[0], keys.shape[1]))
        plg.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = x
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged, out, reduction_op="add")
