"""Backward kernel for dK and dV on Hopper, and for the captured arrays that are read by key.

A CTA owns a tile of keys of one key head. The producer warp group loads tiles of queries, dO and row statistics by TMA,
of all query heads that share the keys. Two consumer warp groups own 64 keys each, with their dK and dV accumulators in
registers. Scores are transposed, (keys, queries): then P^T and dS^T are the A operands of the dV and dK GEMMs straight
from registers. One pass may compute dQ too: `one_pass`. Persistent CTAs took 8050 us for 7607 (H200, causal, S 16384).

Above head size 128 registers hold both accumulators in one pass alone, up to a limit (`plan`). Else the groups share 64
keys: one computes S^T and dV, the other dP^T and dK, with S^T through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.gradients import RowOperands
from pallas_kernels.mosaic_gpu import global_rows, register_order, smem
from pallas_kernels.mosaic_gpu.backward.one_pass import sums_shape
from pallas_kernels.mosaic_gpu.backward.stream import KEY, VALUE, BackwardStatic, RowStats, pack_row_stats, store_sums
from pallas_kernels.mosaic_gpu.backward.walk import Carried, DkvScratch, KeyTile, declare
from pallas_kernels.mosaic_gpu.launch import NUM_SMS, Grid, flatten_captured, launch, output, run_roles
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE, accumulator, row_vector
from pallas_kernels.softmax import mark
from pallas_kernels.spec import Operands
from pallas_kernels.types import A, Accumulator, Index, Location, Ref, S

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
        ),
        DkvOutputs(
            per_entry(arrays.key),
            per_entry(arrays.value),
            [per_column(spec.Hq) for _ in groups.columns],
            [per_column(spec.Hkv)] * (spec.needs_marks * (1 + static.shares_keys)),
        ),
        scratch,
        name="jflex_backward_sm90" if one_pass else "jflex_backward_dkv_sm90",
        num_ctas=_grid(static).size,
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
    b, kv_h, tile = _grid(static).unravel(cta_id)
    location = (b, kv_h, block_walk.column_at(static.spec, inputs.order, b, kv_h, tile))

    def produce() -> None:
        _produce(static, inputs, location, scratch)
        if static.spec.block_size is not None:
            _prefetch(static, inputs, cta_id + NUM_SMS)

    def consume(group: jax.Array) -> None:
        if not static.shares_keys:
            _consume(static, inputs, location, outputs, scratch, group)
            return
        for i, role in enumerate(map(static.for_sum, (VALUE, KEY))):
            pl.when(group == i)(functools.partial(_consume, role, inputs, location, outputs, scratch, group))

    run_roles(static.warp_groups, produce, consume)


def _produce(static: BackwardStatic, inputs: DkvInputs[Ref], location: Location, scratch: DkvScratch) -> None:
    """Producer warp group: loads tiles of queries, dO, row statistics and bias tiles by TMA."""
    b, k_first = location[0], location[2] * static.tiles.block_kv
    bias = static.bias(inputs.arrays, inputs.bias, transposed=True)

    def step(i: Index, h: jax.Array, first: Index, _: bool) -> Index:
        sources = bias.sources_of_head(b, h)(first, k_first)
        scratch.stream.fill(static.spec, i, inputs.arrays, inputs.row_stats, (b, h, first), sources)
        return i + 1

    _over_queries(static, inputs.arrays, location, jnp.int32(0), lambda _: step)


def _prefetch(static: BackwardStatic, inputs: DkvInputs[Ref], cta_id: Index) -> None:
    """Prefetches the keys and values of a later CTA, at most the last, into L2.

    A CTA that reads its tile from lists loads them late. H200, jax 0.11.2, bf16, S 16384, 16 heads, kernel, us, without
    and with: documents, D 64 1418 and 1384, D 128 1053 and 1045; a window of 1024, D 64 1477 and 1495.
    """
    grid, spec, rows = _grid(static), static.spec, static.tiles.block_kv
    b, kv_h, tile = grid.unravel(jnp.minimum(cta_id, grid.size - 1))
    first = block_walk.column_at(spec, inputs.order, b, kv_h, tile) * rows
    for source in (inputs.arrays.key, inputs.arrays.value):
        plg.async_prefetch(source.at[smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_h, first, rows)])


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
    walk = lambda h, state, step: block_walk.over_queries(
        spec, static.tiles, arrays, (b, h, column), state, step, descending=True
    )
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


def _walks_heads_inside(static: BackwardStatic) -> bool:
    """True if each tile of queries is walked for all heads of a group before the next tile.

    This takes heads that are alike but for their operands. It pays where a mask has limits (documents): few CTAs share
    a tile of queries, and meet at it while it is in the L2 cache, with tiles of keys in ascending order and one wave of
    concurrent heads. H200, jax 0.11.2, bf16, D 128, backward, us: one head after the other, all heads of a group, and
    in addition ascending order, and one wave: documents of a corpus, B 1, S 32768, 64 heads on 8, 10687, 9988, 9674,
    9636; 12 documents, B 2, S 8192, 32 heads on 8, 978, 1030, 956, 944; a causal mask 4243, 4346, 4386, 4392.
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
) -> None:
    """Consumer warp group: prologue, mainloop over tiles of queries, and epilogue of its 64 keys."""
    spec, arrays, rows = static.spec, inputs.arrays, smem.WARP_GROUP_ROWS
    b, kv_h, column = location
    tile = jnp.int32(0) if static.shares_keys else group
    first = column * static.tiles.block_kv + tile * rows
    at = smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_h, first, rows)
    operands = {VALUE: (arrays.key, scratch.keys), KEY: (arrays.value, scratch.values)}  # by the sum beside their GEMM
    for source, ref in map(operands.__getitem__, static.sums):
        plg.copy_gmem_to_smem(source.at[at], ref.at[tile], scratch.full.at[group])
    columns = outputs.columns if KEY in static.sums else []

    def walk(*accumulators: Accumulator) -> tuple[jax.Array, ...]:
        sums = dict(zip(static.sums, accumulators, strict=True))
        key_tile = KeyTile(static, scratch, tile, b, first, sums, inputs.d_query)

        def wait_for_keys() -> None:
            for other in (group,) if scratch.d_query is None else range(static.warp_groups):  # dQ takes the keys of all
                plg.barrier_wait(scratch.full.at[other])

        def step_of(h: jax.Array) -> Callable[[Carried, jax.Array, Index, bool], Carried]:
            """The step of a head; keys and values arrive while limits of the mask do, and while dS is set to zero.

            H200, jax 0.11.2, bf16, S 16384, 16 heads, kernel, us, with this wait before and here: D 64, a window of
            1024 1521 and 1481, documents 1456 and 1425; D 128, here with dV stored first, no mask 18278 and 17150,
            causal 7817 and 8122.
            """
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
        state, _ = _over_queries(static, arrays, location, (key_tile.begin(kv_h), zeros), step_of, end)
        key_tile.end(state)
        scales = {KEY: spec.scale, VALUE: spec.kept_scale}
        return tuple(ref[...] if scales[name] == 1.0 else ref[...] * scales[name] for name, ref in sums.items())

    sizes = {KEY: spec.D, VALUE: spec.Dv}
    sums: Any = pl.run_scoped(walk, *(accumulator(rows, sizes[name]) for name in static.sums))  # dK, dV
    _store(static, location, outputs, scratch, group, dict(zip(static.sums, sums, strict=True)))


