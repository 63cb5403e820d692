"""Backward kernel for dQ on Hopper, and for captured arrays that are read by query, by query and key, or as a whole.

A CTA owns a tile of queries of one head, and walks the tiles of keys that the forward kernel visits. The producer warp
group loads them by TMA; two consumer warp groups own 64 queries each, with their dQ accumulator in registers. dS is the
A operand of the dQ GEMM straight from registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Rows, score_mod_vjp, weights_vjp
from pallas_kernels.mosaic_gpu import padding, smem
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    LSE,
    RowStats,
    Static,
    accumulator,
    load_vector,
    pack_row_stats,
    store_sums,
    wait_and_get,
    wait_and_get_all,
)
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flatten_captured, launch
from pallas_kernels.mosaic_gpu.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS, Ring
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles, scores
from pallas_kernels.mosaic_gpu.score.tile import ROW
from pallas_kernels.mosaic_gpu.tile_order import Grid
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Accumulator, Index, Location, Ref


class DqOutputs(NamedTuple):
    """dQ; cotangents [B, Hq, T] of ``groups.rows``; gradients of the arrays of ``groups.stores``.

    And marks of queries, [B, Hq, T], or None where nothing is masked.
    """

    query: jax.Array
    rows: list[jax.Array]
    stores: list[jax.Array]
    marks: jax.Array | None


class Scratch(NamedTuple):
    """Shared memory and barriers of a CTA.

    Attributes:
      queries: [groups, rows, D]; the epilogue stages dQ there.
      d_out: [groups, rows, Dv].
      sums: float32 [groups, rows], to stage cotangents of loads by query.
      full: A barrier for each group: its queries and dO have arrived.
      keys: Ring of keys [block_kv, D].
      values: Ring of values [block_kv, Dv].
      stored: [groups, rows, block_kv] for each of ``groups.stores``, to stage cotangents.
      bias: Ring of bias tiles [block_q, block_kv]; None without.
    """

    queries: Ref
    d_out: Ref
    sums: Ref
    full: Ref
    keys: Ring
    values: Ring
    stored: tuple[Ref, ...]
    bias: Ring | None


class Own(NamedTuple):
    """What a consumer warp group holds of its queries.

    Attributes:
      queries: [rows, D], in shared memory.
      d_out: [rows, Dv], in shared memory.
      rows: Slice of its rows in the tile of the CTA.
      lse_log2: [rows]: the lse in base 2, which is subtracted from scores.
      delta: [rows]: subtracted from dP.
      d_query: The dQ accumulator [rows, D].
      stored: Where it stores cotangents of loads by query and key.
    """

    queries: Ref
    d_out: Ref
    rows: slice | pl.Slice
    lse_log2: jax.Array
    delta: jax.Array
    d_query: Accumulator
    stored: bias_gradients.BiasGradients


def declare(spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike, loads: LoadGroups) -> Scratch:
    """The scratch of a CTA."""
    groups = tiles.num_warps // 4
    rows = tiles.block_q // groups
    make = functools.partial(
        Scratch,
        smem.tiled((groups, rows, spec.D), dtype),
        smem.tiled((groups, rows, spec.Dv), dtype),
        smem.declared(plg.SMEM((groups, rows), jnp.float32)),
        smem.declared(plg.Barrier(num_arrivals=2, num_barriers=groups)),
        Ring.declare(tiles.num_stages, tiles.block_kv, (spec.D,), dtype, groups),
        Ring.declare(tiles.num_stages, tiles.block_kv, (spec.Dv,), dtype, groups),
        bias_gradients.declare(loads.stores, tiles),
    )
    return bias_tiles.with_bias_ring(make, spec, tiles)


def dq(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[jax.Array],
    rows: Rows[jax.Array],
    derivative: Derivative | None,
    groups: LoadGroups,
) -> DqOutputs:
    """Computes dQ, in the layout and dtype of the query, and cotangents of loads.

    Args:
      spec: The spec, with padded head sizes.
      tiles: Of the kernel: 64 queries for each consumer warp group.
      arrays: The operands of the forward pass, padded.
      rows: dO [B, T, Hq, Dv] or [B, Hq, T, Dv]; lse and delta [B, Hq, T].
      derivative: Of the score mod; None without one.
      groups: Loads of captured arrays with requested gradients.
    """
    static = Static.of(spec, tiles, arrays, derivative, groups)
    row_tiles = pl.cdiv(spec.T, tiles.block_q)
    per_row = jax.ShapeDtypeStruct((spec.B, spec.Hq, row_tiles * tiles.block_q), jnp.float32)
    declared = declare(spec, tiles, arrays.query.dtype, groups)
    zeros = bias_gradients.zeros(spec, groups.stores)
    whole = [n for n, ref in zip(groups.stores, zeros, strict=True) if ref is None]
    loads = () if declared.bias is None else bias_tiles.bias_loads(spec)
    bias = [load.of(arrays.captured.score) for load in loads]
    d_query, *sums = launch(
        functools.partial(_kernel, static),
        (
            flatten_captured(arrays),
            block_walk.row_order(spec, tiles, arrays),
            pack_row_stats(rows, tiles.block_q),
            bias,
            zeros,
        ),
        [
            padding.like_rows(arrays.query, spec.D),
            *(bias_gradients.shape_of(spec, load) for load in whole),
            *(per_row for _ in groups.rows),
            *([per_row] if spec.needs_marks else []),
        ],
        declared,
        name="jflex_backward_dq_sm90",
        num_ctas=_grid(static).size,
        warp_groups=static.warp_groups + 1,
    )
    filled = iter(sums[: len(whole)])
    stored = [next(filled) if ref is None else jax.freeze(ref) for ref in zeros]
    stored = [bias_gradients.without_padding(spec, n, x) for n, x in zip(groups.stores, stored, strict=True)]
    by_row = [x[..., : spec.T] for x in sums[len(whole) :]]
    return DqOutputs(d_query, by_row[: len(groups.rows)], stored, by_row[-1] if spec.needs_marks else None)


def _grid(static: Static) -> Grid:
    return Grid(static.spec.B, static.spec.Hq, pl.cdiv(static.spec.T, static.tiles.block_q))


def _kernel(
    static: Static,
    cta_id: Index,
    inputs: tuple[
        Operands[Ref], Ref | None, RowStats[Ref], list[Ref], list[Ref | None]
    ],  # operands, tile order [list batch, list heads, tiles] or None, `RowStats`, sources of bias tiles, and for each
    # of `groups.stores` zeros [leading, padded T, padded S] or None
    outputs: tuple[
        Ref, ...
    ],  # dQ like the query, an array where zeros are None, [B, Hq, rounded up T] for each of `groups.rows` and marks
    scratch: Scratch,
) -> None:
    arrays, order, row_stats, refs, zeros = inputs
    d_query, *outs = outputs
    stored = [outs.pop(0) if ref is None else ref for ref in zeros]
    grid = _grid(static)
    b, h, tile = grid.unravel(cta_id)
    location = (b, h, block_walk.row_at(static.spec, order, b, h, tile, grid.tiles))
    group = lax.axis_index(WARP_GROUP)
    compute = functools.partial(_consume, static, arrays, row_stats, location, (d_query, stored, outs), scratch, group)
    pl.when(group == static.warp_groups)(lambda: _produce(static, arrays, refs, location, scratch))
    pl.when(group < static.warp_groups)(compute)


def _produce(static: Static, arrays: Operands[Ref], refs: list[Ref], location: Location, scratch: Scratch) -> None:
    """Producer warp group: loads keys, values and bias tiles by TMA."""
    plg.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    spec, q_first = static.spec, location[2] * static.tiles.block_q
    bias_at = static.bias(arrays, refs).of_head(*location[:2])
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
    static: Static,
    arrays: Operands[Ref],
    row_stats: RowStats[Ref],
    location: Location,
    outputs: tuple[Ref, Sequence[Ref], Sequence[Ref]],
    scratch: Scratch,
    group: jax.Array,
) -> None:
    """Consumer warp group: prologue, mainloop over tiles of keys, and epilogue of its 64 queries."""
    plg.set_max_registers(CONSUMER_REGISTERS, action="increase")
    spec, tiles = static.spec, static.tiles
    b, h, row = location
    rows = tiles.block_q // static.warp_groups
    first = row * tiles.block_q + group * rows
    own = (scratch.queries.at[group], scratch.d_out.at[group])
    at = smem.rows_at(spec, b, h, first, rows)
    for source, ref in zip((arrays.query, row_stats.d_out), own, strict=True):
        plg.copy_gmem_to_smem(source.at[at], ref, scratch.full.at[group])
    lse_log2, delta = (-load_vector(row_stats.stats.at[b, h, which, pl.ds(first, rows)], ROW) for which in (LSE, DELTA))
    prepared = scores.prepare(
        spec,
        arrays,
        static.captured,
        (rows, tiles.block_kv),
        b,
        h,
        q_first=first,
        may_end=spec.T % tiles.block_q != 0,
        nodes=static.nodes,
    )
    staged = [ref.at[group] for ref in scratch.stored]
    stored = bias_gradients.BiasGradients.of(spec, static.groups.stores, staged, outputs[1], prepared.score, first)
    plg.barrier_wait(scratch.full.at[group])

    def walk(d_query: Accumulator) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        held = Own(*own, pl.ds(group * rows, rows), lse_log2, delta, d_query, stored)
        step = functools.partial(_step, static, prepared, scratch, held)
        sums = tuple(plg.layout_cast(jnp.zeros((rows,), jnp.float32), ROW) for _ in static.groups.rows)
        _, sums = block_walk.over_keys(spec, tiles, arrays, location, (jnp.int32(0), sums), step)
        return d_query[...] * spec.scale, sums

    d_q, sums = pl.run_scoped(walk, accumulator(rows, spec.D))
    if spec.needs_marks:
        sums = (*sums, mark(d_q))
    for ref, x in zip(outputs[2], sums, strict=True):
        store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
    own[0][...] = d_q.astype(own[0].dtype)
    plg.commit_smem()
    plg.copy_smem_to_gmem(own[0], outputs[0].at[at])
    plg.wait_smem_to_gmem(0, wait_read_only=True)


def _step(
    static: Static,
    prepared: scores.Scores,
    scratch: Scratch,
    own: Own,
    state: tuple[Index, tuple[jax.Array, ...]],
    first: Index,
    is_partial: bool,
) -> tuple[Index, tuple[jax.Array, ...]]:
    """Mainloop step over a tile of keys; the state is how many came before, and the cotangents of loads by query."""
    i, sums = state
    lse_log2, delta = (lax.broadcast_in_dim(x, prepared.tile, (0,)) for x in (own.lse_log2, own.delta))
    keys = wait_and_get(scratch.keys, i)

    def gemms(raw: Accumulator, d_weights: Accumulator) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        plg.wgmma(raw, own.queries, keys.T)
        plg.wgmma(d_weights, own.d_out, wait_and_get(scratch.values, i).T)
        bias = [x.at[own.rows] for x in wait_and_get_all(scratch.bias, i)]
        tile = scores.modify(prepared, plg.wgmma_accumulator_load(raw, wait_n=1), first, is_partial, bias=bias)
        if scratch.bias is not None:
            scratch.bias.release(i)
        p = scores.weights(prepared, tile, lse_log2)
        tile = tile._replace(kept=scores.kept(prepared, first))
        d_p = weights_vjp(static.spec, tile, plg.wgmma_accumulator_load(d_weights, wait_n=0))
        d_s = scores.scores_vjp(prepared, tile, p, d_p - delta)
        scratch.values.release(i)
        d_s, of_load = score_mod_vjp(static.derivative, tile, d_s)
        own.stored.store(first, [of_load(n) for n in static.groups.stores])
        return d_s, tuple(x + jnp.sum(of_load(n), axis=1) for x, n in zip(sums, static.groups.rows, strict=True))

    acc = accumulator(*prepared.tile)
    d_s, sums = pl.run_scoped(gemms, acc, acc)
    plg.wgmma(own.d_query, d_s.astype(keys.dtype), keys)
    plg.wgmma_wait(0)
    scratch.keys.release(i)
    return i + 1, sums
