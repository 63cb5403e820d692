"""Backward kernel for dK and dV on Hopper, and for the captured arrays that are read by key.

A CTA owns a tile of keys of one key head. The producer warp group loads tiles of queries, dO and row statistics by TMA,
of all query heads that share the keys. Two consumer warp groups own 64 keys each, with their dK and dV accumulators in
registers. Scores are transposed, (keys, queries): then P^T and dS^T are the A operands of the dV and dK GEMMs straight
from registers. One pass may compute dQ too: `one_pass`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Rows
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.backward.stream import (
    KEY,
    VALUE,
    RowStats,
    Static,
    accumulator,
    pack_row_stats,
    store_sums,
)
from pallas_kernels.mosaic_gpu.backward.walk import Scratch, State, Walker, declare
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flatten_captured, launch
from pallas_kernels.mosaic_gpu.pipeline import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import TILE
from pallas_kernels.mosaic_gpu.tile_order import Grid
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Accumulator, Axis, Index, Location, Ref, S

MAX_HEAD_SIZE_BOTH_SUMS = 128  # up to which a warp group holds 64 rows of both accumulators


class DkvOutputs(NamedTuple):
    """dK and dV for each batch entry; cotangents [B, Hq, S] of ``groups.columns``; dQ, float32 [B, Hq, T, D].

    And marks of keys, float32 [B, Hkv, S]: of those whose dK or dV is not finite, and, with dQ, which are not finite
    themselves. What was not computed is None.
    """

    key: jax.Array | None
    value: jax.Array | None
    columns: list[jax.Array]
    query: jax.Array | None
    marks: jax.Array | None


def dkv(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[jax.Array],
    rows: Rows[jax.Array],
    derivative: Derivative | None,
    groups: LoadGroups,
    *,
    one_pass: bool = False,
) -> DkvOutputs:
    """Computes dK and dV in the layout of the key; of each batch entry, where the batch shares them.

    With `one_pass` dQ, too, without the scale of the scores. Head sizes of more than 128 take a launch for dK and one
    for dV.

    Args:
      spec: The spec, with padded head sizes.
      tiles: Of the kernel: 64 keys for each consumer warp group.
      arrays: The operands of the forward pass, padded.
      rows: dO [B, T, Hq, Dv] or [B, Hq, T, Dv]; lse and delta [B, Hq, T].
      derivative: Of the score mod; None without one.
      groups: Loads of captured arrays with requested gradients.
      one_pass: Whether to compute dQ too, which is not deterministic.
    """
    static = Static.of(spec, tiles, arrays, derivative, groups)
    if max(spec.D, spec.Dv) <= MAX_HEAD_SIZE_BOTH_SUMS:
        return _launched(static, arrays, rows, one_pass=one_pass)
    assert not one_pass, "dQ needs registers beside both accumulators"
    keys, values = (_launched(static.of_sum(name), arrays, rows) for name in (KEY, VALUE))
    marks = None if keys.marks is None or values.marks is None else keys.marks + values.marks
    return keys._replace(value=values.value, marks=marks)


def _launched(
    static: Static, arrays: Operands[jax.Array], rows: Rows[jax.Array], *, one_pass: bool = False
) -> DkvOutputs:
    spec, tiles, groups = static.spec, static.tiles, static.groups
    columns, row_tiles = pl.cdiv(spec.S, tiles.block_kv), pl.cdiv(spec.T, tiles.block_q)
    per_column = jax.ShapeDtypeStruct((spec.B, spec.Hq, columns * tiles.block_kv), jnp.float32)
    marks = jax.ShapeDtypeStruct((spec.B, spec.Hkv, columns * tiles.block_kv), jnp.float32)
    d_query = None
    if one_pass:
        d_query = jax.new_ref(jnp.zeros((spec.B, spec.Hq, row_tiles * tiles.block_q, spec.D), jnp.float32))
    order = block_walk.column_order(spec, tiles, arrays)
    row_stats = pack_row_stats(rows, tiles.block_q, static.lse_scale)
    like = {KEY: arrays.key, VALUE: arrays.value}
    of_batch = lambda x: jax.ShapeDtypeStruct((spec.B, *x.shape[1:]), x.dtype)
    declared = declare(spec, tiles, arrays.key.dtype, groups, one_pass=one_pass)
    loads = () if declared.stream.bias is None else bias_tiles.bias_loads(spec, transposed=True)
    bias = [load.of(arrays.captured.score) for load in loads]
    outs = launch(
        functools.partial(_kernel, static),
        (flatten_captured(arrays), order, row_stats, d_query, bias),
        [
            *(of_batch(like[name]) for name in static.sums),
            *(per_column for _ in groups.columns),
            *([marks] if spec.needs_marks else []),
        ],
        declared,
        name="jflex_backward_sm90" if one_pass else f"jflex_backward_d{''.join(name[0] for name in static.sums)}_sm90",
        num_ctas=_grid(static).size,
        warp_groups=static.warp_groups + 1,
    )
    query = None if d_query is None else jax.freeze(d_query)[:, :, : spec.T]
    sums = dict(zip(static.sums, outs, strict=False))
    by_column = [x[..., : spec.S] for x in outs[len(sums) :]]
    marked = by_column.pop() if spec.needs_marks else None
    return DkvOutputs(sums.get(KEY), sums.get(VALUE), by_column, query, marked)


def _grid(static: Static) -> Grid:
    return Grid(static.spec.B, static.spec.Hkv, pl.cdiv(static.spec.S, static.tiles.block_kv))


def _kernel(
    static: Static,
    cta_id: Index,
    inputs: tuple[
        Operands[Ref], Ref | None, RowStats[Ref], Ref | None, list[Ref]
    ],  # operands, tile order, `RowStats`, dQ float32 [B, Hq, rounded up T, D] or None, sources of bias tiles
    outputs: tuple[
        Ref, ...
    ],  # dK and dV like key and value, [B, Hq, rounded up S] for each of `groups.columns`, marks likewise
    scratch: Scratch,
) -> None:
    arrays, order, row_stats, d_query, refs = inputs
    b, kv_h, tile = _grid(static).unravel(cta_id)
    location = (b, kv_h, block_walk.column_at(static.spec, order, b, kv_h, tile))
    group = lax.axis_index(WARP_GROUP)
    compute = functools.partial(_consume, static, arrays, location, (outputs, d_query), scratch, group)
    pl.when(group == static.warp_groups)(lambda: _produce(static, arrays, row_stats, refs, location, scratch))
    pl.when(group < static.warp_groups)(compute)


def _produce(
    static: Static,
    arrays: Operands[Ref],
    row_stats: RowStats[Ref],
    refs: list[Ref],
    location: Location,
    scratch: Scratch,
) -> None:
    """Producer warp group: loads tiles of queries, dO, row statistics and bias tiles by TMA."""
    plg.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    b, k_first = location[0], location[2] * static.tiles.block_kv
    loads = static.bias(arrays, refs, transposed=True)

    def one_head(h: jax.Array, i: Index) -> Index:
        bias_at = loads.of_head(b, h)

        def step(i: Index, first: Index, _: bool) -> Index:
            scratch.stream.fill(static.spec, i, arrays, row_stats, (b, h, first), bias_at(first, k_first))
            return i + 1

        return block_walk.over_queries(static.spec, static.tiles, arrays, (b, h, location[2]), i, step)

    _over_heads(static.spec, location[1], jnp.int32(0), one_head)


def _over_heads(spec: AttentionSpec, kv_h: jax.Array, state: S, one_head: Callable[[jax.Array, S], S]) -> S:
    """Folds over the query heads that share a key head."""
    if spec.group == 1:
        return one_head(kv_h, state)
    return lax.fori_loop(0, spec.group, lambda i, state: one_head(kv_h * spec.group + i, state), state)


def _consume(
    static: Static,
    arrays: Operands[Ref],
    location: Location,
    outputs: tuple[tuple[Ref, ...], Ref | None],
    scratch: Scratch,
    group: jax.Array,
) -> None:
    """Consumer warp group: prologue, mainloop over tiles of queries, and epilogue of its 64 keys."""
    plg.set_max_registers(CONSUMER_REGISTERS, action="increase")
    spec, rows = static.spec, static.tiles.block_kv // static.warp_groups
    b, kv_h, column = location
    (refs, d_query), count = outputs, len(static.sums)
    own, columns = refs[:count], refs[count:]
    first = column * static.tiles.block_kv + group * rows
    _load_own(static, arrays, (b, kv_h, column), scratch, group)
    # No row of dQ is available in the epilogue: so a key that is not finite is itself marked.
    marks = mark(_tile(scratch.keys.at[group])) if spec.needs_marks and scratch.d_query is not None else None

    def walk(*accumulators: Accumulator) -> tuple[jax.Array, ...]:
        sums = dict(zip(static.sums, accumulators, strict=True))
        walker = Walker(static, scratch, group, b, first, sums, d_query)
        state = walker.begin(kv_h)

        def one_head(h: jax.Array, state: State) -> State:
            step, sums = walker.step(arrays, h), walker.zero_sums()
            state, sums = block_walk.over_queries(spec, static.tiles, arrays, (b, h, column), (state, sums), step)
            for ref, x in zip(columns, sums, strict=False):
                assert scratch.sums is not None  # to stage it
                store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
            return state

        walker.end(_over_heads(spec, kv_h, state, one_head))
        scales = {KEY: spec.scale, VALUE: spec.kept_scale}
        return tuple(ref[...] if scales[name] == 1.0 else ref[...] * scales[name] for name, ref in sums.items())

    sizes = {KEY: spec.D, VALUE: spec.Dv}
    outs: Any = pl.run_scoped(walk, *(accumulator(rows, sizes[name]) for name in static.sums))
    if spec.needs_marks:
        marks = mark(*outs) if marks is None else marks + mark(*outs)
        assert scratch.sums is not None
        store_sums(scratch.sums.at[group], columns[-1].at[b, kv_h, pl.ds(first, rows)], marks)
    staged = {KEY: scratch.keys, VALUE: scratch.values}
    targets = [staged[name].at[group] for name in static.sums]
    _store(scratch, outs, targets, own, smem.rows_at(spec, b, kv_h, first, rows))


def _tile(ref: Ref) -> jax.Array:
    """Loads rows from shared memory."""
    load: Any = plg.load  # jax < 0.11: wants an index
    return load(ref, layout=TILE)


def _load_own(static: Static, arrays: Operands[Ref], location: Location, scratch: Scratch, group: jax.Array) -> None:
    """Loads the keys and values of this group by TMA; for dQ, also waits for the keys of the others."""
    spec, groups = static.spec, static.warp_groups
    b, kv_h, column = location
    rows = static.tiles.block_kv // groups
    first = column * static.tiles.block_kv + group * rows
    at = smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_h, first, rows)
    for source, ref in zip((arrays.key, arrays.value), (scratch.keys, scratch.values), strict=True):
        plg.copy_gmem_to_smem(source.at[at], ref.at[group], scratch.full.at[group])
    for other in (group,) if scratch.d_query is None else range(groups):
        plg.barrier_wait(scratch.full.at[other])


def _store(
    scratch: Scratch, outs: Sequence[jax.Array], staged: Sequence[Ref], outputs: Sequence[Ref], at: tuple[Axis, ...]
) -> None:
    """Epilogue: stages dK and dV in shared memory, and stores them by TMA, which drops what is past the end."""
    if scratch.d_query is not None:
        scratch.d_query.join()  # all groups have read the keys
    for ref, x in zip(staged, outs, strict=True):
        ref[...] = x.astype(ref.dtype)
    plg.commit_smem()
    for ref, out in zip(staged, outputs, strict=True):
        plg.copy_smem_to_gmem(ref, out.at[at])
    plg.wait_smem_to_gmem(0, wait_read_only=True)