def _store(
    static: BackwardStatic,
    location: Location,
    outputs: DkvOutputs[Ref],
    scratch: DkvScratch,
    group: jax.Array,
    sums: dict[str, jax.Array],
) -> None:
    """Stores marks, dV and dK by TMA, which drops rows past the end; dV is staged over the values, dK over the keys.

    Only the dQ GEMM reads keys of the other group, so that dV does not wait for it. With marks from registers, and this
    order: documents, D 64, kernel, us, 1465 and 1446 (H200, jax 0.11.2, bf16, S 16384, 16 heads).
    """
    spec, rows, (b, kv_h, column) = static.spec, smem.WARP_GROUP_ROWS, location
    tile = jnp.int32(0) if static.shares_keys else group
    first = column * static.tiles.block_kv + tile * rows
    if outputs.marks:
        marks = mark(*sums.values())
        if scratch.d_query is not None:  # no row of dQ is available: so a key that is not finite is itself marked
            marks += mark(smem.load(scratch.keys.at[tile], TILE))
        out = outputs.marks[-1 if static.sums == (KEY,) else 0]
        row = first + plg.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)
        global_rows.store_values(out, (b * spec.Hkv + kv_h) * out.shape[2] + row, marks)
    targets = {KEY: (scratch.keys, outputs.key), VALUE: (scratch.values, outputs.value)}
    for name, x in reversed(sums.items()):  # dV first
        for shared in (scratch.d_query if name == KEY else None, scratch.scores):
            if shared is not None:
                shared.join()  # all groups have read the keys and values
        staged, target = targets[name][0].at[tile], targets[name][1]
        staged[...] = x.astype(staged.dtype)
        plg.commit_smem()
        plg.copy_smem_to_gmem(staged, target.at[smem.rows_at(spec, b, kv_h, first, rows)])
    plg.wait_smem_to_gmem(0, wait_read_only=True)
