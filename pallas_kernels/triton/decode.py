"""Forward kernel for few queries against many keys, as in decoding.

The queries of all query heads that share a key head are the rows of one tile, so that keys and values are read once;
and the keys that are visited are divided among programs, so that one sequence keeps a GPU busy (Dao et al. 2023,
Flash-Decoding; Dong et al. 2024, arXiv:2412.05496, section 5). A second, small step merges what the programs found.

Where all rows are alike, each is divided into as many parts, which are known ahead; the grid is (parts, key heads,
batch). Where lengths or lists make them differ, the programs divide them: the grid is (key heads, parts), and
`pallas_kernels.triton.decode_uneven` says which part of which row one takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import blocks, softmax
from pallas_kernels.setting import Arrays, Setting, Tiles
from pallas_kernels.triton import decode_merge, decode_uneven, plan, scores
from pallas_kernels.triton.columns import Columns, chunks, load_rows, times, zero_rows
from pallas_kernels.triton.decode_uneven import Division, Facts
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.tile import weights


def decode(
    setting: Setting, tiles: Tiles, arrays: Arrays, lengths: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes out, in the layout and dtype of the query, and lse, float32 [B, Hq, T].

    Args:
      setting: Its programs are traced with heads in rows.
      tiles: `block_q` holds the queries of a key head: ``group * T`` of them.
      arrays: The inputs.
      lengths: Keys of each batch entry, int32 [B]; what lies beyond is not read.
    """
    by_row = setting.blocks is not None and max(setting.list_batch, setting.list_heads) > 1
    if lengths is not None or by_row:
        return _decode_uneven(setting, tiles, arrays, lengths)
    return _decode_even(setting, tiles, arrays)


