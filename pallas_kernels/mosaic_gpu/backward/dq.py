"""Backward kernel for dQ on Hopper, and for the captured arrays that are read by query or not by index at all.

A block of threads owns a tile of queries of one head, and walks the tiles of keys that the forward kernel visits: one
warp group has the copy engine bring them, two others hold 64 queries each, and their sums for dQ in registers. dS is an
operand of the product with the keys as it lies in registers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk as blocks
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Rows, through_mod
from pallas_kernels.marks import mark, may_hide
from pallas_kernels.mosaic_gpu import bias_tiles as planes
from pallas_kernels.mosaic_gpu import inline_ptx, padding, scores, smem
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    SHIFT,
    Given,
    Static,
    accumulator,
    awaited,
    awaited_all,
    give,
    load_vector,
    store_sums,
)
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flat_operands, launch
from pallas_kernels.mosaic_gpu.pipeline import COMPUTING, COPYING, Ring
from pallas_kernels.mosaic_gpu.tile import ROW, TILE
from pallas_kernels.mosaic_gpu.tile_order import Grid
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import Arrays, AttentionSpec


class FoundByRows(NamedTuple):
    """dQ; cotangents [B, Hq, T] of ``groups.rows``; marks of queries, likewise, or None where nothing is hidden."""

    query: jax.Array
    rows: list[jax.Array]
    marks: jax.Array | None


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
      queries: [groups, rows, D].
      d_out: [groups, rows, Dv].
      sums: float32 [groups, rows], to store cotangents of loads by query.
      filled: A barrier a group, for queries and cotangents.
      keys: Ring of keys.
      values: Ring of values.
      elements: Ring of `planes`; None without.
    """

    queries: Any
    d_out: Any
    sums: Any
    filled: Any
    keys: Ring
    values: Ring
    elements: Ring | None


class Own(NamedTuple):
    """What a warp group holds of its queries.

    Attributes:
      queries: [rows, D], in shared memory.
      d_out: [rows, Dv], in shared memory.
      rows: Which they are of those of the block.
      shift: What is subtracted from scores in base 2.
      delta: What is subtracted from cotangents of weights.
      d_query: The accumulator of dQ.
    """

    queries: Any
    d_out: Any
    rows: Any
    shift: jax.Array
    delta: jax.Array
    d_query: Any


def declare(spec: AttentionSpec, tiles: Tiles, dtype: Any) -> Scratch:
    """What a block of threads needs."""
    groups = tiles.num_warps // 4
    rows = tiles.block_q // groups
    make = functools.partial(
        Scratch,
        smem.tiled((groups, rows, spec.D), dtype),
        smem.tiled((groups, rows, spec.Dv), dtype),
        plg.SMEM((groups, rows), jnp.float32),
        plg.Barrier(num_arrivals=2, num_barriers=groups),
        Ring.declare(tiles.num_stages, tiles.block_kv, (spec.D,), dtype, groups),
        Ring.declare(tiles.num_stages, tiles.block_kv, (spec.Dv,), dtype, groups),
    )
    return planes.beside(make, spec, tiles)


def dq(
    spec: AttentionSpec, tiles: Tiles, arrays: Arrays, rows: Rows, derivative: Derivative | None, groups: LoadGroups
) -> FoundByRows:
    """Computes dQ, in the layout and dtype of the query, and cotangents of loads."""
    static = Static.of(spec, tiles, arrays, derivative, groups)
    row_tiles = pl.cdiv(spec.T, tiles.block_q)
    per_row = jax.ShapeDtypeStruct((spec.B, spec.Hq, row_tiles * tiles.block_q), jnp.float32)
    declared = declare(spec, tiles, arrays.query.dtype)
    found = () if declared.elements is None else planes.planes_of(spec)
    elements = [plane.of(arrays.score_operands) for plane in found]
    d_query, *sums = launch(
        functools.partial(_kernel, static),
        (flat_operands(arrays), blocks.row_order(spec, tiles, arrays), give(rows, tiles.block_q), elements),
        [
            padding.like_rows(arrays.query, spec.D),
            *(per_row for _ in groups.rows),
            *([per_row] if may_hide(spec) else []),
        ],
        declared,
        name="jflex_backward_dq_sm90",
        blocks=_grid(static).size,
        warp_groups=static.warp_groups + 1,
    )
    by_row = [x[..., : spec.T] for x in sums]
    return FoundByRows(d_query, by_row[: len(groups.rows)], by_row[-1] if may_hide(spec) else None)


def _grid(static: Static) -> Grid:
    return Grid(static.spec.B, static.spec.Hq, pl.cdiv(static.spec.T, static.tiles.block_q))


