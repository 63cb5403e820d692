"""Attention of few queries over keys and values, contiguous or in pages, for Hopper: split-KV with TMA and wgmma.

The rows of a tile are queries of one request, of all query heads that share a key head, so that keys are read once for
them. Persistent CTAs take work items (a tile of queries, one split of its keys, a key head), the longest first where
requests are few. A producer warp group looks up pages, and loads tiles of keys and values by TMA into a ring, across
items. Loading bounds the time, so the ring holds 128 KiB. Two consumer warp groups take every other tile, each with a
softmax state of its own, and merge the two at the end of an item: while one waits for a GEMM or computes weights, the
other goes on.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import global_rows, inline_ptx, smem, split_kv
from pallas_kernels.mosaic_gpu.decode import step
from pallas_kernels.mosaic_gpu.decode.sizes import DecodeRows, Packing, first_query, merged_columns, stages_of
from pallas_kernels.mosaic_gpu.forward.step import normalized
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE, over_columns
from pallas_kernels.mosaic_gpu.smem import FIRST_FREE_BARRIER, WARP_GROUP_THREADS, Ring
from pallas_kernels.mosaic_gpu.split_kv import CONSUMERS, SplitKvInputs, finite
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, Item, pieces_of_tile
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Axis, Ref

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 216, 72  # the producer has addresses of pages; consumers hold 64 keys
_FILLED, _FREE = FIRST_FREE_BARRIER, FIRST_FREE_BARRIER + 1  # named barriers of the state handed over


class DecodeScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    queries: Ref  # [consumers, 64, D]: each has a copy
    # a stage holds keys [64, D] and values [64, Dv]; even ones are read by the first consumer, odd ones by the second
    ring: Ring
    out: Ref  # [64, columns] float32: output of the second consumer, which the first merges
    vectors: Ref  # [2, 64] float32: its row_max and row_sum


def declare(spec: AttentionSpec, dtype: DTypeLike) -> DecodeScratch:
    """The scratch of a CTA."""
    stages, rows = stages_of(spec), smem.WARP_GROUP_ROWS
    tiles = tuple(smem.tiled((stages, TILE_KEYS, size), dtype) for size in (spec.D, spec.Dv))
    pieces = 1 if spec.paging is None else pieces_of_tile(spec)
    barrier = lambda arrivals: smem.declared(plg.Barrier(num_arrivals=arrivals, num_barriers=stages))
    return DecodeScratch(
        smem.tiled((CONSUMERS, rows, spec.D), dtype),
        Ring(tiles, barrier(len(tiles) * pieces), barrier(1)),
        smem.tiled((rows, merged_columns(spec)), jnp.float32),
        smem.declared(plg.SMEM((2, rows), jnp.float32)),
    )


def attend(spec: AttentionSpec, packing: Packing, slots: int, arrays: SplitKvInputs[jax.Array]) -> list[jax.Array]:
    """Runs `split_kv.attend`; the first rows of a partial result are the heads of the first query, then of the next."""
    return split_kv.attend(ROLES, spec, packing, slots, arrays, declare(spec, arrays.query.dtype))


DecodeStatic: TypeAlias = split_kv.Static[Packing, DecodeScratch]


# --- producer


def _produce(static: DecodeStatic) -> None:
    """Producer warp group: loads tiles of keys and values by TMA."""
    plg.set_max_registers(PRODUCER_REGISTERS, action="decrease")

    def run_item(_: jax.Array, item: Item, done: jax.Array) -> jax.Array:
        def tile(j: jax.Array, done: jax.Array) -> jax.Array:
            _load(static, item, item.begin + j, done)
            return done + 1

        return lax.fori_loop(0, item.tiles, tile, done)

    static.over_items(run_item)


def _load(static: DecodeStatic, item: Item, tile: jax.Array, number: jax.Array) -> None:
    """Loads a tile into the ring, as the one of this number, once its stage is empty."""
    ring, places, values = static.scratch.ring, _places(static, item, tile), static.arrays.value
    assert values is not None  # but for MLA
    slot, stages = ring.slot(number), ring.tiles[0].shape[0]
    pl.when(number >= stages)(lambda: plg.barrier_wait(ring.empty.at[slot]))
    for source, tiles in zip((static.arrays.key, values), ring.tiles, strict=True):
        for at, rows in places:
            plg.copy_gmem_to_smem(source.at[at], tiles.at[slot, rows], ring.full.at[slot])


def _places(static: DecodeStatic, item: Item, tile: jax.Array) -> list[tuple[tuple[Axis, ...], Axis]]:
    """Indices of a tile in the arrays, each with the rows of the tile that it fills."""
    spec, head = static.spec, item.group
    if spec.paging is None:
        b = item.request if spec.Bkv > 1 else 0
        return [(smem.rows_at(spec, b, head, tile * TILE_KEYS, TILE_KEYS), pl.ds(0, TILE_KEYS))]
    return [((*at, head), rows) for at, rows in static.page_rows(item, tile)]


# --- consumers


def _consume(static: DecodeStatic, number: int) -> None:
    """Consumer warp group: computes every other tile of keys of each item."""
    plg.set_max_registers(CONSUMER_REGISTERS, action="increase")
    scratch, spec = static.scratch, static.spec
    queries = scratch.queries.at[number]
    if number == 0:
        _barrier("arrive", _FREE)

    def run_item(_: jax.Array, item: Item, done: jax.Array) -> jax.Array:
        rows = static.packing.rows_of(spec, item)
        queries[...] = global_rows.load_rows(static.arrays.query, rows.n * spec.Hq + rows.h)
        plg.commit_smem()
        prepared = static.prepare(item, rows, rows.q, first_query(spec, item))
        run = step.DecodeStep(prepared, queries, scratch.ring, item.length)
        first = lax.rem(done + number, jnp.int32(CONSUMERS))  # tile of the item that this consumer computes
        count = lax.div(jnp.maximum(item.tiles - first, 0) + 1, jnp.int32(CONSUMERS))
        tile = lambda j: first + CONSUMERS * j
        state = lax.fori_loop(
            0, count, lambda j, state: run(state, done + tile(j), item.begin + tile(j)), step.start(spec)
        )
        if number == 0:
            _finish(static, item, rows, state)
        else:
            _hand_over(static, state)
        return done + item.tiles

    static.over_items(run_item)
    if number == 1:
        _barrier("sync", _FREE)


def _hand_over(static: DecodeStatic, state: step.DecodeState) -> None:
    """Second consumer: hands its state to the first."""
    scratch, width = static.scratch, merged_columns(static.spec)
    row_sum = jnp.sum(state.row_sum, axis=1)
    for first in range(0, static.spec.Dv, width):
        _barrier("sync", _FREE)
        if first == 0:
            scratch.vectors[0, :] = state.row_max
            scratch.vectors[1, :] = row_sum
        scratch.out[...] = _columns(state.out, first, width)
        _barrier("arrive", _FILLED)


def _finish(static: DecodeStatic, item: Item, rows: DecodeRows, state: step.DecodeState) -> None:
    """First consumer, epilogue: merges the states of both, and stores output and lse."""
    scratch, spec, width = static.scratch, static.spec, merged_columns(static.spec)
    store = functools.partial(static.store, item, rows, lambda line: line + rows.line)
    _barrier("sync", _FILLED)
    other_max, other_sum = (smem.load(scratch.vectors.at[i], ROW) for i in range(2))
    row_max = jnp.maximum(state.row_max, other_max)
    safe_max = finite(row_max)
    alpha, other_alpha = (inline_ptx.exp2(ROW, x - safe_max) for x in (state.row_max, other_max))
    row_sum = jnp.sum(state.row_sum, axis=1) * alpha + other_sum * other_alpha
    lse = None
    for first in range(0, spec.Dv, width):
        if first:
            _barrier("sync", _FILLED)
        sums, other = _columns(state.out, first, width), smem.load(scratch.out, TILE)  # [rows, width]
        _barrier("arrive", _FREE)
        spread = lambda x, shape=sums.shape: over_columns(x, shape)
        out, row_lse = normalized(
            sums * spread(alpha) + other * spread(other_alpha), row_max, row_sum, None, marks=spec.needs_marks
        )
        if lse is None:
            lse = row_lse
        elif spec.needs_marks:
            lse = lse + mark(out)
        store(lambda refs, line, at=first, x=out: global_rows.store_rows(refs[0], line, at, x.astype(refs[0].dtype)))
    assert lse is not None  # there are columns
    store(lambda refs, line: global_rows.store_values(refs[1], line, lse))


def _columns(x: jax.Array, first: int, width: int) -> jax.Array:
    return lax.slice(x, (0, first), (x.shape[0], first + width))


def _barrier(operation: str, number: int) -> None:
    inline_ptx.hardware_barrier(operation, jnp.int32(number), CONSUMERS * WARP_GROUP_THREADS)


ROLES = split_kv.Roles("jflex_decode_sm90", _produce, _consume)
