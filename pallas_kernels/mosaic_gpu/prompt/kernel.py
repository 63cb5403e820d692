"""Attention of prompts over pages, for Hopper: the mainloop of the forward kernel, with keys loaded page by page.

The rows of a tile are consecutive queries of one request and one query head. Persistent CTAs draw tiles of queries, the
heads of a group side by side, so that CTAs that run at once read the same keys from L2. The producer warp group looks
up the pages of a tile of keys before it waits for a stage of the ring, and loads each page, or the part of it that lies
in the tile, by a TMA copy; its threads copy the rows of small pages (`gathers`). Two consumer warp groups ping-pong, as
in `forward.kernel`.

TMA takes rows from a multiple of 8 on: a tile of queries starts at one, and its rows of other requests are not stored.
Rows of a request that do not fill the tile of a warp group are stored one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import global_rows, schedule, smem
from pallas_kernels.mosaic_gpu.forward import kernel as forward
from pallas_kernels.mosaic_gpu.forward import step as forward_step
from pallas_kernels.mosaic_gpu.launch import ROWS_MULTIPLE, flatten_captured, launch, output, run_roles
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import ROW
from pallas_kernels.mosaic_gpu.smem import WARP_GROUP_ROWS, PingPong, Ring
from pallas_kernels.mosaic_gpu.split_kv import SplitKvInputs, clear_values
from pallas_kernels.mosaic_gpu.work_items import (
    TILED_ROWS,
    Item,
    limit_of_pages,
    lines_of_tile,
    look_up_page,
    pieces_of_tile,
    rows_of_piece,
)
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv.work import NUM_ITEMS
from pallas_kernels.types import Index, Ref

CONSUMERS = 2
BLOCK_Q = CONSUMERS * WARP_GROUP_ROWS
# The producer has addresses of pages; 240 and 24 spill nothing either, and were not timed.
REGISTERS = 232, 40  # of consumers and producer
MAX_LOOKED_UP = 4  # pages whose ids are in registers of the producer at once


def declare(spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike, query_stages: int) -> forward.ForwardScratch:
    """The scratch of a CTA."""
    stages = [smem.tiled((tiles.num_stages, tiles.block_kv, size), dtype) for size in (spec.D, spec.Dv)]
    barrier = smem.declared(plg.Barrier(num_barriers=query_stages * CONSUMERS))
    copies = 1 if gathers(spec) else pieces_of_tile(spec, tiles.block_kv)
    return forward.ForwardScratch(
        smem.tiled((query_stages, CONSUMERS, WARP_GROUP_ROWS, spec.D), dtype),
        barrier,
        barrier,
        Ring.from_tiles(tuple(stages), CONSUMERS, copies),
        None if spec.Dv == spec.D else smem.tiled((CONSUMERS, WARP_GROUP_ROWS, spec.Dv), dtype),
        (),
        schedule.tile_id_scratch(),
    )


def gathers(spec: AttentionSpec) -> bool:
    """True if pages are too small for TMA, so that threads copy their rows.

    H200, jax 0.11.2, bf16, causal, 32 query and 8 key heads of 128, 2048 queries at the end of 8192 keys, us, by TMA
    and by row: pages of 8, 494 and 414, 16, 392 and 412, 64, 351 and 413; pages of 1 by row 405, on `triton` 593.
    """
    return spec.page_size == TILED_ROWS or limit_of_pages(spec) is not None


class ItemTable(NamedTuple):
    """The work items of all CTAs, by tile id: the heads of an item side by side."""

    items: Ref  # int32 [items, FIELDS]
    heads: int
    size: jax.Array

    @classmethod
    def from_items(cls, items: Ref, heads: int) -> ItemTable:
        """The table of a launch, without its padding."""
        return cls(items, heads, items[0, NUM_ITEMS] * heads)

    def unravel(self, tile_id: Index) -> Item:
        """The work item of a tile id below the size."""
        heads = jnp.int32(self.heads)
        at = lax.div(tile_id, heads)
        return Item(lax.rem(tile_id, heads), *(self.items[at, field] for field in range(NUM_ITEMS)))


class PromptStatic(NamedTuple):
    """Inputs, outputs and scratch of producer and consumers."""

    spec: AttentionSpec  # `Hkv` counts the query heads: each has tiles of its own
    tiles: Tiles
    group: int  # query heads of a key head
    captured: scores.CapturedShapes  # shapes of the captured arrays
    arrays: SplitKvInputs[Ref]
    outputs: tuple[Ref, ...]  # out [N, Hq, Dv], lse [N, Hq]; with splits, partial results
    scratch: forward.ForwardScratch

    def first_row(self, item: Item, group: Index) -> jax.Array:
        """The packed query in the first row of a consumer, a multiple of `ROWS_MULTIPLE`."""
        return item.first - lax.rem(item.first, jnp.int32(ROWS_MULTIPLE)) + group * WARP_GROUP_ROWS


def attend(
    spec: AttentionSpec, tiles: Tiles, group: int, query_stages: int, slots: int, arrays: SplitKvInputs[jax.Array]
) -> list[jax.Array]:
    """Computes out [N, Hq, Dv] and lse, float32 [N, Hq], of the queries of all work items whose keys are not split.

    After them come the partial results of the others, if there may be any: out [slots, Hq, rows, Dv] and lse [slots,
    Hq, rows], float32. `spec.Hkv` counts query heads; `group` of them share a key head.
    """
    padding = -spec.T % ROWS_MULTIPLE
    outputs = [output((spec.T + padding, spec.Hq, spec.Dv), spec.out_dtype), output((spec.T, spec.Hq), jnp.float32)]
    if slots:
        rows = slots, spec.Hq, tiles.block_q
        outputs += [output((*rows, spec.Dv), jnp.float32), output(rows, jnp.float32)]
    of_mods = arrays.of_mods()
    flat, captured = flatten_captured(of_mods), scores.CapturedShapes.from_operands(of_mods)
    query = jnp.pad(arrays.query, ((0, padding), (0, 0), (0, 0))) if padding else arrays.query

    def kernel(
        cta_id: Index, inputs: tuple[SplitKvInputs[Ref], Ref], outputs: tuple[Ref, ...], scratch: forward.ForwardScratch
    ) -> None:
        refs, counter = inputs
        static = PromptStatic(spec, tiles, group, captured, refs, tuple(outputs), scratch)
        table = ItemTable.from_items(refs.items, spec.Hkv)
        tile_scheduler = schedule.PersistentScheduler(table, cta_id, counter, scratch.tile_ids)
        produce, consume = (functools.partial(role, static, tile_scheduler) for role in (_produce, _consume))
        run_roles(CONSUMERS, produce, consume, REGISTERS)

    out, *others = launch(
        kernel,
        (arrays._replace(query=query, captured=flat.captured), schedule.tile_counter()),
        outputs,
        declare(spec, tiles, arrays.query.dtype, query_stages),
        name="jflex_prompt_sm90",
        num_ctas=schedule.NUM_CTAS,
        warp_groups=CONSUMERS + 1,
    )
    return [out[: spec.T], *others]


# --- producer


def _produce(static: PromptStatic, tile_scheduler: schedule.PersistentScheduler[Item]) -> None:
    """Producer warp group: draws work items, and loads queries, keys and values by TMA."""
    scratch = static.scratch

    def tile(i: Index, item: Item, stage: jax.Array) -> jax.Array:
        for group in range(CONSUMERS):
            query_stage, barrier = scratch.query_slot(i, group)
            at = pl.ds(static.first_row(item, group), WARP_GROUP_ROWS), item.group
            full = scratch.queries_full.at[barrier]
            plg.copy_gmem_to_smem(static.arrays.query.at[at], scratch.queries.at[query_stage, group], full)
        return _load_keys(static, item, stage)

    forward.produce(scratch, tile_scheduler, tile)


def _load_keys(static: PromptStatic, item: Item, stage: jax.Array) -> jax.Array:
    """Loads the keys and values of a work item; returns the next free stage.

    A stage holds the values of the tile before, as in `forward.kernel`.
    """
    before = lambda j: item.begin + jnp.maximum(j - 1, 0)
    fill = _gather if gathers(static.spec) else _fill

    def step(j: jax.Array, done: jax.Array) -> jax.Array:
        fill(static, item, stage + j, item.begin + j, before(j))
        return done

    lax.fori_loop(0, item.tiles, step, jnp.int32(0))
    pl.when(item.tiles > 0)(lambda: fill(static, item, stage + item.tiles, None, before(item.tiles)))
    return forward.after(stage, stage + item.tiles)


def _fill(static: PromptStatic, item: Item, i: jax.Array, key_tile: jax.Array | None, value_tile: jax.Array) -> None:
    """Loads a tile of keys, or none, and one of values into the ith stage of the ring, once it is empty."""
    spec, arrays, ring, keys = static.spec, static.arrays, static.scratch.ring, static.tiles.block_kv
    size, pieces, head = rows_of_piece(spec, keys), pieces_of_tile(spec, keys), lax.div(item.group, static.group)
    table, first_page, values = arrays.table, arrays.first_page, arrays.value
    assert table is not None  # of a paged call
    assert first_page is not None
    assert values is not None  # but for MLA
    loads = [(arrays.key, ring.tiles[0], key_tile, n) for n in range(pieces) if key_tile is not None]
    loads += [(values, ring.tiles[1], value_tile, n) for n in range(pieces)]
    slot = None
    for batch in (loads[n : n + MAX_LOOKED_UP] for n in range(0, len(loads), MAX_LOOKED_UP)):
        places = [look_up_page(spec, table, first_page, item, (tile, n), keys) for _, _, tile, n in batch]
        if slot is None:  # the first page ids arrive while the stage is in use
            slot = ring.wait_until_empty(i)
        for (page, row), (source, tiles, _, n) in zip(places, batch, strict=True):
            target = tiles.at[slot, pl.ds(n * size, size)]
            plg.copy_gmem_to_smem(source.at[page, pl.ds(row, size), head], target, ring.full.at[slot])
    for _ in range(2 * pieces - len(loads)):
        plg.barrier_arrive(ring.full.at[slot])


def _gather(static: PromptStatic, item: Item, i: jax.Array, key_tile: jax.Array | None, value_tile: jax.Array) -> None:
    """Does what `_fill` does, row by row."""
    spec, arrays, ring, keys = static.spec, static.arrays, static.scratch.ring, static.tiles.block_kv
    assert arrays.table is not None  # of a paged call
    assert arrays.first_page is not None
    assert arrays.value is not None  # but for MLA
    lines = functools.partial(lines_of_tile, spec, arrays.table, arrays.first_page, item, keys=keys)
    loads = [(arrays.key, ring.tiles[0], lines(key_tile))] if key_tile is not None else []
    loads.append((arrays.value, ring.tiles[1], lines(value_tile)))
    slot, heads = ring.wait_until_empty(i), spec.Hq // static.group
    for source, tiles, line in loads:
        global_rows.copy_rows(source, line * heads + lax.div(item.group, static.group), tiles.at[slot])
    global_rows.wait_for_copies()
    plg.commit_smem()
    for _ in ring.tiles:
        plg.barrier_arrive(ring.full.at[slot])


# --- consumers


def _consume(static: PromptStatic, tile_scheduler: schedule.PersistentScheduler[Item], group: jax.Array) -> None:
    """Consumer warp group: computes its rows of each tile of queries."""
    has_ping_pong = forward_step.bottleneck(static.spec) is not forward_step.Bottleneck.NONE
    ping_pong = PingPong(group if has_ping_pong else None)
    tile = functools.partial(_consume_tile, static, ping_pong, group)
    forward.consume(static.scratch, tile_scheduler, ping_pong, group, tile)


def _consume_tile(
    static: PromptStatic, ping_pong: PingPong, group: jax.Array, i: Index, item: Item, stage: jax.Array
) -> jax.Array:
    """Prologue, mainloop and epilogue of a consumer's rows of a work item; returns the next free stage."""
    spec, scratch, keys = static.spec, static.scratch, static.tiles.block_kv
    query_stage, barrier = scratch.query_slot(i, group)
    first, queries, visits = static.first_row(item, group), scratch.queries.at[query_stage, group], item.tiles > 0
    prepared = scores.prepare(
        spec,
        static.arrays.of_mods(),
        static.captured,
        (WARP_GROUP_ROWS, keys),
        item.request,
        item.group,
        q_first=first,
        may_end=True,
    )
    if scratch.queries.shape[0] > 1:
        pl.when(i > 0)(functools.partial(forward.free_last, scratch, i, group))

    # The first stage of values stands for a tile before the first, with weights of zero.
    clear = lambda stage, tile: clear_values(scratch.ring.stage(stage)[1], item.length - tile * keys)

    def begin() -> None:
        scratch.ring.wait(stage)
        clear(stage, item.begin)

    pl.when(visits)(begin)
    start = forward_step.start(spec, WARP_GROUP_ROWS, keys, static.arrays.query.dtype, stage)
    step = forward_step.ForwardStep(prepared, queries, scratch.ring, ping_pong, pl.ds(0, WARP_GROUP_ROWS), item.length)
    state = _over_keys(item, keys, step, start)
    pl.when(visits)(lambda: clear(state.stage, item.end - 1))
    out, lse = forward_step.finish(spec, scratch.ring, state, None, visits)
    pl.when(visits)(lambda: scratch.ring.release(state.stage))
    _store(static, item, group, first, queries, out, lse)
    if scratch.queries.shape[0] == 1:  # the producer waits for this stage before it draws the next item
        assert scratch.queries_empty is not None  # there is a next tile
        plg.wait_smem_to_gmem(0, wait_read_only=True)
        plg.barrier_arrive(scratch.queries_empty.at[barrier])
    return forward.after(stage, state.stage)