def _kernel(static: Static, number: Any, inputs: Any, outputs: Any, scratch: Scratch) -> None:
    arrays, order, given, refs = inputs
    grid = _grid(static)
    b, h, nth = grid.place(number)
    here = (b, h, blocks.row_at(static.spec, order, b, h, nth, grid.tiles))
    group = lax.axis_index(WARP_GROUP)
    compute = functools.partial(_compute, static, arrays, given, here, outputs, scratch, group)
    pl.when(group == static.warp_groups)(lambda: _copy(static, arrays, refs, here, scratch))
    pl.when(group < static.warp_groups)(compute)


def _copy(static: Static, arrays: Arrays, refs: Any, here: Any, scratch: Scratch) -> None:
    """The warp group that brings keys and values."""
    plg.set_max_registers(COPYING, action="decrease")
    spec, q_first = static.spec, here[2] * static.tiles.block_q
    elements_at = static.elements(arrays, refs).of_head(*here[:2])
    b, h = (here[0] if spec.Bkv > 1 else 0), lax.div(here[1], jnp.int32(spec.group))

    def step(count: Any, first: Any, _: bool) -> Any:
        at = smem.rows_at(spec, b, h, first, static.tiles.block_kv)
        scratch.keys.fill(count, arrays.key.at[at])
        scratch.values.fill(count, arrays.value.at[at])
        if scratch.elements is not None:
            scratch.elements.fill(count, *elements_at(q_first, first))
        return count + 1

    blocks.over_keys(spec, static.tiles, arrays, here, jnp.int32(0), step)


def _compute(
    static: Static, arrays: Arrays, given: Given, here: Any, outputs: Any, scratch: Scratch, group: Any
) -> None:
    """A warp group that computes."""
    plg.set_max_registers(COMPUTING, action="increase")
    spec, tiles = static.spec, static.tiles
    b, h, row = here
    rows = tiles.block_q // static.warp_groups
    first = row * tiles.block_q + group * rows
    own = (scratch.queries.at[group], scratch.d_out.at[group])
    at = smem.rows_at(spec, b, h, first, rows)
    for source, ref in zip((arrays.query, given.d_out), own, strict=True):
        plg.copy_gmem_to_smem(source.at[at], ref, scratch.filled.at[group])
    shift, delta = (-load_vector(given.statistics.at[b, h, which, pl.ds(first, rows)], ROW) for which in (SHIFT, DELTA))
    known = scores.prepare(
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
    plg.barrier_wait(scratch.filled.at[group])

    def walk(d_query: Any) -> tuple[jax.Array, Any]:
        held = Own(*own, pl.ds(group * rows, rows), shift, delta, d_query)
        step = functools.partial(_step, static, known, scratch, held)
        sums = tuple(plg.layout_cast(jnp.zeros((rows,), jnp.float32), ROW) for _ in static.groups.rows)
        _, sums = blocks.over_keys(spec, tiles, arrays, here, (jnp.int32(0), sums), step)
        return d_query[...] * spec.scale, sums

    found, sums = pl.run_scoped(walk, accumulator(rows, spec.D))
    if may_hide(spec):
        sums = (*sums, mark(found))
    for ref, x in zip(outputs[1:], sums, strict=True):
        store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
    own[0][...] = found.astype(own[0].dtype)
    plg.commit_smem()
    plg.copy_smem_to_gmem(own[0], outputs[0].at[at])
    plg.wait_smem_to_gmem(0, wait_read_only=True)


def _step(
    static: Static,
    known: scores.Scores,
    scratch: Scratch,
    own: Own,
    state: Any,
    first: Any,
    is_partial: bool,
) -> Any:
    """Adds a tile of keys; the state is how many came before, and cotangents of loads by query."""
    count, sums = state
    shift, delta = (lax.broadcast_in_dim(x, known.tile, (0,)) for x in (own.shift, own.delta))
    keys = awaited(scratch.keys, count)

    def products(raw: Any, d_weights: Any) -> tuple[jax.Array, Any]:
        plg.wgmma(raw, own.queries, keys.T)
        plg.wgmma(d_weights, own.d_out, awaited(scratch.values, count).T)
        elements = [x.at[own.rows] for x in awaited_all(scratch.elements, count)]
        tile = scores.modify(known, plg.wgmma_accumulator_load(raw, wait_n=1), first, is_partial, brought=elements)
        if scratch.elements is not None:
            scratch.elements.release(count)
        p = inline_ptx.weights(TILE, tile.s, known.unit, shift)
        d_s = p * (plg.wgmma_accumulator_load(d_weights, wait_n=0) - delta)
        scratch.values.release(count)
        d_s, of_load = through_mod(static.derivative, tile, d_s)
        return d_s, tuple(x + jnp.sum(of_load(n), axis=1) for x, n in zip(sums, static.groups.rows, strict=True))

    acc = accumulator(*known.tile)
    d_s, sums = pl.run_scoped(products, acc, acc)
    plg.wgmma(own.d_query, d_s.astype(keys.dtype), keys)
    plg.wgmma_wait(0)
    scratch.keys.release(count)
    return count + 1, sums
