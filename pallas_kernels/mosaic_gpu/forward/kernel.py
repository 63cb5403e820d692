"""Forward kernel for Hopper: warp-specialised, persistent, with ping-pong scheduling of two consumers.

Persistent CTAs draw tiles of queries, each of one head, from `PersistentScheduler`. The producer warp group walks
the listed blocks of keys and loads queries by TMA, and keys and values into a ring of shared-memory stages. Two to
four consumer warp groups divide the queries, and hold their weights P, O accumulator and online softmax state in
registers (Shah et al. 2024, arXiv:2407.08608, algorithm 2). Two ping-pong at the bottleneck: the tensor cores, or the
special-function unit (`step`). More overlap without it (H200, D 64, three: 7385 us, with a ping-pong 7394).

A persistent CTA loads the queries of its next tile while it computes. The schedule is dynamic because tiles of a causal
mask differ in work: a CTA takes its CTA id as its first tile id, then draws ids from an atomic counter.

For each tile: the prologue evaluates the loop-invariant values of the mods; the mainloop issues QK^T of one tile of
keys and PV of the tile before it; the epilogue does the last PV, normalizes, and stores by TMA.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import schedule, smem
from pallas_kernels.mosaic_gpu.forward import step as forward_step
from pallas_kernels.mosaic_gpu.launch import (
    Grid,
    cut_rows,
    flatten_captured,
    launch,
    output,
    pad_operands,
    padded_head_sizes,
    run_roles,
)
from pallas_kernels.mosaic_gpu.score import bias_tiles, scores
from pallas_kernels.mosaic_gpu.smem import BitRing, PingPong, Ring
from pallas_kernels.program.ranges import Range, is_prefix
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Index, Location, Ref, S, Step

T = TypeVar("T")  # the index of a tile
REGISTERS = {3: (160, 32), 4: (112, 24)}  # of a thread of so many consumers, and of the producer: as `smem.REGISTERS`


class ForwardScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    queries: Ref  # [1 or 2 stages, groups, rows, D]: of the current tile, and of the next
    queries_full: Ref  # a barrier for each of these stages and each group
    queries_empty: Ref | None  # a barrier for each of them; None if the kernel is not persistent
    # a stage holds the keys [block_kv, D] of a tile and the values [block_kv, Dv] of the tile before it, whose GEMMs
    # belong to the same mainloop iteration, and bias tiles [block_q, block_kv]
    ring: Ring
    # [groups, rows, columns that are stored at once], for the TMA store; None if the output overwrites the queries
    out: Ref | None
    rows: tuple[Ref, ...]  # [groups, rows], float32, each: of the lse and of `spec.stats`
    tile_ids: Ref | None  # of the current tile and the next; None if the kernel is not persistent

    @property
    def has_bias_tiles(self) -> bool:
        """True if the ring holds bias tiles."""
        return len(self.ring.tiles) > 2

    def query_slot(self, i: Index, group: Index) -> tuple[jax.Array, jax.Array]:
        """The stage of the queries of the ith tile, and the index of their barriers."""
        stages, groups = self.queries.shape[:2]
        query_stage = jnp.int32(0) if self.tile_ids is None else lax.rem(i, jnp.int32(stages))
        return query_stage, query_stage * groups + group


def declare(spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike) -> ForwardScratch:
    """The scratch of a CTA: with bias tiles if they fit, and persistent if that fits then."""
    bias = bias_tiles.declare(spec, tiles, tiles.num_stages)
    persistence = (True, False) if _grid(spec, tiles).size > schedule.NUM_CTAS else (False,)
    for bias_refs, is_persistent in itertools.product((bias, ()) if bias else ((),), persistence):
        declared = _declare(spec, tiles, dtype, bias_refs, is_persistent=is_persistent)
        if smem.bytes_of(jax.tree.leaves(declared)) <= smem.LIMIT:
            return declared
    return _declare(spec, tiles, dtype, (), is_persistent=False)


def _declare(
    spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike, bias: tuple[Ref, ...], *, is_persistent: bool
) -> ForwardScratch:
    groups, query_stages = tiles.num_warps // 4, schedule.QUERY_STAGES if is_persistent else 1
    rows = tiles.block_q // groups
    (D, Dv), qk_dtype = padded_head_sizes(spec, dtype), jnp.dtype(spec.qk_dtype or dtype)
    sizes, staged = ((D, qk_dtype), (Dv, dtype)), 64 if has_wide_keys(D, Dv) else Dv
    stages = [smem.tiled((tiles.num_stages, tiles.block_kv, size), of_tile) for size, of_tile in sizes]
    return ForwardScratch(
        smem.tiled((query_stages, groups, rows, D), qk_dtype),
        smem.declared(plg.Barrier(num_barriers=query_stages * groups)),
        smem.declared(plg.Barrier(num_barriers=query_stages * groups)) if is_persistent else None,
        BitRing.from_tiles((*stages, *bias), groups),
        None if Dv == D and spec.qk_dtype is None else smem.tiled((groups, rows, staged), dtype),
        tuple(smem.declared(plg.SMEM((groups, rows), jnp.float32)) for _ in ("lse", *spec.stats)),
        schedule.tile_id_scratch() if is_persistent else None,
    )


def has_wide_keys(D: int, Dv: int) -> bool:
    """True for the head sizes of DeepSeek's prompts: half of the output is staged at once, beside 128 keys."""
    return 128 < D <= 192 and Dv == 128