def _over_keys(
    item: Item, keys: int, step: forward_step.ForwardStep, state: forward_step.ForwardState
) -> forward_step.ForwardState:
    """Folds the step over the tiles of keys, in order: masked ones, unmasked ones, and masked ones again."""
    whole = step._replace(end=None)

    def rounds(second: jax.Array, state: forward_step.ForwardState) -> forward_step.ForwardState:
        choose = lambda first, other: jnp.where(second == 0, first, other)
        partial = choose(item.begin, item.full_end), choose(item.full_begin, item.end)
        full = item.full_begin, choose(item.full_end, item.full_begin)
        state = lax.fori_loop(*partial, lambda j, state: step(state, j * keys, True), state)
        return lax.fori_loop(*full, lambda j, state: whole(state, j * keys, False), state)

    return lax.fori_loop(0, 2, rounds, state)


def _store(
    static: PromptStatic, item: Item, group: Index, first: jax.Array, queries: Ref, out: jax.Array, lse: jax.Array
) -> None:
    """Stores the rows of a consumer: whole tiles of the result by TMA, others, and partial results, row by row."""
    spec, (result, row_lse, *partial) = static.spec, static.outputs
    row = plg.broadcasted_iota(jnp.int32, (WARP_GROUP_ROWS,), 0, layout=ROW)
    n, end = first + row, item.first + item.queries
    exists = (n >= item.first) & (n < end)

    def store_rows(out_ref: Ref, lse_ref: Ref, line: jax.Array) -> None:
        line = jnp.where(exists, line, -1)
        global_rows.store_rows(out_ref, line, 0, out.astype(out_ref.dtype))
        global_rows.store_values(lse_ref, line, lse)

    def store_tile() -> None:
        staged = queries if static.scratch.out is None else static.scratch.out.at[group]
        staged[...] = out.astype(staged.dtype)
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged, result.at[pl.ds(first, WARP_GROUP_ROWS), item.group])
        global_rows.store_values(row_lse, n * spec.Hq + item.group, lse)

    by_rows: Callable[[], None] = lambda: store_rows(result, row_lse, n * spec.Hq + item.group)
    whole = (first >= item.first) & (first + WARP_GROUP_ROWS <= end)
    is_result = item.slot < 0 if partial else jnp.full((), True)
    if result.dtype == static.arrays.query.dtype:
        pl.when(is_result & whole)(store_tile)
        pl.when(is_result & ~whole)(by_rows)
    else:
        pl.when(is_result)(by_rows)
    if partial:
        of_tile = (item.slot * spec.Hq + item.group) * static.tiles.block_q + group * WARP_GROUP_ROWS
        pl.when(item.slot >= 0)(lambda: store_rows(partial[0], partial[1], of_tile + row))
