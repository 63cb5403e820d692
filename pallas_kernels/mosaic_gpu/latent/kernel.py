"""Latent attention (MLA) over pages for Hopper: two consumer warp groups, each with half of the output columns.

An output of 64 rows and 512 columns fills the registers of two warp groups. So both compute PV of every tile of keys,
each with half of the columns, and QK^T of every other tile: warp group 0 of the even ones, 1 of the odd ones. Weights
and the running row_max go from one to the other through shared memory (`step`). It is the division of work of
FlashMLA's kernel for Hopper (DeepSeek-AI 2025, github.com/deepseek-ai/FlashMLA).

The rows of a tile are the query heads of a query, of several queries where heads are few. The values are the first
columns of the keys: both GEMMs read one tile of shared memory. A producer warp group looks up pages and loads them by
TMA, in two parts that are released apart. Persistent CTAs take work items (a tile of queries, one split of its keys)
in order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import global_rows, smem, split_kv
from pallas_kernels.mosaic_gpu.latent import step
from pallas_kernels.mosaic_gpu.latent.sizes import BUFFERS, Heads, LatentRows
from pallas_kernels.mosaic_gpu.smem import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from pallas_kernels.mosaic_gpu.split_kv import CONSUMERS, SplitKvInputs
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, Item, PageRows, pieces_of_tile
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Axis, Ref

PAIRS_PREFETCHED = 1  # of tiles of keys, into the L2 cache, before the pair that is loaded


class LatentScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    queries: Ref  # [2, 64, Dv / 2], the halves of the latent columns
    query_ropes: Ref  # [1, 64, D - Dv]
    queries_full: Ref  # the queries have arrived
    queries_empty: Ref  # both consumers are done with them
    buffers: step.Buffers  # the tiles of keys


def declare(spec: AttentionSpec, heads: Heads, dtype: DTypeLike) -> LatentScratch:
    """The scratch of a CTA."""
    half, rope = spec.Dv // 2, spec.D - spec.Dv
    swizzle = smem.swizzle_of(math.gcd(half, rope), jnp.dtype(dtype).itemsize)
    tiled = functools.partial(smem.tiled, dtype=dtype, swizzle=swizzle)
    barrier = lambda arrivals, count: smem.declared(plg.Barrier(num_arrivals=arrivals, num_barriers=count))
    pieces, vectors = pieces_of_tile(spec), smem.declared
    ropes = tiled((BUFFERS, TILE_KEYS, rope))
    buffers = step.Buffers(
        latents=tiled((BUFFERS, 2, TILE_KEYS, half)),
        ropes=ropes,
        weights=None if rope == TILE_KEYS else tiled((BUFFERS, smem.WARP_GROUP_ROWS, TILE_KEYS)),
        row_max=vectors(plg.SMEM((BUFFERS, smem.WARP_GROUP_ROWS), jnp.float32)),
        row_sum=vectors(plg.SMEM((2 * CONSUMERS, smem.WARP_GROUP_ROWS), jnp.float32)),
        marks=vectors(plg.SMEM((2 * CONSUMERS, smem.WARP_GROUP_ROWS), jnp.float32)),
        near_full=barrier(pieces, BUFFERS),
        far_full=barrier(2 * pieces, BUFFERS),
        near_empty=barrier(1, BUFFERS),
        far_empty=barrier(1, BUFFERS),
    )
    rows = smem.WARP_GROUP_ROWS
    return LatentScratch(
        tiled((2, rows, half)), tiled((1, rows, rope)), barrier(3 * heads.queries, 1), barrier(CONSUMERS, 1), buffers
    )


def attend(spec: AttentionSpec, heads: Heads, slots: int, arrays: SplitKvInputs[jax.Array]) -> list[jax.Array]:
    """Runs `split_kv.attend`; the first rows of a partial result are the heads of the group of the first query."""
    rows = arrays.key.reshape(*arrays.key.shape[:2], -1)  # the latent cache [pages of all layers, page_size, D]
    arrays = arrays._replace(query=heads.padded(arrays.query), key=rows, value=None)
    return split_kv.attend(ROLES, spec, heads, slots, arrays, declare(spec, heads, arrays.query.dtype))


LatentStatic: TypeAlias = split_kv.Static[Heads, LatentScratch]


# --- producer


def _produce(static: LatentStatic) -> None:
    """Producer warp group: loads queries and tiles of keys by TMA."""
    plg.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    scratch, heads = static.scratch, static.packing

    def run_item(i: jax.Array, item: Item, pair: jax.Array) -> jax.Array:
        pl.when(i > 0)(lambda: plg.barrier_wait(scratch.queries_empty.at[0]))
        lax.fori_loop(0, heads.queries, functools.partial(_load_query, static, item), jnp.int32(0))
        return lax.fori_loop(0, item.pairs, functools.partial(_load_pair, static, item), pair)

    static.over_items(run_item)


def _load_query(static: LatentStatic, item: Item, t: jax.Array, carry: jax.Array) -> jax.Array:
    """Loads a query of the tile."""
    scratch, count = static.scratch, static.packing.padded_count
    n = jnp.minimum(item.first + t, static.spec.T - 1)
    at, rows = (n, pl.ds(item.group * count, count)), pl.ds(t * count, count)
    targets = [scratch.queries.at[0, rows], scratch.queries.at[1, rows], scratch.query_ropes.at[0, rows]]
    for target, columns in zip(targets, _columns(static.spec), strict=True):
        plg.copy_gmem_to_smem(static.arrays.query.at[(*at, columns)], target, scratch.queries_full.at[0])
    return carry


def _columns(spec: AttentionSpec) -> tuple[Axis, Axis, Axis]:
    """Columns of a row: the halves of the latent ones, and the rotated ones."""
    half = spec.Dv // 2
    return pl.ds(0, half), pl.ds(half, half), pl.ds(2 * half, spec.D - 2 * half)


def _load_pair(static: LatentStatic, item: Item, j: jax.Array, pair: jax.Array) -> jax.Array:
    """Loads a pair of tiles into the two buffers; of a pair that has but one tile, the second is left as it is."""
    buffers, columns = static.scratch.buffers, _columns(static.spec)
    # Not for CTAs that each read keys of their own: 128 sequences of 4096 keys, 16 heads, took 307 us with the prefetch
    # and 220 without, in turn 216 (H100, jax 0.11.2).
    if not static.packing.read_keys_once(static.spec):
        for b in range(BUFFERS):
            ahead = item.begin + 2 * (j + PAIRS_PREFETCHED) + b
            pl.when(ahead < item.end)(functools.partial(_prefetch, static, item, ahead))
    for b in range(BUFFERS):
        tile = item.begin + 2 * j + b
        pages = static.page_rows(item, jnp.minimum(tile, item.end - 1))
        latents = lambda which, b=b: (buffers.latents.at[b, which], columns[which])
        near, far = [latents(b)], [latents(1 - b), (buffers.ropes.at[b], columns[2])]
        for full, empty, targets in (
            (buffers.near_full, buffers.near_empty, near),
            (buffers.far_full, buffers.far_empty, far),
        ):
            pl.when(pair > 0)(functools.partial(plg.barrier_wait, empty.at[b]))
            load = functools.partial(_load_part, static.arrays.key, pages, targets, full.at[b])
            if b == 0:
                load()
            else:
                pl.when(tile < item.end)(load)
                pl.when(tile >= item.end)(functools.partial(_arrive, full.at[b], len(targets) * len(pages)))
    return pair + 1


def _prefetch(static: LatentStatic, item: Item, tile: jax.Array) -> None:
    """Loads a tile into the L2 cache."""
    for columns in _columns(static.spec):
        for at, _ in static.page_rows(item, tile):
            plg.async_prefetch(static.arrays.key.at[(*at, columns)])


def _load_part(rows: Ref, pages: Sequence[PageRows], targets: Sequence[tuple[Ref, Axis]], full: Ref) -> None:
    for target, columns in targets:
        for at, of_tile in pages:
            plg.copy_gmem_to_smem(rows.at[(*at, columns)], target.at[of_tile], full)


def _arrive(barrier: Ref, count: int) -> None:
    for _ in range(count):
        plg.barrier_arrive(barrier)


# --- consumers


def _consume(static: LatentStatic, group: int) -> None:
    """Consumer warp group: computes its half of the columns of each item."""
    plg.set_max_registers(CONSUMER_REGISTERS, action="increase")
    scratch, heads, spec = static.scratch, static.packing, static.spec

    def run_item(i: jax.Array, item: Item, pair: jax.Array) -> jax.Array:
        rows = heads.rows_of(item.group, item.first, item.queries, spec)
        prepared = static.prepare(item, rows, rows.n, item.first)
        plg.barrier_wait(scratch.queries_full.at[0])
        in_turn = heads.read_keys_once(spec)
        run = step.LatentStep(
            prepared, scratch.queries, scratch.query_ropes, scratch.buffers, group, item.length, item.end, in_turn
        )
        state = run(item.begin, item.pairs)
        plg.barrier_arrive(scratch.queries_empty.at[0])
        out, lse = run.finish(state, lax.rem(i, jnp.int32(2)))
        _store(static, item, rows, group, out, lse)
        return pair + item.pairs

    static.over_items(run_item)


def _store(static: LatentStatic, item: Item, rows: LatentRows, group: int, out: jax.Array, lse: jax.Array) -> None:
    """Stores this half of the columns, and from group 0 the lse, to the result or to the partial results."""
    column = group * (static.spec.Dv // 2)

    def write(refs: tuple[Ref, ...], line: jax.Array) -> None:
        global_rows.store_rows(refs[0], line, column, out.astype(refs[0].dtype))
        if group == 0:
            global_rows.store_values(refs[1], line, lse)

    static.store(item, rows, lambda first: first + rows.t * static.packing.count + rows.head, write)


ROLES = split_kv.Roles("jflex_latent_sm90", _produce, _consume)
