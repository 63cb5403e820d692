"""Backward kernel for dQ on Hopper, and for captured arrays that are read by query, by query and key, or as a whole.

A CTA owns a tile of queries of one head, and walks the tiles of keys that the forward kernel visits. The producer warp
group loads them by TMA; two consumer warp groups own 64 queries each, with their dQ accumulator in registers. dS is the
A operand of the dQ GEMM straight from registers.
"""

from __future__ import annotations

import functools
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import RowOperands, score_mod_vjp, weights_vjp
from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    LSE,
    BackwardStatic,
    RowStats,
    load_vector,
    pack_row_stats,
    store_sums,
    wait_and_get,
    wait_and_get_all,
)
from pallas_kernels.mosaic_gpu.launch import Grid, flatten_captured, launch, output, run_roles
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles, scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, accumulator, row_vector
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import A, Accumulator, Index, Location, Ref


class DqOutputs(NamedTuple, Generic[A]):
    """The outputs of the kernel: arrays, their shapes, or in the kernel refs."""

    query: A  # dQ, in the layout and dtype of the query
    # gradients of the arrays of ``groups.stores``, by position there; in a launch [leading, padded T, padded S],
    # without the arrays that start as zeros
    stores: dict[int, A]
    rows: list[A]  # cotangents [B, Hq, T] of ``groups.rows``; in a launch T is rounded up to whole tiles
    marks: A | None  # NaN for queries whose dQ is not finite, shaped as rows; None where nothing is masked


class DqInputs(NamedTuple, Generic[A]):
    """The inputs of the kernel."""

    arrays: Operands[A]
    order: A | None  # the order of tiles, [list batch, list heads, tiles]; None without a mask
    row_stats: RowStats[A]  # dO, lse and delta
    bias: list[A]  # sources of bias tiles
    # zeros [leading, padded T, padded S], by position in ``groups.stores``, unless all of it is written
    zeros: dict[int, A]


class DqScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    queries: Ref  # [groups, rows, D]; the epilogue stages dQ there
    d_out: Ref  # [groups, rows, Dv]
    sums: Ref  # float32 [groups, rows], to stage cotangents of loads by query
    full: Ref  # a barrier for each group: its queries and dO have arrived
    keys: Ring  # ring of keys [block_kv, D]
    values: Ring  # ring of values [block_kv, Dv]; of one stage where more do not fit
    stored: tuple[Ref, ...]  # [groups, rows, block_kv] for each of ``groups.stores``, to stage cotangents
    bias: Ring | None  # ring of bias tiles [block_q, block_kv]; None without


class QueryTile(NamedTuple):
    """Per-warp-group query state."""

    group: jax.Array  # index of the warp group
    rows: slice | pl.Slice  # slice of its rows in the tile of the CTA
    lse_log2: jax.Array  # [rows]: the lse in base 2, which is subtracted from scores
    delta: jax.Array  # [rows]: subtracted from dP
    d_query: Accumulator  # the dQ accumulator [rows, D]
    stored: bias_gradients.BiasGradients  # where it stores cotangents of loads by query and key


def declare(spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike, loads: LoadGroups) -> DqScratch:
    """The scratch of a CTA."""
    groups = tiles.num_warps // 4
    rows = tiles.block_q // groups

    def with_values(stages: int) -> DqScratch:
        make = functools.partial(
            DqScratch,
            smem.tiled((groups, rows, spec.D), dtype),
            smem.tiled((groups, rows, spec.Dv), dtype),
            smem.declared(plg.SMEM((groups, rows), jnp.float32)),
            smem.declared(plg.Barrier(num_arrivals=2, num_barriers=groups)),
            Ring.declare(tiles.num_stages, tiles.block_kv, (spec.D,), dtype, groups),
            Ring.declare(stages, tiles.block_kv, (spec.Dv,), dtype, groups),
            bias_gradients.declare(loads.stores, tiles),
        )
        return bias_tiles.with_bias_ring(make, spec, tiles)

    scratch = with_values(tiles.num_stages)
    return scratch if smem.bytes_of(jax.tree.leaves(scratch)) <= smem.LIMIT else with_values(1)