def _grid(spec: AttentionSpec, tiles: Tiles) -> Grid:
    return Grid(spec.B, spec.Hq, pl.cdiv(spec.T, tiles.block_q))


def forward(spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array]) -> tuple[jax.Array, ...]:
    """Computes out, in the layout of the query and the dtype of the value, lse and `spec.stats`, float32 [B, Hq, T].

    With a mask, the lse is NaN where the output must be repaired (`pallas_kernels.softmax.mark`).

    Args:
      tiles: `block_q` queries (64 for each of `num_warps` / 4 consumers, or 128) and `block_kv` keys; `num_stages` of
        the ring.
      arrays: Query [B, T, Hq, D], key [Bkv, S, Hkv, D] and value [Bkv, S, Hkv, Dv], or in the layout BNTH; lists of the
        mask; captured arrays; sinks.
    """
    order, (T, Dv) = block_walk.row_order(spec, tiles, arrays), (spec.T, spec.Dv)
    spec, arrays = pad_operands(spec, arrays)
    grid, scratch = _grid(spec, tiles), declare(spec, tiles, arrays.value.dtype)
    is_persistent = scratch.tile_ids is not None
    is_dynamic = is_persistent and grid.tiles > schedule.MAX_STATIC_TILES
    captured = scores.CapturedShapes.from_operands(arrays)
    bias_refs = (
        [load.source(arrays.captured.score) for load in bias_tiles.bias_loads(spec)] if scratch.has_bias_tiles else []
    )
    per_row = output((spec.B, spec.Hq, -(-spec.T // 128) * 128), jnp.float32)  # whole rows of warp groups
    out, *rows = launch(
        functools.partial(_kernel, spec, tiles, captured),
        (flatten_captured(arrays), order, schedule.tile_counter() if is_dynamic else None, bias_refs),
        (output((*arrays.query.shape[:3], spec.Dv), arrays.value.dtype), *(per_row for _ in ("lse", *spec.stats))),
        scratch,
        name="jflex_forward_sm90",
        num_ctas=schedule.NUM_CTAS if is_persistent else grid.size,
        warp_groups=tiles.num_warps // 4 + 1,
    )
    return cut_rows(spec, out, T, Dv), *(x[..., :T] for x in rows)


def _kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    captured: scores.CapturedShapes,
    cta_id: Index,
    # operands, tile order [list batch, list heads, tiles], tile counter [1], sources of bias tiles
    inputs: tuple[Operands[Ref], Ref | None, Ref | None, list[Ref]],
    outputs: tuple[Ref, ...],  # out like the query, [..., Dv]; lse and `spec.stats` [B, Hq, rounded up T]
    scratch: ForwardScratch,
) -> None:
    arrays, order, counter, bias_refs = inputs
    grid = _grid(spec, tiles)
    tile_scheduler = schedule.PersistentScheduler(grid, cta_id, counter, scratch.tile_ids)
    row_at = lambda b, h, i: (b, h, block_walk.row_at(spec, order, b, h, i, grid.tiles))
    loads = bias_tiles.bias_loads(spec) if bias_refs else ()
    bias = bias_tiles.BiasTiles(spec, tiles, arrays.captured.score, loads, bias_refs)
    static = ForwardStatic(spec, tiles, captured, arrays, bias, outputs, scratch, row_at)
    produce, consume = (functools.partial(role, static, tile_scheduler) for role in (_produce, _consume))
    groups = tiles.num_warps // 4
    run_roles(groups, produce, consume, REGISTERS.get(groups, smem.REGISTERS))


class ForwardStatic(NamedTuple):
    """Inputs, outputs and scratch of producer and consumers."""

    spec: AttentionSpec
    tiles: Tiles
    captured: scores.CapturedShapes  # shapes of the captured arrays
    arrays: Operands[Ref]  # the inputs, in global memory
    bias: bias_tiles.BiasTiles  # the bias tiles that TMA loads beside keys and values
    # out, in the layout of the query, [..., Dv]; lse and `spec.stats`, float32 [B, Hq, rounded up T]
    outputs: tuple[Ref, ...]
    scratch: ForwardScratch  # shared memory and barriers
    # maps (batch, head, number in the tile order) to (batch, head, tile of queries)
    row_at: Callable[[jax.Array, jax.Array, jax.Array], Location]


def _produce(static: ForwardStatic, tile_scheduler: schedule.PersistentScheduler[Location]) -> None:
    """Producer warp group: draws tile ids, and loads queries, keys and values by TMA."""
    scratch, spec, tiles = static.scratch, static.spec, static.tiles
    groups, rows = scratch.queries.shape[1:3]

    def tile(i: Index, index: Location, stage: jax.Array) -> jax.Array:
        b, h, row = location = static.row_at(*index)
        for group in range(groups):
            query_stage, barrier = scratch.query_slot(i, group)
            at = smem.rows_at(spec, b, h, row * tiles.block_q + _part(static, i, group) * rows, rows)
            full = scratch.queries_full.at[barrier]
            plg.copy_gmem_to_smem(static.arrays.query.at[at], scratch.queries.at[query_stage, group], full)
        return _load_keys(static, location, stage)

    produce(scratch, tile_scheduler, tile)


def produce(
    scratch: ForwardScratch,
    tile_scheduler: schedule.PersistentScheduler[T],
    tile: Callable[[Index, T, jax.Array], jax.Array],
) -> None:
    """Loop of a producer warp group over the tiles of its CTA, of which `tile` loads one."""
    stages, groups = scratch.queries.shape[:2]

    def next_tile(i: Index) -> jax.Array:
        assert scratch.queries_empty is not None  # there is a next tile
        for group in range(groups):
            barrier = scratch.queries_empty.at[scratch.query_slot(i, group)[1]]
            pl.when(i >= stages)(functools.partial(plg.barrier_wait, barrier))
        return tile_scheduler.draw(i)

    count = tile_scheduler.over_tiles(tile, next_tile)
    if scratch.tile_ids is not None:
        for group in range(groups):  # so that the consumers read that no tile is left
            plg.barrier_arrive(scratch.queries_full.at[scratch.query_slot(count, group)[1]])


def _load_keys(static: ForwardStatic, location: Location, stage: jax.Array) -> jax.Array:
    """Loads the keys, values and bias tiles that a tile of queries visits; returns the next free stage."""
    spec, arrays, ring = static.spec, static.arrays, static.scratch.ring
    b, h = (location[0] if spec.Bkv > 1 else 0), lax.div(location[1], jnp.int32(spec.group))
    at = lambda first: smem.rows_at(spec, b, h, first, static.tiles.block_kv)
    bias_at, q_first = static.bias.sources_of_head(*location[:2]), location[2] * static.tiles.block_q

    def step(state: tuple[jax.Array, jax.Array], first: Index, _: bool) -> tuple[jax.Array, Index]:
        i, before = state
        before = jnp.where(i == stage, first, before)
        ring.fill(i, arrays.key.at[at(first)], arrays.value.at[at(before)], *bias_at(q_first, first))
        return i + 1, first

    end, last = _over_keys(static, location, _prefix(static, location), (stage, jnp.int32(0)), step)
    pl.when(end > stage)(lambda: ring.fill(end, None, arrays.value.at[at(last)], *(None for _ in static.bias.loads)))
    return after(stage, end)


def is_shortest(spec: AttentionSpec) -> bool:
    """True for up to 128 tokens: tiles of 64 keys are faster there, and prefixes faster than a ping-pong.

    H200, D 64, B 32, S 128, us by 128 and by 64 keys: 15.4 and 14.2, causal 17.6 and 16.6, and with prefixes 15.8.
    """
    is_free = not spec.config.batch_invariant  # else the room for keys, S, must not choose tiles
    return is_free and spec.T > 64 and max(spec.T, spec.S) <= 128 and max(spec.D, spec.Dv) <= 64


def _has_prefixes(spec: AttentionSpec, tiles: Tiles) -> bool:
    """True if each consumer walks the prefix of keys that its rows see, without ping-pong."""
    mask = spec.programs.mask if tiles.num_warps == 16 or (tiles.block_kv == 64 and is_shortest(spec)) else None
    return spec.block_size is None and mask is not None and is_prefix(mask)


def _part(static: ForwardStatic, i: Index, group: Index) -> Index:
    """The part of the rows of the ith tile that a group computes. Parts rotate: the last has the longest prefix."""
    groups = static.tiles.num_warps // 4
    return lax.rem(i + group, jnp.int32(groups)) if _has_prefixes(static.spec, static.tiles) else group


def _prefix(static: ForwardStatic, location: Location, part: Index | None = None) -> Range | None:
    """The prefix of keys of a tile, or of a part of its rows, where consumers walk prefixes; else None."""
    spec, tiles, (b, h, row) = static.spec, static.tiles, location
    if not _has_prefixes(spec, tiles):
        return None
    if part is not None:
        groups = tiles.num_warps // 4
        tiles, row = Tiles(tiles.block_q // groups, tiles.block_kv), row * groups + part
    return block_walk.visible_tiles(spec, tiles, "k", (b, h, row))


def _over_keys(static: ForwardStatic, location: Location, prefix: Range | None, state: S, step: Step[S]) -> S:
    """Walks a prefix in ascending order, or the tiles of `block_walk.over_keys`."""
    if prefix is None:
        return block_walk.over_keys(static.spec, static.tiles, static.arrays, location, state, step)
    for first, end, is_partial in ((0, prefix.full_end, False), (prefix.full_end, prefix.end, True)):
        body = lambda t, state, is_partial=is_partial: step(state, t * static.tiles.block_kv, is_partial)
        state = lax.fori_loop(first, end, body, state)
    return state


def after(stage: jax.Array, end: jax.Array) -> jax.Array:
    """The next free stage: a tile of queries takes one more than it visits tiles of keys, if any."""
    return jnp.where(end > stage, end + 1, stage)


def _consume(static: ForwardStatic, tile_scheduler: schedule.PersistentScheduler[Location], group: jax.Array) -> None:
    """Consumer warp group: computes its rows of each tile of queries."""
    spec, tiles = static.spec, static.tiles
    has_ping_pong = tiles.num_warps == 8 and not _has_prefixes(spec, tiles)
    has_ping_pong = has_ping_pong and forward_step.bottleneck(spec) is not forward_step.Bottleneck.NONE
    ping_pong = PingPong(group if has_ping_pong else None)
    tile = functools.partial(_consume_tile, static, ping_pong, group)
    consume(static.scratch, tile_scheduler, ping_pong, group, tile)


def consume(
    scratch: ForwardScratch,
    tile_scheduler: schedule.PersistentScheduler[T],
    ping_pong: PingPong,
    group: jax.Array,
    tile: Callable[[Index, T, jax.Array], jax.Array],
) -> None:
    """Loop of a consumer warp group over the tiles of its CTA, of which `tile` computes its rows."""

    def next_tile(i: Index) -> jax.Array:
        plg.barrier_wait(scratch.queries_full.at[scratch.query_slot(i, group)[1]])
        return tile_scheduler.tile_id(i)

    pl.when(group == 1)(ping_pong.release)  # group 0 goes first
    if scratch.tile_ids is not None:
        plg.barrier_wait(scratch.queries_full.at[group])
    tile_scheduler.over_tiles(tile, next_tile)
    plg.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(group == 0)(ping_pong.acquire)


def _consume_tile(
    static: ForwardStatic, ping_pong: PingPong, group: jax.Array, i: Index, index: Location, stage: jax.Array
) -> jax.Array:
    """Prologue, mainloop and epilogue of a consumer's rows of a tile of queries; returns the next free stage."""
    spec, tiles, scratch = static.spec, static.tiles, static.scratch
    (query_stage, barrier), rows = scratch.query_slot(i, group), scratch.queries.shape[2]
    b, h, row = location = static.row_at(*index)
    part = _part(static, i, group)
    first, queries = row * tiles.block_q + part * rows, scratch.queries.at[query_stage, group]
    prepared = scores.prepare(
        spec,
        static.arrays,
        static.captured,
        (rows, tiles.block_kv),
        b,
        h,
        q_first=first,
        may_end=spec.T % tiles.block_q != 0,
    )
    count, prefix = block_walk.count_keys(spec, tiles, static.arrays, location), _prefix(static, location, part)
    visits = (count if prefix is None else jnp.asarray(prefix.end)) > 0
    if scratch.tile_ids is None:
        plg.barrier_wait(scratch.queries_full.at[barrier])
    else:
        pl.when(i > 0)(functools.partial(free_last, scratch, i, group))
    pl.when(visits)(lambda: scratch.ring.wait(stage))
    start = forward_step.start(spec, rows, tiles.block_kv, static.arrays.value.dtype, stage)
    step = forward_step.ForwardStep(prepared, queries, scratch.ring, ping_pong, pl.ds(part * rows, rows))
    state = _over_keys(static, location, prefix, start, step)
    sink = None if static.arrays.sinks is None else static.arrays.sinks[h]
    result = forward_step.finish(spec, scratch.ring, state, sink, visits)
    pl.when(visits)(lambda: scratch.ring.release(state.stage))
    staged = (queries if scratch.out is None else scratch.out.at[group], *(x.at[group] for x in scratch.rows))
    store(spec, staged, (*result, *forward_step.stats(spec, state, sink)), static.outputs, (b, h, first))
    if prefix is None:
        return after(stage, state.stage)
    free = after(stage, stage + count)
    scratch.ring.pass_over(state.stage + visits.astype(jnp.int32), free)
    return free


def free_last(scratch: ForwardScratch, i: Index, group: jax.Array) -> None:
    """Releases the query stage of the tile before, once the TMA store of its output has read it."""
    assert scratch.queries_empty is not None  # there is a next tile
    plg.wait_smem_to_gmem(0, wait_read_only=True)
    plg.barrier_arrive(scratch.queries_empty.at[scratch.query_slot(i - 1, group)[1]])


def store(
    spec: AttentionSpec,
    staged: tuple[Ref, ...],
    result: tuple[jax.Array, ...],
    outputs: tuple[Ref, ...],
    index: Location,
) -> None:
    """Starts the stores of a group's rows, of all columns or, one after the other, of as many as are staged.

    TMA drops rows of the output past the end; a bulk copy of the lse would reach the rows of the next head.
    """
    (b, h, first), (out, *vectors) = index, result
    (rows, columns), width = out.shape, staged[0].shape[1]
    parts = [lax.slice(out, (0, column), (rows, column + width)) for column in range(0, columns, width)]
    at = smem.rows_at(spec, b, h, first, rows)
    for ref, x in zip(staged, (parts[0], *vectors), strict=True):
        ref[...] = x.astype(ref.dtype)
    for i, part in enumerate(parts):
        if i > 0:
            plg.wait_smem_to_gmem(0, wait_read_only=True)
            staged[0][...] = part.astype(staged[0].dtype)
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged[0], outputs[0].at[at].at[:, pl.ds(i * width, width)])
    for ref, target in zip(staged[1:], outputs[1:], strict=True):
        plg.copy_smem_to_gmem(ref, target.at[b, h, pl.ds(first, rows)], first < spec.T)
