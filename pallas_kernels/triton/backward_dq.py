"""Backward kernel for dQ, and for the captured arrays that are read by query, by element or not by index at all.

One program computes a tile of queries of one head, over the tiles of keys that the forward kernel visits. The grid is
(tiles of queries, query heads, batch).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.ref import addupdate

from pallas_kernels import blocks
from pallas_kernels.cotangents import LoadGroups
from pallas_kernels.gradients import Rows, shift_of, through_mod
from pallas_kernels.mods import Derivative
from pallas_kernels.score_tile import ScoreTile
from pallas_kernels.setting import Arrays, Setting, Tiles
from pallas_kernels.triton import scores
from pallas_kernels.triton.columns import (
    inner,
    load_keys,
    load_queries,
    load_vector,
    plus,
    store_rows,
    store_vector,
    times,
    zero_rows,
)
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.tile import weights


class FoundByRows(NamedTuple):
    """dQ; cotangents [B, Hq, T] of ``groups.rows``; gradients of what ``groups.stores`` and ``.atomics`` read."""

    query: jax.Array
    rows: list[jax.Array]
    tiles: list[jax.Array]


def dq(
    setting: Setting, tiles: Tiles, arrays: Arrays, rows: Rows, derivative: Derivative | None, groups: LoadGroups
) -> FoundByRows:
    """Computes dQ, in the layout and dtype of the query, and cotangents of loads."""
    operands = arrays.score_operands
    zeros = [jnp.zeros(operands[n.value].shape or (1,), operands[n.value].dtype) for n in groups.stores]
    zeros += [jnp.zeros(operands[n.value].shape, jnp.float32) for n in groups.atomics]
    inputs = (arrays, blocks.row_order(setting, tiles, arrays), rows, zeros)
    per_row = jax.ShapeDtypeStruct((setting.B, setting.Hq, setting.T), jnp.float32)
    outputs = [
        jax.ShapeDtypeStruct(arrays.query.shape, arrays.query.dtype),
        *(per_row for _ in groups.rows),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in zeros),
    ]
    before = len(jax.tree.leaves(inputs[:3]))
    aliases = {before + i: 1 + len(groups.rows) + i for i in range(len(zeros))}
    found = launch(
        functools.partial(_kernel, setting, tiles, derivative, groups),
        inputs,
        outputs,
        name="jflex_backward_dq",
        grid=(pl.cdiv(setting.T, tiles.block_q), setting.Hq, setting.B),
        tiles=tiles,
        interpret=setting.interpret,
        aliases=aliases,
    )
    return FoundByRows(found[0], list(found[1 : 1 + len(groups.rows)]), list(found[1 + len(groups.rows) :]))


def _kernel(
    setting: Setting,
    tiles: Tiles,
    derivative: Derivative | None,
    groups: LoadGroups,
    arrays: Arrays,
    order: Any,
    rows: Rows,
    zeros: Any,
    d_query: Any,
    *captured: Any,
) -> None:
    nth, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    here = b, h, tile = b, h, blocks.row_at(setting, order, b, h, nth, pl.num_programs(0))
    rows_end, keys_end = setting.T % tiles.block_q != 0, setting.walk_passes_end("k", tiles.block_kv)
    first = tile * tiles.block_q
    own_rows = functools.partial(load_queries, setting, b=b, h=h, first=first, rows=tiles.block_q, may_end=rows_end)
    vector = functools.partial(
        load_vector, at=(b, h), first=first, rows=tiles.block_q, length=setting.T, may_end=rows_end
    )
    q, d_out = own_rows(arrays.query), own_rows(rows.d_out)
    shift, delta = shift_of(vector(rows.lse, other=-jnp.inf)), vector(rows.delta, other=0.0)
    programs = None if derivative is None else {"score": derivative.nodes}
    known = scores.prepare(setting, arrays, tiles[:2], b, h, q_first=first, programs=programs)

    def step(state: Any, key: Any, is_partial: bool) -> Any:
        d_q, sums = state
        keys = functools.partial(
            load_keys, setting, b=b, h=h, first=key, rows=tiles.block_kv, may_end=is_partial and keys_end
        )
        k = keys(arrays.key)
        tile = scores.compute(known, q, k, key, is_partial)
        p = weights(setting, tile.s, known.unit, shift[:, None])
        d_p = inner(setting, d_out, keys(arrays.value))
        d_s, of_load = through_mod(derivative, tile, p * (d_p - delta[:, None]))
        sums = tuple(total + jnp.sum(of_load(n), axis=1) for total, n in zip(sums, groups.rows, strict=True))
        for load, ref in zip((*groups.stores, *groups.atomics), captured[len(groups.rows) :], strict=True):
            _write(setting, tiles, ref, tile, load, of_load(load), (first, key), add=load in groups.atomics)
        return plus(d_q, times(setting, d_s, k)), sums

    sums = tuple(jnp.zeros((tiles.block_q,), jnp.float32) for _ in groups.rows)
    d_q, sums = blocks.over_keys(setting, tiles, arrays, here, (zero_rows(tiles.block_q, setting.D), sums), step)
    d_q = tuple(x * setting.scale for x in d_q)
    store_rows(setting, d_query, b, h, first, d_q, setting.T, may_end=rows_end)
    for ref, total in zip(captured, sums, strict=False):
        store_vector(ref, (b, h), first, total, setting.T, may_end=rows_end)


def _write(
    setting: Setting,
    tiles: Tiles,
    ref: Any,
    tile: ScoreTile,
    load: Any,
    cotangent: jax.Array,
    first: tuple[Any, Any],
    *,
    add: bool,
) -> None:
    """Writes the cotangents of a tile to the gradient of the array: a plain store where nothing else writes there."""
    q_first, k_first = first
    score = tile.score
    assert score is not None  # which loads
    at = tuple(score.space.spread(score(i), i.kind, "qk") for i in load.inputs)
    shape = cotangent.shape
    exists = (q_first + lax.broadcasted_iota(jnp.int32, shape, 0) < setting.T) & (
        k_first + lax.broadcasted_iota(jnp.int32, shape, 1) < setting.S
    )
    # Indices past the end are those of the last row: what is added there is 0. The interpreter stores masked places
    # too, as they were before; so there the one write becomes an addition to the zeros.
    if add or setting.interpret:
        addupdate(ref, at, jnp.where(exists, cotangent, 0.0).astype(ref.dtype))
    else:
        plgpu.store(ref.at[at], cotangent.astype(ref.dtype), mask=exists)