def dq(static: BackwardStatic, arrays: Operands[jax.Array], rows: RowOperands[jax.Array]) -> DqOutputs[jax.Array]:
    """Computes dQ, and cotangents of loads by query, or by query and key.

    A consumer warp group takes 64 queries. Operands are padded, as `BackwardCall` has them.
    """
    spec, tiles, groups = static.spec, static.tiles, static.groups
    grid, scratch = _grid(static), declare(spec, tiles, arrays.query.dtype, groups)
    per_row = output((spec.B, spec.Hq, grid.tiles * tiles.block_q), jnp.float32)
    zeros = bias_gradients.zeros(spec, groups.stores)
    loads = () if scratch.bias is None else bias_tiles.bias_loads(spec)
    shapes = DqOutputs(
        output(arrays.query.shape, arrays.query.dtype),
        {
            i: output(bias_gradients.padded_shape(spec, load), load.dtype)
            for i, load in enumerate(groups.stores)
            if i not in zeros
        },
        [per_row for _ in groups.rows],
        per_row if spec.needs_marks else None,
    )
    outputs = launch(
        functools.partial(_kernel, static),
        DqInputs(
            flatten_captured(arrays),
            block_walk.row_order(spec, tiles, arrays),
            pack_row_stats(rows, tiles.block_q),
            [load.source(arrays.captured.score) for load in loads],
            zeros,  # pyright: ignore[reportArgumentType]  (of JAX's own type of refs)
        ),
        shapes,
        scratch,
        name="jflex_backward_dq_sm90",
        num_ctas=grid.size,
        warp_groups=static.warp_groups + 1,
    )
    stores = outputs.stores | {i: jax.freeze(ref) for i, ref in zeros.items()}
    return outputs._replace(
        stores={i: bias_gradients.without_padding(spec, groups.stores[i], x) for i, x in stores.items()},
        rows=[x[..., : spec.T] for x in outputs.rows],
        marks=None if outputs.marks is None else outputs.marks[..., : spec.T],
    )


def _grid(static: BackwardStatic) -> Grid:
    return Grid(static.spec.B, static.spec.Hq, pl.cdiv(static.spec.T, static.tiles.block_q))


def _kernel(
    static: BackwardStatic, cta_id: Index, inputs: DqInputs[Ref], outputs: DqOutputs[Ref], scratch: DqScratch
) -> None:
    grid = _grid(static)
    b, h, tile = grid.unravel(cta_id)
    location = (b, h, block_walk.row_at(static.spec, inputs.order, b, h, tile, grid.tiles))
    produce = functools.partial(_produce, static, inputs, location, scratch)
    run_roles(static.warp_groups, produce, functools.partial(_consume, static, inputs, location, outputs, scratch))


def _produce(static: BackwardStatic, inputs: DqInputs[Ref], location: Location, scratch: DqScratch) -> None:
    """Producer warp group: loads keys, values and bias tiles by TMA."""
    spec, arrays, q_first = static.spec, inputs.arrays, location[2] * static.tiles.block_q
    bias_at = static.bias(arrays, inputs.bias).sources_of_head(*location[:2])
    b, h = (location[0] if spec.Bkv > 1 else 0), lax.div(location[1], jnp.int32(spec.group))

    def step(i: Index, first: Index, _: bool) -> Index:
        at = smem.rows_at(spec, b, h, first, static.tiles.block_kv)
        scratch.keys.fill(i, arrays.key.at[at])
        scratch.values.fill(i, arrays.value.at[at])
        if scratch.bias is not None:
            scratch.bias.fill(i, *bias_at(q_first, first))
        return i + 1

    block_walk.over_keys(spec, static.tiles, arrays, location, jnp.int32(0), step)


