"""Backward kernel for dK and dV on Hopper, and for the captured arrays that are read by key.

A CTA owns a tile of keys of one key head. The producer warp group loads tiles of queries, dO and row statistics by TMA,
of all query heads that share the keys. Two consumer warp groups own 64 keys each, with their dK and dV accumulators in
registers. Scores are transposed, (keys, queries): then P^T and dS^T are the A operands of the dV and dK GEMMs straight
from registers. One pass may compute dQ too: `one_pass`.

Where dQ is added by TMA, CTAs are persistent: dK and dV are staged in the memory of dS and dQ, so that keys, values and
queries of the next tile of keys arrive meanwhile. A tile is drawn when the last queries of the one before are loaded:
drawn earlier, tiles that share queries do not meet. H200, jax 0.11.2, bf16, S 16384, kernel, relative to one CTA for
each tile: D 64, window of 1024 0.98, documents 0.95, causal 1.01; D 128 0.95, 0.97, 1.00, without a mask 0.94.

Above head size 128 registers hold both accumulators in one pass alone, up to a limit (`plan`). Else the groups share 64
keys: one computes S^T and dV, the other dP^T and dK, with S^T through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.gradients import RowOperands
from pallas_kernels.mosaic_gpu import global_rows, register_order, schedule, smem
from pallas_kernels.mosaic_gpu.backward.one_pass import sums_shape
from pallas_kernels.mosaic_gpu.backward.stream import KEY, VALUE, BackwardStatic, RowStats, pack_row_stats, store_sums
from pallas_kernels.mosaic_gpu.backward.walk import Carried, DkvScratch, KeyTile, declare
from pallas_kernels.mosaic_gpu.launch import Grid, flatten_captured, launch, output, run_roles
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import ROW, accumulator, row_vector
from pallas_kernels.mosaic_gpu.score.visible_range import TileLimits, tile_limits
from pallas_kernels.softmax import mark
from pallas_kernels.spec import Operands
from pallas_kernels.types import A, Accumulator, Index, Location, Ref, S, Step

_Step: TypeAlias = Callable[[S, jax.Array, Index, bool], S]  # at query head and first query
MAX_HEAD_SIZE_BOTH_SUMS = 128  # up to which registers hold 64 rows of both accumulators


class DkvOutputs(NamedTuple, Generic[A]):
    """The outputs of the kernel: arrays, their shapes, or in the kernel refs; None if not computed.

    In a launch S and T are rounded up to whole tiles.
    """

    key: A  # dK for each batch entry, in the layout of the key
    value: A  # dV for each batch entry, in the layout of the value
    columns: list[A]  # cotangents [B, Hq, S] of ``groups.columns``
    # float32 [B, Hkv, S] of each warp group of shared keys, else one: NaN for keys whose dK or dV is not finite, and,
    # with dQ, which are not finite themselves; empty where nothing is masked
    marks: list[A]
    # dQ, float32 [B, Hq, T, D], without the scale of the scores; not among the outputs of a launch
    query: A | None = None


class DkvInputs(NamedTuple, Generic[A]):
    """The inputs of the kernel."""

    arrays: Operands[A]
    order: A | None  # the order of tiles; None is ascending
    row_stats: RowStats[A]  # dO, lse and delta
    d_query: A | None  # dQ, float32 in `one_pass.sums_shape`, to which one pass adds; None without
    bias: list[A]  # sources of bias tiles
    counter: A | None  # of tiles of keys; None without persistent CTAs


def dkv(
    static: BackwardStatic, arrays: Operands[jax.Array], rows: RowOperands[jax.Array], *, one_pass: bool = False
) -> DkvOutputs[jax.Array]:
    """Computes dK and dV in the layout of the key; of each batch entry, where the batch shares them.

    With `one_pass` dQ too, without the scale of the scores, and not deterministic. Operands are padded, as
    `BackwardCall` has them.
    """
    assert not (one_pass and static.shares_keys), "dQ needs registers beside both accumulators"
    spec, tiles, groups = static.spec, static.tiles, static.groups
    columns = pl.cdiv(spec.S, tiles.block_kv)
    per_column = lambda heads: output((spec.B, heads, columns * tiles.block_kv), jnp.float32)
    # XLA would write equal zeros of several layers once, and copy them for each: twice the bytes of writing them.
    zero = lambda: lax.optimization_barrier((jnp.float32(0), arrays.query))[0]
    d_query = jax.new_ref(jnp.full(sums_shape(spec, tiles), zero())) if one_pass else None
    scratch = declare(spec, tiles, arrays.key.dtype, groups, one_pass=one_pass)
    loads = () if scratch.stream.bias is None else bias_tiles.bias_loads(spec, transposed=True)
    per_entry = lambda x: output((spec.B, *x.shape[1:]), x.dtype)
    outputs = launch(
        functools.partial(_kernel, static),
        DkvInputs(
            flatten_captured(arrays),
            None if _walks_heads_inside(static) else block_walk.column_order(spec, tiles, arrays),
            pack_row_stats(rows, tiles.block_q, static.lse_scale),
            d_query,  # pyright: ignore[reportArgumentType]  (of JAX's own type of refs)
            [load.source(arrays.captured.score) for load in loads],
            schedule.tile_counter() if scratch.persistence else None,  # pyright: ignore[reportArgumentType]
        ),
        DkvOutputs(
            per_entry(arrays.key),
            per_entry(arrays.value),
            [per_column(spec.Hq) for _ in groups.columns],
            [per_column(spec.Hkv)] * (spec.needs_marks * (1 + static.shares_keys)),
        ),
        scratch,
        name="jflex_backward_sm90" if one_pass else "jflex_backward_dkv_sm90",
        num_ctas=schedule.NUM_CTAS if scratch.persistence else _grid(static).size,
        warp_groups=static.warp_groups + 1,
    )
    return outputs._replace(
        columns=[x[..., : spec.S] for x in outputs.columns],
        marks=[x[..., : spec.S] for x in outputs.marks],
        query=None if d_query is None else register_order.to_rows(jax.freeze(d_query))[:, :, : spec.T],
    )


def _grid(static: BackwardStatic) -> Grid:
    grid = Grid(static.spec.B, static.spec.Hkv, pl.cdiv(static.spec.S, static.tiles.block_kv))
    return grid._replace(max_waves=1) if _walks_heads_inside(static) else grid


def _kernel(
    static: BackwardStatic, cta_id: Index, inputs: DkvInputs[Ref], outputs: DkvOutputs[Ref], scratch: DkvScratch
) -> None:
    scratch = scratch.open_unions()
    tile_ids = None if scratch.persistence is None else scratch.persistence.tile_ids
    tiles = schedule.PersistentScheduler(_grid(static), cta_id, inputs.counter, tile_ids)

    def locate(at: Location) -> Location:
        return *at[:2], block_walk.column_at(static.spec, inputs.order, *at)

    def produce() -> None:
        def next_tile(i: Index) -> jax.Array:
            tile_id = tiles.draw(i)
            assert scratch.persistence is not None  # there is a next tile
            plg.barrier_arrive(scratch.persistence.full.at[schedule.tile_slot(i)])
            if static.spec.block_size is not None:
                prefetch = lambda: _prefetch(static, inputs, locate(tiles.grid.unravel(tile_id)))
                pl.when(tile_id < tiles.grid.size)(prefetch)
            return tile_id

        tiles.over_tiles(lambda i, at, count: _produce(static, inputs, locate(at), scratch, i, count), next_tile)

    def consume(group: jax.Array) -> None:
        def next_tile(i: Index) -> jax.Array:
            assert scratch.persistence is not None  # there is a next tile
            plg.barrier_wait(scratch.persistence.full.at[schedule.tile_slot(i)])
            return tiles.tile_id(i)

        def consume_as(role: BackwardStatic) -> None:
            compute = lambda i, at, count: _consume(role, inputs, locate(at), outputs, scratch, group, i, count)
            tiles.over_tiles(compute, next_tile)

        if static.shares_keys:
            for i, role in enumerate(map(static.for_sum, (VALUE, KEY))):
                pl.when(group == i)(functools.partial(consume_as, role))
        else:
            consume_as(static)
        plg.wait_smem_to_gmem(0, wait_read_only=True)

    run_roles(static.warp_groups, produce, consume)


def _produce(
    static: BackwardStatic,
    inputs: DkvInputs[Ref],
    location: Location,
    scratch: DkvScratch,
    number: Index,
    count: jax.Array,
) -> jax.Array:
    """Producer warp group: loads tiles of queries, after the first of them the keys; returns the next free stage."""
    (b, kv_h, column), spec, rows = location, static.spec, smem.WARP_GROUP_ROWS
    k_first = column * static.tiles.block_kv
    bias = static.bias(inputs.arrays, inputs.bias, transposed=True)

    def load_keys() -> None:
        sources = (inputs.arrays.value, scratch.values), (inputs.arrays.key, scratch.keys)
        for i, (source, ref) in enumerate(sources):
            if scratch.persistence is not None:
                pl.when(number > 0)(functools.partial(plg.barrier_wait, scratch.persistence.empty.at[i]))
            for tile in range(ref.shape[0]):
                at = smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_h, k_first + tile * rows, rows)
                plg.copy_gmem_to_smem(source.at[at], ref.at[tile], scratch.full)

    def step(i: jax.Array, h: jax.Array, first: Index, _: bool) -> jax.Array:
        sources = bias.sources_of_head(b, h)(first, k_first)
        scratch.stream.fill(spec, i, inputs.arrays, inputs.row_stats, (b, h, first), sources)
        pl.when(i == count)(load_keys)
        return i + 1

    end = _over_queries(static, inputs.arrays, location, count, lambda _: step)
    pl.when(end == count)(load_keys)
    return end


def _prefetch(static: BackwardStatic, inputs: DkvInputs[Ref], location: Location) -> None:
    """Prefetches the keys and values of the next tile into L2, since a tile that comes from lists is loaded late."""
    (b, kv_h, column), spec, rows = location, static.spec, static.tiles.block_kv
    for source in (inputs.arrays.key, inputs.arrays.value):  # H200, documents, D 64: 1384 us, without 1418
        plg.async_prefetch(source.at[smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_h, column * rows, rows)])


def _over_queries(
    static: BackwardStatic,
    arrays: Operands[Ref],
    location: Location,
    state: S,
    step_of: Callable[[jax.Array], _Step[S]],
    end: Callable[[jax.Array, S], S] = lambda _, state: state,
) -> S:
    """Folds over tiles of queries of the heads that share a key head: the step of a head, and its end.

    From the last tile on, full tiles before partial ones. Then CTAs that started together meet at the same queries,
    although each has its diagonal elsewhere. H200, jax 0.11.2, bf16, S 16384, 16 heads, backward, us, ascending and
    descending: causal 8319 and 8009, documents 1386 and 1348, a window 1500 and 1492.
    """
    (b, kv_h, column), spec = location, static.spec
    first = kv_h * spec.group
    limits = _limits(static, arrays, b, column)

    def walk(h: jax.Array, state: S, step: Step[S]) -> S:
        def visible_step(state: S, query: Index, is_partial: bool) -> S:
            if limits is None or not is_partial:
                return step(state, query, is_partial)
            hidden = limits.hide(query, static.tiles.block_q)
            return lax.cond(hidden, lambda state: state, lambda state: step(state, query, True), state)

        at = b, h, column
        return block_walk.over_queries(spec, static.tiles, arrays, at, state, visible_step, descending=True)

    if _walks_heads_inside(static):
        step = step_of(first)

        def heads(state: S, query: Index, is_partial: bool) -> S:
            return lax.fori_loop(0, spec.group, lambda i, state: step(state, first + i, query, is_partial), state)

        return walk(first, state, heads)

    def one_head(i: Index, state: S) -> S:
        h = first + i
        step = step_of(h)
        return end(h, walk(h, state, lambda state, *tile: step(state, h, *tile)))

    return one_head(0, state) if spec.group == 1 else lax.fori_loop(0, spec.group, one_head, state)


def _limits(static: BackwardStatic, arrays: Operands[Ref], b: jax.Array, column: jax.Array) -> TileLimits | None:
    """Limits of the keys of a CTA, which hide some of the tiles of a partial block; None if a tile is a block.

    H200, jax 0.11.2, bf16, D 128, documents, kernel, us, without and so: S 16384 1026 and 1018, S 8192 675 and 650;
    of a corpus, S 32768 8830 and 8734, S 8192 3148 and 2843.
    """
    spec, tiles = static.spec, static.tiles
    number = None if spec.mask_mod is None else spec.mask_mod.limits
    if number is None or spec.block_size is None or spec.block_size[0] == tiles.block_q:
        return None
    ref, shape = arrays.captured.mask[number + 1], static.captured.mask[number + 1]
    return tile_limits(ref, shape, b, column * tiles.block_kv, tiles.block_kv)


def _walks_heads_inside(static: BackwardStatic) -> bool:
    """True if each tile of queries is walked for all heads of a group before the next tile.

    This takes heads that are alike but for their operands. It pays where a mask has limits (documents): few CTAs share
    a tile of queries, and meet at it while it is in the L2 cache, with tiles of keys in ascending order and one wave of
    concurrent heads. H200, jax 0.11.2, bf16, D 128, backward, us, one head after the other and so: documents of a
    corpus, S 32768, 64 heads on 8, 10687 and 9636; 12 documents, S 8192, 32 heads on 8, 978 and 944; causal 4243, 4392.
    """
    spec, programs = static.spec, static.spec.programs
    if spec.group == 1 or spec.mask_mod is None or spec.mask_mod.limits is None:
        return False
    mods = [p for p in (programs.score, programs.mask, programs.dropout) if p is not None]
    uses_head = any(p.argument("h") in p.nodes for p in mods)
    return spec.list_heads == 1 and not uses_head and not static.groups.columns


def _consume(
    static: BackwardStatic,
    inputs: DkvInputs[Ref],
    location: Location,
    outputs: DkvOutputs[Ref],
    scratch: DkvScratch,
    group: jax.Array,
    number: Index,
    count: jax.Array,
) -> jax.Array:
    """Consumer warp group: prologue, mainloop and epilogue of 64 keys; returns `count`, the tiles of queries so far."""
    spec, arrays, rows = static.spec, inputs.arrays, smem.WARP_GROUP_ROWS
    b, kv_h, column = location
    tile = jnp.int32(0) if static.shares_keys else group
    first = column * static.tiles.block_kv + tile * rows
    columns = outputs.columns if KEY in static.sums else []

    def walk(*accumulators: Accumulator) -> tuple[Index, list[jax.Array], list[jax.Array]]:
        sums = dict(zip(static.sums, accumulators, strict=True))
        key_tile = KeyTile(static, scratch, tile, b, first, sums, inputs.d_query)

        def wait_for_keys() -> None:
            plg.barrier_wait(scratch.full)
            if scratch.persistence is not None:  # TMA has read the dK and dV before, where dQ and dS come now
                plg.wait_smem_to_gmem(0, wait_read_only=True)

        def step_of(h: jax.Array) -> Callable[[Carried, jax.Array, Index, bool], Carried]:
            """The step of a head; keys and values arrive while limits of the mask do."""
            step = key_tile.step(arrays, h)
            pl.when(h == kv_h * spec.group)(wait_for_keys)
            return step

        def end(h: jax.Array, carried: Carried) -> Carried:
            state, cotangents = carried
            for ref, x in zip(columns, cotangents, strict=True):
                assert scratch.sums is not None  # to stage it
                store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
            return state, zeros

        zeros = tuple(row_vector(rows) for _ in columns)
        state, _ = _over_queries(static, arrays, location, (key_tile.begin(kv_h, number, count), zeros), step_of, end)
        marks, scales = key_tile.end(state), {KEY: spec.scale, VALUE: spec.kept_scale}
        scaled = [ref[...] if scales[name] == 1.0 else ref[...] * scales[name] for name, ref in sums.items()]
        return state.count, marks, scaled

    sizes = {KEY: spec.D, VALUE: spec.Dv}
    end_count, marks, sums = pl.run_scoped(walk, *(accumulator(rows, sizes[name]) for name in static.sums))
    _store(static, location, outputs, scratch, tile, dict(zip(static.sums, sums, strict=True)), marks)
    return end_count


def _store(
    static: BackwardStatic,
    location: Location,
    outputs: DkvOutputs[Ref],
    scratch: DkvScratch,
    tile: jax.Array,
    sums: dict[str, jax.Array],
    marks: list[jax.Array],
) -> None:
    """Stores marks, and by TMA dV and dK; `marks` mark keys that are not finite, for their dQ."""
    spec, rows, (b, kv_h, column) = static.spec, smem.WARP_GROUP_ROWS, location
    first = column * static.tiles.block_kv + tile * rows
    if outputs.marks:
        out = outputs.marks[-1 if static.sums == (KEY,) else 0]
        row = first + plg.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)
        global_rows.store_values(out, (b * spec.Hkv + kv_h) * out.shape[2] + row, sum(marks, mark(*sums.values())))
    for shared in (scratch.d_query, scratch.scores):
        if shared is not None:
            shared.join()  # all groups have read dS, or the keys and values
    for name, x in reversed(sums.items()):  # dV first: where dK is staged, TMA still reads dQ
        staged, target = scratch.staging(name, tile), outputs.key if name == KEY else outputs.value
        if name == KEY:
            plg.wait_smem_to_gmem(1, wait_read_only=True)
        staged[...] = x.astype(staged.dtype)
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged, target.at[smem.rows_at(spec, b, kv_h, first, rows)])