def _decode_even(setting: Setting, tiles: Tiles, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    parts = parts_of(setting, tiles)
    if parts == 1:
        return _decode_whole(setting, tiles, arrays)
    shape = (setting.B * parts, setting.Hkv, tiles.block_q)
    out, lse = launch(
        functools.partial(_even_kernel, setting, tiles, parts),
        (arrays,),
        [jax.ShapeDtypeStruct((*shape, setting.Dv), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        name="jflex_decode",
        grid=(parts, setting.Hkv, setting.B),
        tiles=tiles,
        interpret=setting.interpret,
    )
    return decode_merge.merge_even(setting, parts, (out, lse), arrays.query.dtype)


def _decode_whole(setting: Setting, tiles: Tiles, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """No row is divided: there is nothing to merge."""
    out, lse = launch(
        functools.partial(_even_kernel, setting, tiles, 1),
        (arrays,),
        [
            jax.ShapeDtypeStruct(setting.rows_shape(setting.Dv), arrays.query.dtype),
            jax.ShapeDtypeStruct((setting.B, setting.Hq, setting.T), jnp.float32),
        ],
        name="jflex_decode",
        grid=(1, setting.Hkv, setting.B),
        tiles=tiles,
        interpret=setting.interpret,
    )
    return out, lse


def _decode_uneven(
    setting: Setting, tiles: Tiles, arrays: Arrays, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    lists = (None, None) if arrays.lists is None else (arrays.lists[0], arrays.lists[2])
    division, facts = Division(setting, tiles), Facts(lengths, *lists)
    slots = (division.slots, division.heads, tiles.block_q)
    out, lse, *parts = launch(
        functools.partial(_uneven_kernel, setting, tiles, division),
        (arrays, lengths),
        [
            jax.ShapeDtypeStruct(setting.rows_shape(setting.Dv), arrays.query.dtype),
            jax.ShapeDtypeStruct((setting.B, setting.Hq, setting.T), jnp.float32),
            jax.ShapeDtypeStruct((*slots, setting.Dv), jnp.float32),
            jax.ShapeDtypeStruct(slots, jnp.float32),
        ],
        name="jflex_decode",
        grid=(division.heads, division.items),
        tiles=tiles,
        interpret=setting.interpret,
    )
    if division.most_parts == 1:
        return out, lse
    return decode_merge.merge_uneven(division, facts, (parts[0], parts[1]), (out, lse))


def parts_of(setting: Setting, tiles: Tiles) -> int:
    """Among how many programs the keys of a head are divided, where all rows are alike."""
    wanted = plan.even_parts(max(1, setting.B * setting.Hkv))
    return max(1, min(wanted, decode_uneven.all_tiles(setting, tiles) // plan.LEAST_TILES))


def _even_kernel(setting: Setting, tiles: Tiles, parts: int, arrays: Arrays, out: Any, lse: Any) -> None:
    part, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    step, unit = _step(setting, tiles, arrays, (b, kv_h), None)
    listed = lambda s, key, is_partial: step(s, key, is_partial, is_partial and setting.walk_passes_end("k", tiles[1]))
    state = _over_keys(setting, tiles, arrays, (b, kv_h), blocks.Part(part, parts), _start(setting, tiles), listed)
    rows, row_lse = softmax.finish(state, unit)
    if parts == 1:
        row = decode_uneven.whole_row(b, kv_h)
        return decode_uneven.store_whole(setting, row, rows, row_lse, out, lse)
    for (first, width), x in zip(chunks(setting.Dv), rows, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (tiles.block_q, width), 1)
        line = lax.broadcasted_iota(jnp.int32, (tiles.block_q, width), 0)
        plgpu.store(out.at[(b * parts + part, kv_h, line, column)], x, mask=column < setting.Dv)
    plgpu.store(lse.at[(b * parts + part, kv_h, pl.ds(0, tiles.block_q))], row_lse)


def _uneven_kernel(
    setting: Setting, tiles: Tiles, division: Division, arrays: Arrays, lengths: Any, out: Any, lse: Any, *parts: Any
) -> None:
    head, item = pl.program_id(0), pl.program_id(1)
    facts = Facts(lengths, *((None, None) if arrays.lists is None else (arrays.lists[0], arrays.lists[2])))
    row = division.row_of(facts, item, head)
    step, unit = _step(setting, tiles, arrays, (row.b, row.kv_h), row.end)
    state = decode_uneven.over_keys(setting, tiles, arrays.lists, row, _start(setting, tiles), step)
    rows, row_lse = softmax.finish(state, unit)
    decode_uneven.store_part(row, head, rows, row_lse, (parts[0], parts[1]))
    decode_uneven.store_whole(setting, row, rows, row_lse, out, lse)


def _start(setting: Setting, tiles: Tiles) -> softmax.SoftmaxState:
    return softmax.start(tiles.block_q, zero_rows(tiles.block_q, setting.Dv))


def _step(
    setting: Setting, tiles: Tiles, arrays: Arrays, here: tuple[Any, Any], end: Any
) -> tuple[Callable[[Any, Any, bool, bool], softmax.SoftmaxState], float]:
    """One step of the walk over keys, for a batch entry and a key head, and the unit of its scores.

    It is ``(state, first key, is_partial, may_end) -> state``; `may_end` says that a tile may reach past `end`, or past
    the last key if that is None.
    """
    b, kv_h = here
    row = lax.broadcasted_iota(jnp.int32, (tiles.block_q, 1), 0)
    row = jnp.minimum(row, setting.group * setting.T - 1)  # rows beyond repeat the last one, and are dropped
    h, t = kv_h * setting.group + lax.div(row, setting.T), lax.rem(row, setting.T)
    q = _load_queries(setting, arrays.query, b, h, t)
    known = scores.prepare(setting, arrays, tiles[:2], b, h, q=t, end=end)
    kv_b = b if setting.Bkv > 1 else 0

    def step(state: softmax.SoftmaxState, key: Any, is_partial: bool, may_end: bool) -> softmax.SoftmaxState:
        keys = functools.partial(
            load_rows,
            setting,
            b=kv_b,
            h=kv_h,
            first=key,
            rows=tiles.block_kv,
            length=setting.S if end is None else end,
            may_end=may_end,
        )
        seen = known._replace(mask=known.mask if is_partial else None, end=end if may_end else None)
        tile = scores.compute(seen, q, keys(arrays.key), key, is_partial or may_end)
        v = keys(arrays.value)
        return softmax.update(
            state,
            tile.s,
            unit=known.unit,
            weigh=lambda s, shift: weights(setting, s, known.unit, shift),
            times_values=lambda p: times(setting, p, v),
            may_hide=True,
        )

    return step, known.unit


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
