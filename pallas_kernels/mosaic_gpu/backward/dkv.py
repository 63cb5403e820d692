"""Backward kernel for dK and dV on Hopper, and for the captured arrays that are read by key.

A block of threads owns a tile of keys of one key head. One warp group has the copy engine bring queries, cotangents of
the output, and the statistics of their rows, over the tiles of queries of all query heads that share the keys; two
others hold 64 keys each, and sums for dK and dV in registers. Scores are held transposed, (keys, queries): then P^T and
dS^T are operands of the products as they lie in registers. dQ may be computed on the way: `backward_one_pass`.
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
from pallas_kernels.gradients import Rows
from pallas_kernels.marks import mark, may_hide
from pallas_kernels.mosaic_gpu import bias_tiles, smem
from pallas_kernels.mosaic_gpu.backward.stream import KEY, VALUE, Given, Static, accumulator, give, store_sums
from pallas_kernels.mosaic_gpu.backward.walk import Scratch, State, Walker, declare
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flat_operands, launch
from pallas_kernels.mosaic_gpu.pipeline import COMPUTING, COPYING
from pallas_kernels.mosaic_gpu.tile import TILE
from pallas_kernels.mosaic_gpu.tile_order import Grid
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import Arrays, AttentionSpec

BOTH_SUMS = 128  # head size up to which a warp group holds 64 rows of both sums


class FoundByColumns(NamedTuple):
    """dK and dV for each batch entry; cotangents [B, Hq, S] of ``groups.columns``; dQ, float32 [B, Hq, T, D].

    And marks of keys, float32 [B, Hkv, S]: of those whose dK or dV is not finite, and, with dQ, which are not finite
    themselves. None of what was not computed.
    """

    key: jax.Array | None
    value: jax.Array | None
    columns: list[jax.Array]
    query: jax.Array | None
    marks: jax.Array | None


def dkv(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Arrays,
    rows: Rows,
    derivative: Derivative | None,
    groups: LoadGroups,
    *,
    one_pass: bool = False,
) -> FoundByColumns:
    """Computes dK and dV in the layout of the key; of each batch entry, where the batch shares them.

    With `one_pass` dQ, too, but for the scale of the scores. Head sizes of more than 128 take a launch for each sum.
    """
    static = Static.of(spec, tiles, arrays, derivative, groups)
    if max(spec.D, spec.Dv) <= BOTH_SUMS:
        return _launched(static, arrays, rows, one_pass=one_pass)
    assert not one_pass, "dQ takes registers beside both sums"
    keys, values = (_launched(static.of_sum(name), arrays, rows) for name in (KEY, VALUE))
    marks = None if keys.marks is None or values.marks is None else keys.marks + values.marks
    return keys._replace(value=values.value, marks=marks)


def _launched(static: Static, arrays: Arrays, rows: Rows, *, one_pass: bool = False) -> FoundByColumns:
    spec, tiles, groups = static.spec, static.tiles, static.groups
    columns, row_tiles = pl.cdiv(spec.S, tiles.block_kv), pl.cdiv(spec.T, tiles.block_q)
    per_column = jax.ShapeDtypeStruct((spec.B, spec.Hq, columns * tiles.block_kv), jnp.float32)
    marks = jax.ShapeDtypeStruct((spec.B, spec.Hkv, columns * tiles.block_kv), jnp.float32)
    d_query = None
    if one_pass:
        d_query = jax.new_ref(jnp.zeros((spec.B, spec.Hq, row_tiles * tiles.block_q, spec.D), jnp.float32))
    order, given = blocks.column_order(spec, tiles, arrays), give(rows, tiles.block_q, static.unit)
    like = {KEY: arrays.key, VALUE: arrays.value}
    of_batch = lambda x: jax.ShapeDtypeStruct((spec.B, *x.shape[1:]), x.dtype)
    declared = declare(spec, tiles, arrays.key.dtype, groups, one_pass=one_pass)
    brought = () if declared.stream.elements is None else bias_tiles.planes_of(spec, transposed=True)
    elements = [plane.of(arrays.score_operands) for plane in brought]
    found = launch(
        functools.partial(_kernel, static),
        (flat_operands(arrays), order, given, d_query, elements),
        [
            *(of_batch(like[name]) for name in static.sums),
            *(per_column for _ in groups.columns),
            *([marks] if may_hide(spec) else []),
        ],
        declared,
        name="jflex_backward_sm90" if one_pass else f"jflex_backward_d{''.join(name[0] for name in static.sums)}_sm90",
        blocks=_grid(static).size,
        warp_groups=static.warp_groups + 1,
    )
    query = None if d_query is None else jax.freeze(d_query)[:, :, : spec.T]
    sums = dict(zip(static.sums, found, strict=False))
    by_column = [x[..., : spec.S] for x in found[len(sums) :]]
    marked = by_column.pop() if may_hide(spec) else None
    return FoundByColumns(sums.get(KEY), sums.get(VALUE), by_column, query, marked)


def _grid(static: Static) -> Grid:
    return Grid(static.spec.B, static.spec.Hkv, pl.cdiv(static.spec.S, static.tiles.block_kv))


def _kernel(static: Static, number: Any, inputs: Any, outputs: Any, scratch: Scratch) -> None:
    arrays, order, given, d_query, refs = inputs
    b, kv_h, nth = _grid(static).place(number)
    here = (b, kv_h, blocks.column_at(static.spec, order, b, kv_h, nth))
    group = lax.axis_index(WARP_GROUP)
    compute = functools.partial(_compute, static, arrays, here, (*outputs, d_query), scratch, group)
    pl.when(group == static.warp_groups)(lambda: _copy(static, arrays, given, refs, here, scratch))
    pl.when(group < static.warp_groups)(compute)


def _copy(static: Static, arrays: Arrays, given: Given, refs: Any, here: Any, scratch: Scratch) -> None:
    """The warp group that brings tiles of queries."""
    plg.set_max_registers(COPYING, action="decrease")
    b, k_first = here[0], here[2] * static.tiles.block_kv
    brought = static.elements(arrays, refs, transposed=True)

    def one_head(h: Any, count: Any) -> Any:
        elements_at = brought.of_head(b, h)

        def step(count: Any, first: Any, _: bool) -> Any:
            scratch.stream.fill(static.spec, count, arrays, given, (b, h, first), elements_at(first, k_first))
            return count + 1

        return blocks.over_queries(static.spec, static.tiles, arrays, (b, h, here[2]), count, step)

    _over_heads(static.spec, here[1], jnp.int32(0), one_head)


def _over_heads(spec: AttentionSpec, kv_h: Any, state: Any, one_head: Any) -> Any:
    """Folds over the query heads that share a key head."""
    if spec.group == 1:
        return one_head(kv_h, state)
    return lax.fori_loop(0, spec.group, lambda i, state: one_head(kv_h * spec.group + i, state), state)


def _compute(static: Static, arrays: Arrays, here: Any, outputs: Any, scratch: Scratch, group: Any) -> None:
    """A warp group that computes."""
    plg.set_max_registers(COMPUTING, action="increase")
    spec, rows = static.spec, static.tiles.block_kv // static.warp_groups
    b, kv_h, column = here
    own, columns, d_query = outputs[: len(static.sums)], outputs[len(static.sums) : -1], outputs[-1]
    first = column * static.tiles.block_kv + group * rows
    _load_own(static, arrays, (b, kv_h, column), scratch, group)
    # Of dQ no row is at hand in the epilogue: a key that is not finite is marked itself.
    marks = mark(_tile(scratch.keys.at[group])) if may_hide(spec) and scratch.d_query is not None else None

    def walk(*accumulators: Any) -> tuple[jax.Array, ...]:
        sums = dict(zip(static.sums, accumulators, strict=True))
        walker = Walker(static, scratch, group, b, first, sums, d_query)
        state = walker.begin(kv_h)

        def one_head(h: Any, state: State) -> State:
            step, sums = walker.step(arrays, h), walker.zero_sums()
            state, sums = blocks.over_queries(spec, static.tiles, arrays, (b, h, column), (state, sums), step)
            for ref, x in zip(columns, sums, strict=False):
                store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
            return state

        walker.end(_over_heads(spec, kv_h, state, one_head))
        return tuple(ref[...] * spec.scale if name == KEY else ref[...] for name, ref in sums.items())

    sizes = {KEY: spec.D, VALUE: spec.Dv}
    found: Any = pl.run_scoped(walk, *(accumulator(rows, sizes[name]) for name in static.sums))
    if may_hide(spec):
        marks = mark(*found) if marks is None else marks + mark(*found)
        store_sums(scratch.sums.at[group], columns[-1].at[b, kv_h, pl.ds(first, rows)], marks)
    staged = {KEY: scratch.keys, VALUE: scratch.values}
    places = [staged[name].at[group] for name in static.sums]
    _store(scratch, found, places, own, smem.rows_at(spec, b, kv_h, first, rows))


def _tile(ref: Any) -> jax.Array:
    """Loads rows from shared memory."""
    load: Any = plg.load  # jax < 0.11: wants an index
    return load(ref, layout=TILE)


def _load_own(static: Static, arrays: Arrays, here: Any, scratch: Scratch, group: Any) -> None:
    """Loads keys and values: of this group, and for dQ the keys of all."""
    spec, groups = static.spec, static.warp_groups
    b, kv_h, column = here
    rows = static.tiles.block_kv // groups
    first = column * static.tiles.block_kv + group * rows
    at = smem.rows_at(spec, b if spec.Bkv > 1 else 0, kv_h, first, rows)
    for source, ref in zip((arrays.key, arrays.value), (scratch.keys, scratch.values), strict=True):
        plg.copy_gmem_to_smem(source.at[at], ref.at[group], scratch.filled.at[group])
    for other in (group,) if scratch.d_query is None else range(groups):
        plg.barrier_wait(scratch.filled.at[other])


def _store(scratch: Scratch, found: Any, staged: Any, outputs: Any, at: Any) -> None:
    """Writes sums through shared memory: the copy engine drops what lies past the end."""
    if scratch.d_query is not None:
        scratch.d_query.finish()  # all groups have read the keys
    for ref, x in zip(staged, found, strict=True):
        ref[...] = x.astype(ref.dtype)
    plg.commit_smem()
    for ref, out in zip(staged, outputs, strict=True):
        plg.copy_smem_to_gmem(ref, out.at[at])
    plg.wait_smem_to_gmem(0, wait_read_only=True)
