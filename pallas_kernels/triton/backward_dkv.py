"""Backward kernel for dK and dV, and for the captured arrays that are read by key.

One program computes a tile of keys of one key head, over the tiles of queries of all query heads that share it, so that
nothing is added by atomics. Scores are held transposed, (keys, queries): then P^T and dS^T are what the products want,
and stay in registers. The grid is (tiles of keys, key heads, batch).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import blocks
from pallas_kernels.cotangents import LoadGroups
from pallas_kernels.gradients import Rows, shift_of, through_mod
from pallas_kernels.mods import Derivative
from pallas_kernels.setting import Arrays, Setting, Tiles
from pallas_kernels.triton import scores
from pallas_kernels.triton.columns import (
    Columns,
    inner,
    load_rows,
    load_vector,
    plus,
    store_rows,
    store_vector,
    times,
    zero_rows,
)
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.tile import weights


class FoundByColumns(NamedTuple):
    """dK and dV for each batch entry; cotangents [B, Hq, S] of ``groups.columns``."""

    key: jax.Array
    value: jax.Array
    columns: list[jax.Array]


def dkv(
    setting: Setting, tiles: Tiles, arrays: Arrays, rows: Rows, derivative: Derivative | None, groups: LoadGroups
) -> FoundByColumns:
    """Computes dK and dV in the layout of the key; float32 where a shared batch is still to be summed."""
    dtype = arrays.key.dtype if setting.Bkv == setting.B else jnp.float32
    per_column = jax.ShapeDtypeStruct((setting.B, setting.Hq, setting.S), jnp.float32)
    outputs = [
        *(jax.ShapeDtypeStruct(setting.keys_shape(size), dtype) for size in (setting.D, setting.Dv)),
        *(per_column for _ in groups.columns),
    ]
    d_key, d_value, *columns = launch(
        functools.partial(_kernel, setting, tiles, derivative, groups),
        (arrays, blocks.column_order(setting, tiles, arrays), rows),
        outputs,
        name="jflex_backward_dkv",
        grid=(pl.cdiv(setting.S, tiles.block_kv), setting.Hkv, setting.B),
        tiles=tiles,
        interpret=setting.interpret,
    )
    return FoundByColumns(d_key, d_value, columns)


def _kernel(
    setting: Setting,
    tiles: Tiles,
    derivative: Derivative | None,
    groups: LoadGroups,
    arrays: Arrays,
    order: Any,
    rows: Rows,
    d_key: Any,
    d_value: Any,
    *columns: Any,
) -> None:
    tile, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = blocks.column_at(setting, order, b, kv_h, tile)
    first = tile * tiles.block_kv
    keys_end = setting.S % tiles.block_kv != 0
    own_keys = functools.partial(
        load_rows,
        setting,
        b=b if setting.Bkv > 1 else 0,
        h=kv_h,
        first=first,
        rows=tiles.block_kv,
        length=setting.S,
        may_end=keys_end,
    )
    k, v = own_keys(arrays.key), own_keys(arrays.value)

    def one_head(member: Any, state: Any) -> Any:
        h = kv_h * setting.group + member
        head = _Head(setting, tiles, derivative, groups, arrays, rows)
        start = (*state, tuple(jnp.zeros((tiles.block_kv,), jnp.float32) for _ in groups.columns))
        *state, sums = blocks.over_queries(setting, tiles, arrays, (b, h, tile), start, head.step(b, h, first, k, v))
        for ref, total in zip(columns, sums, strict=True):
            store_vector(ref, (b, h), first, total, setting.S, may_end=keys_end)
        return tuple(state)

    state = tuple(zero_rows(tiles.block_kv, size) for size in (setting.D, setting.Dv))
    d_k, d_v = one_head(0, state) if setting.group == 1 else lax.fori_loop(0, setting.group, one_head, state)
    d_k = tuple(x * setting.scale for x in d_k)
    store_rows(setting, d_key, b, kv_h, first, d_k, setting.S, may_end=keys_end)
    store_rows(setting, d_value, b, kv_h, first, d_v, setting.S, may_end=keys_end)


class _Head(NamedTuple):
    """What one query head needs on the way over its queries."""

    setting: Setting
    tiles: Tiles
    derivative: Derivative | None
    groups: LoadGroups
    arrays: Arrays
    rows: Rows

    def step(self, b: Any, h: Any, k_first: Any, k: Columns, v: Columns) -> Any:
        """The step over a tile of queries: adds to dK, dV and to the cotangents of the loads by key."""
        setting, tiles, arrays = self.setting, self.tiles, self.arrays
        programs = None if self.derivative is None else {"score": self.derivative.nodes}
        known = scores.prepare(setting, arrays, tiles[:2], b, h, k_first=k_first, programs=programs)
        rows_end = setting.walk_passes_end("q", tiles.block_q)

        def step(state: Any, query: Any, is_partial: bool) -> Any:
            d_k, d_v, sums = state
            may_end = is_partial and rows_end
            queries = functools.partial(
                load_rows, setting, b=b, h=h, first=query, rows=tiles.block_q, length=setting.T, may_end=may_end
            )
            vector = functools.partial(
                load_vector, at=(b, h), first=query, rows=tiles.block_q, length=setting.T, may_end=may_end
            )
            q, d_out = queries(arrays.query), queries(self.rows.d_out)
            tile = scores.compute(known, q, k, query, is_partial)
            p = weights(setting, tile.s, known.unit, shift_of(vector(self.rows.lse, other=-jnp.inf))[None, :])
            d_v = plus(d_v, times(setting, p, d_out))
            d_p = inner(setting, v, d_out)
            d_s = p * (d_p - vector(self.rows.delta, other=0.0)[None, :])
            d_s, of_load = through_mod(self.derivative, tile, d_s)
            sums = tuple(
                total + jnp.sum(of_load(n), axis=1) for total, n in zip(sums, self.groups.columns, strict=True)
            )
            return plus(d_k, times(setting, d_s, q)), d_v, sums

        return step