def _consume(
    static: BackwardStatic,
    inputs: DqInputs[Ref],
    location: Location,
    outputs: DqOutputs[Ref],
    scratch: DqScratch,
    group: jax.Array,
) -> None:
    """Consumer warp group: prologue, mainloop over tiles of keys, and epilogue of its 64 queries."""
    spec, tiles, arrays, row_stats = static.spec, static.tiles, inputs.arrays, inputs.row_stats
    b, h, row = location
    rows = tiles.block_q // static.warp_groups
    first = row * tiles.block_q + group * rows
    queries, d_out = scratch.queries.at[group], scratch.d_out.at[group]  # [rows, D], [rows, Dv]
    at = smem.rows_at(spec, b, h, first, rows)
    for source, ref in ((arrays.query, queries), (row_stats.d_out, d_out)):
        plg.copy_gmem_to_smem(source.at[at], ref, scratch.full.at[group])
    lse_log2, delta = (-load_vector(row_stats.stats.at[b, h, which, pl.ds(first, rows)], ROW) for which in (LSE, DELTA))
    prepared = static.prepare(arrays, (rows, tiles.block_kv), b, h, q_first=first)
    targets = outputs.stores | inputs.zeros
    stored = bias_gradients.BiasGradients.from_loads(
        spec,
        static.groups.stores,
        [ref.at[group] for ref in scratch.stored],
        [targets[i] for i in range(len(targets))],
        prepared.score,
        first,
    )
    plg.barrier_wait(scratch.full.at[group])

    def walk(d_query: Accumulator) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        tile = QueryTile(group, pl.ds(group * rows, rows), lse_log2, delta, d_query, stored)
        step = functools.partial(_step, static, prepared, scratch, tile)
        sums = tuple(row_vector(rows) for _ in static.groups.rows)
        _, sums = block_walk.over_keys(spec, tiles, arrays, location, (jnp.int32(0), sums), step)
        return d_query[...] * spec.scale, sums

    d_q, sums = pl.run_scoped(walk, accumulator(rows, spec.D))
    vectors = list(zip(outputs.rows, sums, strict=True))
    if outputs.marks is not None:
        vectors.append((outputs.marks, mark(d_q)))
    for ref, x in vectors:
        store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
    queries[...] = d_q.astype(queries.dtype)  # dQ is staged over the queries
    plg.commit_smem()
    plg.copy_smem_to_gmem(queries, outputs.query.at[at])
    plg.wait_smem_to_gmem(0, wait_read_only=True)


def _step(
    static: BackwardStatic,
    prepared: scores.Scores,
    scratch: DqScratch,
    query_tile: QueryTile,
    state: tuple[Index, tuple[jax.Array, ...]],
    first: Index,
    is_partial: bool,
) -> tuple[Index, tuple[jax.Array, ...]]:
    """Mainloop step over a tile of keys; the state counts tiles, and sums the cotangents of loads by query."""
    i, sums = state
    lse_log2, delta = (lax.broadcast_in_dim(x, prepared.tile, (0,)) for x in (query_tile.lse_log2, query_tile.delta))
    keys = wait_and_get(scratch.keys, i)  # [block_kv, D]

    def gemms(raw: Accumulator, d_weights: Accumulator) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        group = query_tile.group + inline_ptx.unknown_zero()
        plg.wgmma(raw, scratch.queries.at[group], keys.T)  # S = Q K^T [rows, block_kv]
        plg.wgmma(d_weights, scratch.d_out.at[group], wait_and_get(scratch.values, i).T)  # dP = dO V^T [rows, block_kv]
        bias = [x.at[query_tile.rows] for x in wait_and_get_all(scratch.bias, i)]
        tile = scores.modify(prepared, plg.wgmma_accumulator_load(raw, wait_n=1), first, is_partial, bias=bias)
        if scratch.bias is not None:
            scratch.bias.release(i)
        p = scores.weights(prepared, tile, lse_log2)  # P = exp2(S - lse)
        tile = tile._replace(kept=scores.kept(prepared, first))
        d_p = plg.wgmma_accumulator_load(d_weights, wait_n=0)
        scratch.values.release(i)
        d_p = weights_vjp(static.spec, tile, d_p)
        d_s = scores.scores_vjp(prepared, tile, p, d_p - delta)  # dS = P * (dP - delta)
        d_s, d_load = score_mod_vjp(static.derivative, tile, d_s)  # dS', through the score mod
        query_tile.stored.store(first, [d_load(n) for n in static.groups.stores])
        return d_s, tuple(x + jnp.sum(d_load(n), axis=1) for x, n in zip(sums, static.groups.rows, strict=True))

    acc = accumulator(*prepared.tile)
    d_s, sums = pl.run_scoped(gemms, acc, acc)
    plg.wgmma(query_tile.d_query, d_s.astype(keys.dtype), keys)  # dQ += dS' K [rows, D]
    plg.wgmma_wait(0)
    scratch.keys.release(i)
    return i + 1, sums
