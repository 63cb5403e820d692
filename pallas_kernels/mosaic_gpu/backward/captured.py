"""Backward kernel for Hopper for a pair bias that the batch or the heads share; it may compute dQ too.

A CTA owns a tile of scores, of 64 queries for each consumer warp group, and walks the batch entries, the heads, or
both. The sum of their cotangents stays in registers and is stored once, so memory traffic does not grow with the batch:
to store the cotangents of each entry takes four bytes for each score, twice. Where there are fewer tiles than SMs, CTAs
split the sum. The producer warp group loads queries, keys, values, dO and row statistics by TMA; a bias tile
stays in shared memory.

dQ = dS K of a tile takes one GEMM more. The tiles of other keys belong to other CTAs: they add to dQ in global memory
by TMA, in no fixed order. The kernel for dQ, which recomputes the scores, is then not needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.gradients import RowOperands, score_mod_vjp, weights_vjp
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.backward.captured_work import CapturedScratch, CapturedWork, declare
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    LSE,
    BackwardStatic,
    RowStats,
    load_vector,
    pack_row_stats,
    wait_and_get_all,
)
from pallas_kernels.mosaic_gpu.launch import flatten_captured, launch, output, run_roles
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles, scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, accumulator, zero_tile
from pallas_kernels.spec import Operands
from pallas_kernels.types import A, Accumulator, Index, Ref, S


class CapturedLocation(NamedTuple):
    """Location of a CTA: split, range of the sum, batch entry and head (0 if summed), first query and key."""

    split: jax.Array
    start: jax.Array
    end: jax.Array
    b: jax.Array
    h: jax.Array
    query: jax.Array
    key: jax.Array


class QueryRows(NamedTuple):
    """Queries of a consumer warp group: its index, rows in the tile of the CTA, first query, shape of its scores."""

    group: jax.Array
    rows: slice | pl.Slice
    first: jax.Array
    tile: tuple[int, int]


class CapturedInputs(NamedTuple, Generic[A]):
    """The inputs of the kernel."""

    arrays: Operands[A]
    states: A | None  # states of blocks [list batch, list heads, rows, columns], or None
    row_stats: RowStats[A]  # dO, lse and delta
    bias: list[A]  # sources of bias tiles
    d_query: A | None  # dQ, float32 [B, Hq, rounded up T, D], to which the kernel adds, or None


class CapturedOutputs(NamedTuple):
    """Gradients of the arrays of the loads, float32; dQ, float32 [B, Hq, T, D] without the scale, or None."""

    loads: list[jax.Array]
    query: jax.Array | None


def captured(
    static: BackwardStatic,
    work: CapturedWork,
    arrays: Operands[jax.Array],
    rows: RowOperands[jax.Array],
    *,
    with_query: bool,
) -> CapturedOutputs:
    """Computes the gradients of the arrays of a group of loads, from padded operands as `BackwardCall` has them.

    `with_query` computes dQ too, which is not deterministic.
    """
    spec, tiles = static.spec, work.tiles
    scratch = declare(spec, work, arrays.query.dtype, with_query=with_query)
    assert scratch is not None  # the plan has checked
    bias = [] if scratch.bias is None else [x.source(arrays.captured.score) for x in bias_tiles.bias_loads(spec)]
    states = None if spec.block_size is None else block_walk.states(spec, arrays.lists or ())
    splits, _, _, row_tiles, column_tiles = work.grid(spec)
    d_query = None
    if with_query:
        d_query = jax.new_ref(jnp.zeros((spec.B, spec.Hq, row_tiles * tiles.block_q, spec.D), jnp.float32))
    size = (row_tiles * tiles.block_q, column_tiles * tiles.block_kv)
    leading = [math.prod(spec.score_shapes[n.value][:-2]) for n in work.loads]
    sums = launch(
        functools.partial(_kernel, static, work),
        CapturedInputs(
            flatten_captured(arrays),
            states,
            pack_row_stats(rows, tiles.block_q),
            bias,
            d_query,  # pyright: ignore[reportArgumentType]  (of JAX's own type of refs)
        ),
        [output((splits, n, *size), jnp.float32) for n in leading],
        scratch,
        name="jflex_backward_captured_sm90",
        num_ctas=math.prod(work.grid(spec)),
        warp_groups=static.warp_groups + 1,
    )
    sums = [x.sum(axis=0)[:, : spec.T, : spec.S] for x in sums]
    gradients = [x.reshape(spec.score_shapes[n.value]) for n, x in zip(work.loads, sums, strict=True)]
    return CapturedOutputs(gradients, None if d_query is None else jax.freeze(d_query)[:, :, : spec.T])


def _kernel(
    static: BackwardStatic,
    work: CapturedWork,
    cta_id: Index,
    inputs: CapturedInputs[Ref],
    outputs: list[Ref],  # float32 [splits, leading, rounded up T, rounded up S] for each load
    scratch: CapturedScratch,
) -> None:
    program = _CapturedProgram(static, work, inputs, scratch, _locate(static, work, cta_id))
    run_roles(static.warp_groups, program.produce, lambda group: program.consume(group, outputs))


def _locate(static: BackwardStatic, work: CapturedWork, cta_id: Index) -> CapturedLocation:
    quotient, at = jnp.int32(cta_id), []
    for size in work.grid(static.spec)[::-1]:
        at.append(lax.rem(quotient, jnp.int32(size)))
        quotient = lax.div(quotient, jnp.int32(size))
    column, row, h, b, split = at
    total, tiles = work.summed(static.spec), work.tiles
    size = -(-total // work.splits)
    start = split * size
    end = jnp.minimum(start + size, total)
    return CapturedLocation(split, start, end, b, h, row * tiles.block_q, column * tiles.block_kv)


_CapturedState: TypeAlias = tuple[Index, tuple[jax.Array, ...]]  # the number of tiles so far, and their sums


class _CapturedProgram(NamedTuple):
    """A CTA of the kernel."""

    static: BackwardStatic
    work: CapturedWork
    inputs: CapturedInputs[Ref]
    scratch: CapturedScratch
    at: CapturedLocation

    def produce(self) -> None:
        """Producer warp group: loads the operands of all tiles of the sum by TMA."""
        spec, tiles, at, scratch = self.static.spec, self.static.tiles, self.at, self.scratch
        arrays, row_stats = self.inputs.arrays, self.inputs.row_stats
        bias = self.static.bias(arrays, self.inputs.bias)
        if scratch.bias is not None and self.bias_stays:
            scratch.bias.fill(0, *bias.sources_of_head(at.b, at.h)(at.query, at.key))

        def step(i: Index, b: jax.Array, h: jax.Array, _: bool) -> Index:
            rows = smem.rows_at(spec, b, h, at.query, tiles.block_q)
            kv_head = lax.div(h, jnp.int32(spec.group))
            columns = smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_head, at.key, tiles.block_kv)
            stats = row_stats.stats.at[b, h, :, pl.ds(at.query, tiles.block_q)]
            sources = arrays.query.at[rows], row_stats.d_out.at[rows]
            scratch.stream.fill(i, *sources, arrays.key.at[columns], arrays.value.at[columns], stats)
            if scratch.bias is not None and not self.bias_stays:
                scratch.bias.fill(i, *bias.sources_of_head(b, h)(at.query, at.key))
            return i + 1

        self._walk(jnp.int32(0), step)

    def consume(self, group: jax.Array, outputs: Sequence[Ref]) -> None:
        """Consumer warp group: the mainloop over batch entries and heads, and the epilogue of its 64 queries."""
        spec, tiles, at, d_query = self.static.spec, self.static.tiles, self.at, self.inputs.d_query
        rows = tiles.block_q // self.static.warp_groups
        queries = QueryRows(group, pl.ds(group * rows, rows), at.query + group * rows, (rows, tiles.block_kv))
        stays = self.bias_stays
        if stays and self.scratch.bias is not None:
            self.scratch.bias.wait(0)

        def step(state: _CapturedState, b: jax.Array, h: jax.Array, is_partial: bool) -> _CapturedState:
            i, sums = state
            tile = _CapturedTile(self, self._prepared(queries, b, h), queries, i, is_partial)
            d_s, more = tile.cotangents()
            if d_query is not None:
                tile.add_query(d_s, d_query.at[b, h, pl.ds(queries.first, rows)])
            self.scratch.stream.release(i)
            return i + 1, tuple(x + y for x, y in zip(sums, more, strict=True))

        zeros = tuple(zero_tile(*queries.tile) for _ in self.work.loads)
        _, sums = self._walk((jnp.int32(0), zeros), step)
        prepared = self._prepared(queries, at.b, at.h).score
        assert prepared is not None  # whose loads they are
        for load, ref, x in zip(self.work.loads, outputs, sums, strict=True):
            bias = bias_gradients.bias_load(spec, load)
            assert bias is not None  # the plan has checked
            leading = bias.leading(prepared, spec.score_shapes[load.value])
            ref.at[at.split, leading, pl.ds(queries.first, rows), pl.ds(at.key, tiles.block_kv)][...] = x
        plg.wait_smem_to_gmem(0)

    @property
    def bias_stays(self) -> bool:
        """True if a bias tile is loaded once, for the whole sum."""
        return self.work.is_resident(bias_tiles.bias_loads(self.static.spec))

    def _prepared(self, queries: QueryRows, b: jax.Array, h: jax.Array) -> scores.Scores:
        return self.static.prepare(self.inputs.arrays, queries.tile, b, h, q_first=queries.first)

    def _walk(self, state: S, step: Callable[[S, jax.Array, jax.Array, bool], S]) -> S:
        """Folds ``step(state, b, h, is_partial)`` over batch entries and heads, without empty blocks."""
        spec, tiles, at = self.static.spec, self.static.tiles, self.at
        heads = spec.Hq if self.work.axes.heads else 1

        def one(i: jax.Array, state: S) -> S:
            b = lax.div(i, jnp.int32(heads)) if self.work.axes.batch else at.b
            h = lax.rem(i, jnp.int32(heads)) if self.work.axes.heads else at.h
            states = self.inputs.states
            if states is None or spec.block_size is None:
                return step(state, b, h, spec.programs.mask is not None or spec.S % tiles.block_kv != 0)
            block = (lax.div(at.query, jnp.int32(spec.block_size[0])), lax.div(at.key, jnp.int32(spec.block_size[1])))
            block_state = states[(*block_walk.list_position(spec, b, h), *block)]
            partial, full = (lambda x, is_partial=is_partial: step(x, b, h, is_partial) for is_partial in (True, False))
            visit = lambda x: lax.cond(block_state == block_walk.PARTIAL, partial, full, x)
            return lax.cond(block_state == block_walk.EMPTY, lambda x: x, visit, state)

        return lax.fori_loop(at.start, at.end, one, state)


class _CapturedTile(NamedTuple):
    """A tile of scores of one batch entry and head, in a consumer warp group."""

    program: _CapturedProgram
    prepared: scores.Scores
    queries: QueryRows
    i: Index
    is_partial: bool

    def cotangents(self) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """dS, as A operand of wgmma, and the cotangents of the loads."""
        static, scratch, rows = self.program.static, self.program.scratch, self.queries.rows
        first, prepared = self.program.at.key, self.prepared
        scratch.stream.wait(self.i)
        queries, d_out, keys, values, stats = scratch.stream.stage(self.i)
        vector = lambda which: lax.broadcast_in_dim(load_vector(stats.at[which, rows], ROW), self.queries.tile, (0,))

        def gemm(a: Ref, b: Ref) -> jax.Array:
            def run(acc: Accumulator) -> jax.Array:
                plg.wgmma(acc, a.at[rows], b.T)
                return plg.wgmma_accumulator_load(acc, wait_n=0)

            return pl.run_scoped(run, accumulator(*self.queries.tile))

        s = gemm(queries, keys)  # S = Q K^T [rows, block_kv]
        tile = scores.modify(prepared, s, first, self.is_partial, bias=self._bias())
        p = scores.weights(prepared, tile, -vector(LSE))  # P = exp2(S - lse)
        d_p = gemm(d_out, values)  # dP = dO V^T [rows, block_kv]
        if scratch.bias is not None and not self.program.bias_stays:
            scratch.bias.release(self.i)
        tile = tile._replace(kept=scores.kept(prepared, first))
        d_p = weights_vjp(static.spec, tile, d_p)
        d_s = scores.scores_vjp(prepared, tile, p, d_p + vector(DELTA))  # dS = P * (dP - delta)
        d_s, d_load = score_mod_vjp(static.derivative, tile, d_s)  # dS', through the score mod
        return d_s.astype(keys.dtype), tuple(d_load(n) for n in self.program.work.loads)

    def _bias(self) -> list[Ref]:
        ring = self.program.scratch.bias
        if ring is None:
            return []
        stage = ring.stage(0) if self.program.bias_stays else wait_and_get_all(ring, self.i)
        return [x.at[self.queries.rows] for x in stage]

    def add_query(self, d_s: jax.Array, out: Ref) -> None:
        """Adds dS K to dQ, float32 in global memory, by TMA reduction."""
        scratch = self.program.scratch
        assert scratch.d_query is not None  # to stage it
        keys, staged = scratch.stream.stage(self.i)[2], scratch.d_query.at[self.queries.group]

        def gemm(acc: Accumulator) -> jax.Array:
            plg.wgmma(acc, d_s, keys)  # dQ = dS' K [rows, D]
            return plg.wgmma_accumulator_load(acc, wait_n=0)

        x = pl.run_scoped(gemm, accumulator(self.queries.tile[0], keys.shape[1]))
        plg.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = x
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged, out, reduction_op="add")
