"""Forward kernel for few queries against many keys, as in decoding.

The queries of all query heads that share a key head are the rows of one tile, so that keys and values are read once;
and the keys that are visited are divided among programs, so that one sequence keeps a GPU busy (Dao et al. 2023,
Flash-Decoding; Dong et al. 2024, arXiv:2412.05496, section 5). A second, small step merges what the programs found. The
grid is (parts, key heads, batch).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import blocks, softmax
from pallas_kernels.setting import Arrays, Setting, Tiles
from pallas_kernels.triton import scores
from pallas_kernels.triton.columns import Columns, chunks, load_rows, times, zero_rows
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.tile import weights

ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H200; with 528 and 1056, 2 to 8 % and 5 to 15 % slower
LEAST_TILES = 2  # of a program: with fewer, starting and merging would take longer than they do


def decode(setting: Setting, tiles: Tiles, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Computes out, in the layout and dtype of the query, and lse, float32 [B, Hq, T].

    Args:
      setting: Its programs are traced with heads in rows.
      tiles: `block_q` holds the queries of a key head: ``group * T`` of them.
      arrays: The inputs.
    """
    parts = parts_of(setting, tiles)
    shape = (setting.B, setting.Hkv, parts, tiles.block_q)
    out, lse = launch(
        functools.partial(_kernel, setting, tiles, parts),
        (arrays,),
        [jax.ShapeDtypeStruct((*shape, setting.Dv), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        name="jflex_decode",
        grid=(parts, setting.Hkv, setting.B),
        tiles=tiles,
        interpret=setting.interpret,
    )
    rows = setting.group * setting.T
    merged, lse = _merge(out[..., :rows, :], lse[..., :rows])
    by_head = (setting.B, setting.Hq, setting.T)
    merged = merged.reshape(*by_head, setting.Dv).astype(arrays.query.dtype)
    return (merged.swapaxes(1, 2) if setting.layout == "BTNH" else merged), lse.reshape(by_head)


def parts_of(setting: Setting, tiles: Tiles) -> int:
    """Among how many programs the keys of a head are divided."""
    if setting.blocks is None:
        walked = pl.cdiv(setting.S, tiles.block_kv)
    else:
        walked = pl.cdiv(setting.S, setting.blocks[1]) * (setting.blocks[1] // tiles.block_kv)
    wanted = pl.cdiv(ENOUGH_PROGRAMS, max(1, setting.B * setting.Hkv))
    return max(1, min(wanted, walked // LEAST_TILES))


def _merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges softmaxes over parts of the keys, [B, Hkv, parts, rows, Dv] and [B, Hkv, parts, rows]."""
    top = jnp.max(lse, axis=2, keepdims=True)
    share = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(share, axis=2)
    merged = jnp.sum(out * share[..., None], axis=2) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return merged, jnp.where(total == 0.0, -jnp.inf, top[:, :, 0] + jnp.log(jnp.where(total == 0.0, 1.0, total)))


def _kernel(setting: Setting, tiles: Tiles, parts: int, arrays: Arrays, out: Any, lse: Any) -> None:
    part, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = lax.broadcasted_iota(jnp.int32, (tiles.block_q, 1), 0)
    row = jnp.minimum(row, setting.group * setting.T - 1)  # rows beyond repeat the last one, and are dropped
    h, t = kv_h * setting.group + lax.div(row, setting.T), lax.rem(row, setting.T)
    q = _load_queries(setting, arrays.query, b, h, t)
    known = scores.prepare(setting, arrays, tiles[:2], b, h, q=t)
    keys_end = setting.walk_passes_end("k", tiles.block_kv)
    kv_b = b if setting.Bkv > 1 else 0

    def step(state: softmax.SoftmaxState, key: Any, is_partial: bool) -> softmax.SoftmaxState:
        keys = functools.partial(
            load_rows,
            setting,
            b=kv_b,
            h=kv_h,
            first=key,
            rows=tiles.block_kv,
            length=setting.S,
            may_end=is_partial and keys_end,
        )
        tile = scores.compute(known, q, keys(arrays.key), key, is_partial)
        v = keys(arrays.value)
        return softmax.update(
            state,
            tile.s,
            unit=known.unit,
            weigh=lambda s, shift: weights(setting, s, known.unit, shift),
            times_values=lambda p: times(setting, p, v),
            may_hide=True,
        )

    start = softmax.start(tiles.block_q, zero_rows(tiles.block_q, setting.Dv))
    state = _over_keys(setting, tiles, arrays, (b, kv_h), blocks.Part(part, parts), start, step)
    rows, row_lse = softmax.finish(state, known.unit)
    for (first, width), x in zip(chunks(setting.Dv), rows, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (tiles.block_q, width), 1)
        line = lax.broadcasted_iota(jnp.int32, (tiles.block_q, width), 0)
        plgpu.store(out.at[(b, kv_h, part, line, column)], x, mask=column < setting.Dv)
    plgpu.store(lse.at[(b, kv_h, part, pl.ds(0, tiles.block_q))], row_lse)


def _load_queries(setting: Setting, ref: Any, b: Any, h: jax.Array, t: jax.Array) -> Columns:
    """The query of each row."""

    def load(first: int, width: int) -> jax.Array:
        shape = (h.shape[0], width)
        column = first + lax.broadcasted_iota(jnp.int32, shape, 1)
        h_row, t_row = jnp.broadcast_to(h, shape), jnp.broadcast_to(t, shape)
        at = (b, t_row, h_row, column) if setting.layout == "BTNH" else (b, h_row, t_row, column)
        return plgpu.load(ref.at[at], mask=column < setting.D, other=0.0)

    return tuple(load(*chunk) for chunk in chunks(setting.D))


def _over_keys(
    setting: Setting, tiles: Tiles, arrays: Arrays, here: tuple[Any, Any], part: blocks.Part, state: Any, step: Any
) -> Any:
    """Folds a step over a part of the tiles of keys that the queries visit: those of the one row of blocks there is."""
    if setting.blocks is None:
        return blocks.walk_all(tiles.block_kv, setting.S, setting.mask is not None, state, step, part)
    counts, indices, full_counts, full_indices = arrays.lists[:4]
    b, h = here
    row = blocks.BlockRow((counts, indices), (full_counts, full_indices), (*blocks.list_position(setting, b, h), 0))
    return blocks.walk(row, setting.blocks[1], tiles.block_kv, setting.S, state, step, part)
