"""Attention of packed, ragged queries over paged keys: decoding steps and prefill chunks of many requests in one call.

The rows of a tile are queries of one request, of all query heads that share a key head, so that keys are read once for
them (Ye et al. 2025, arXiv:2501.01005, section 3.1). A program takes a part of the keys of one such tile, looks their
pages up as it walks, and writes the output, or, where a tile has several parts, what `merge_parts` joins. Requests
with few queries and with many are taken by launches with tiles of their own. The grid is one axis of (items, key
heads), the heads of an item side by side, so that programs without work come last; paged_rows says what an item is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.marks import may_hide
from pallas_kernels.program import intervals
from pallas_kernels.spec import Arrays, AttentionSpec
from pallas_kernels.triton import scores, split_kv
from pallas_kernels.triton.attention import Attention, Tile
from pallas_kernels.triton.containment import any_nan
from pallas_kernels.triton.head_chunks import Columns, chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.paged.merge import merge_parts
from pallas_kernels.triton.paged.work import PagedArrays, Place, QueryRows, Work, place_of

MOST_JUDGED = 1024  # runs of tiles of keys that a mask is asked about at once, each a value in a register


def paged(spec: AttentionSpec, works: tuple[Work, ...], arrays: PagedArrays) -> tuple[jax.Array, jax.Array]:
    """Computes out [N, Hq, Dv] and lse, float32 [N, Hq].

    Args:
      spec: Its programs are traced with heads in rows.
      works: Which requests are taken with which tiles; each request by one of them.
      arrays: The inputs.
    """
    found: list[jax.Array] = []
    for work in works:
        out, lse, *parts = _attend(spec, work, arrays, found)
        found = merge_parts(spec, work, arrays, (out, lse), parts) if parts else [out, lse]
    for work in works if may_hide(spec) else ():
        found = _repair(spec, work, arrays, found)
    out, lse = found
    return out, lse


def _attend(spec: AttentionSpec, work: Work, arrays: PagedArrays, before: list[jax.Array]) -> list[jax.Array]:
    a, rows = spec, work.tiles.block_q
    outputs = [
        jax.ShapeDtypeStruct((a.T, a.Hq, a.Dv), spec.out_dtype),
        jax.ShapeDtypeStruct((a.T, a.Hq), jnp.float32),
    ]
    if work.most_parts(spec) > 1:
        slots = (work.slots(spec), a.Hkv, rows)
        outputs += [jax.ShapeDtypeStruct((*slots, a.Dv), jnp.float32), jax.ShapeDtypeStruct(slots, jnp.float32)]
    return _launch(_kernel, spec, work, arrays, before, outputs, "jflex_paged")


def _repair(spec: AttentionSpec, work: Work, arrays: PagedArrays, found: list[jax.Array]) -> list[jax.Array]:
    """Computes the tiles of queries again that have an lse of NaN, without splits; see `containment`."""
    work = dataclasses.replace(work, splits=False, tiles=dataclasses.replace(work.tiles, num_stages=1))
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
    return _launch(_repair_kernel, spec, work, arrays, found, outputs, "jflex_paged_repair")


def _launch(
    kernel: Any,
    spec: AttentionSpec,
    work: Work,
    arrays: PagedArrays,
    before: list[jax.Array],
    outputs: Any,
    name: str,
) -> list[jax.Array]:
    """A program for each item and key head; `before` is the memory of the first outputs."""
    count = len(jax.tree.leaves(arrays))
    return launch(
        functools.partial(kernel, spec, work),
        (arrays, before),
        outputs,
        name=name,
        grid=(spec.Hkv * work.items(spec),),
        tiles=work.tiles,
        interpret=spec.config.interpret,
        aliases={count + n: n for n in range(len(before))},
    )


class _Here(NamedTuple):
    """What a program works on: the place, the rows, and their attention."""

    place: Place
    row: QueryRows
    attention: Attention

    @classmethod
    def of(cls, spec: AttentionSpec, work: Work, arrays: PagedArrays) -> _Here:
        """By the number of the program."""
        a, tiles = spec, work.tiles
        kv_h, item = lax.rem(pl.program_id(0), a.Hkv), lax.div(pl.program_id(0), a.Hkv)
        here = place_of(spec, work, arrays, item)
        if spec.max_pages == 1:  # looked up once, so that the loads of the loop depend on no other
            here = here._replace(page=arrays.table[(here.request, 0)])
        row = here.rows(spec, work, kv_h)
        q = _load_queries(spec, arrays.query, row.n, row.h)
        captured = Arrays(*arrays[:3], None, arrays.score_operands, arrays.mask_operands)
        known = scores.prepare(
            a, captured, tiles.shape, here.request, row.h[:, None], q=row.n[:, None], end=here.length
        )

        def tile_at(key: Any, is_partial: bool) -> Tile:
            load = functools.partial(_load_keys, spec, arrays, here, kv_h, key, tiles.block_kv, may_end=is_partial)
            found = scores.compute(known, q, load(arrays.key), key, is_partial)
            return Tile(found, load(arrays.value))

        walk = functools.partial(_over_keys, spec, work, known, here)
        return cls(here, row, Attention(known, tiles.block_q, walk, tile_at))

    def store(self, out: Any, lse: Any, columns: Columns, row_lse: jax.Array, *, whole: Any, keeps: Any = None) -> None:
        """Writes the rows, but for outputs of those that keep what is there.

        Rows that do not exist repeat others, and are stored like them: what is masked off must not share their place,
        for Pallas' interpreter writes there what it had read before.
        """
        row, whole = self.row, jnp.broadcast_to(whole, row_lse.shape)
        plgpu.store(lse.at[(row.n, row.h)], row_lse, mask=whole)
        _store(out, (row.n[:, None], row.h[:, None]), columns, whole if keeps is None else whole & ~keeps)


def _kernel(spec: AttentionSpec, work: Work, arrays: PagedArrays, before: Any, out: Any, lse: Any, *parts: Any) -> None:
    del before  # the memory of `out` and `lse`
    here = _Here.of(spec, work, arrays)
    place, (columns, row_lse) = here.place, here.attention.attend()
    here.store(out, lse, columns, row_lse, whole=(place.queries > 0) & (place.parts == 1))
    if not parts:
        return
    part_out, part_lse = parts
    kv_h = lax.rem(pl.program_id(0), spec.Hkv)
    nth = lax.broadcasted_iota(jnp.int32, (work.tiles.block_q,), 0)
    parted = here.row.exists & (place.parts > 1)
    plgpu.store(part_lse.at[(place.slot, kv_h, nth)], row_lse, mask=parted)
    _store(part_out, (place.slot, kv_h, nth[:, None]), columns, parted)


def _repair_kernel(spec: AttentionSpec, work: Work, arrays: PagedArrays, before: Any, out: Any, lse: Any) -> None:
    here = _Here.of(spec, work, arrays)

    def fix() -> None:
        columns, row_lse, attended = here.attention.repair()
        here.store(out, lse, columns, row_lse, whole=here.place.queries > 0, keeps=attended.bad > 0.0)

    marked = any_nan(plgpu.load(before[1].at[(here.row.n, here.row.h)]))
    pl.when(marked & (here.place.queries > 0))(fix)


def _store(ref: Any, at: tuple[Any, ...], columns: Columns, mask: jax.Array) -> None:
    size = ref.shape[-1]
    for (first, _), x in zip(chunks(size), columns, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, x.shape, 1)
        index = tuple(jnp.broadcast_to(i, x.shape) if jnp.ndim(i) else i for i in at)
        plgpu.store(ref.at[(*index, column)], x.astype(ref.dtype), mask=mask[:, None] & (column < size))


def _load_queries(spec: AttentionSpec, ref: Any, n: jax.Array, h: jax.Array) -> Columns:
    size = spec.D

    def load(first: int, width: int) -> jax.Array:
        shape = (n.shape[0], width)
        column = first + lax.broadcasted_iota(jnp.int32, shape, 1)
        at = (jnp.broadcast_to(n[:, None], shape), jnp.broadcast_to(h[:, None], shape), column)
        return plgpu.load(ref.at[at], mask=column < size, other=0.0)

    return tuple(load(*chunk) for chunk in chunks(size))


def _load_keys(
    spec: AttentionSpec, arrays: PagedArrays, here: Place, h: Any, first: Any, count: int, ref: Any, *, may_end: bool
) -> Columns:
    """Rows of key or value from the logical position `first` on; zeros at or beyond the request's length."""
    size, page_size = ref.shape[3], spec.page_size
    position = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
    exists = position < here.length
    one_page = spec.max_pages == 1 or page_size % count == 0
    if spec.max_pages == 1:
        page, row = here.page, first
    elif one_page:
        page, row = arrays.table[(here.request, lax.div(first, page_size))], lax.rem(first, page_size)
    else:
        at = arrays.table.at[(here.request, lax.div(position, page_size))]
        page = plgpu.load(at, mask=exists, other=0) if may_end else plgpu.load(at)
        row = lax.rem(position, page_size)
    page = jnp.minimum(jnp.maximum(page, 0), spec.num_pages - 1) + arrays.first_page[0]

    def load(start: int, width: int) -> jax.Array:
        shape = (count, width)
        if one_page and not may_end and start + width <= size:
            return plgpu.load(ref.at[(page, pl.ds(row, count), h, pl.ds(start, width))])
        column = start + lax.broadcasted_iota(jnp.int32, shape, 1)
        rows = row + lax.broadcasted_iota(jnp.int32, shape, 0) if one_page else jnp.broadcast_to(row[:, None], shape)
        pages = page if one_page else jnp.broadcast_to(page[:, None], shape)
        mask = column < size
        if may_end:
            mask &= exists[:, None]
        return plgpu.load(ref.at[(pages, rows, h, column)], mask=mask, other=0.0)

    return tuple(load(*chunk) for chunk in chunks(size))


class _Walk(NamedTuple):
    """Tiles of keys that some queries visit, and those among them that they see whole: first, and one past the last."""

    first: Any
    last: Any
    first_whole: Any
    last_whole: Any


def _over_keys(spec: AttentionSpec, work: Work, known: scores.Scores, here: Place, state: Any, step: Any) -> Any:
    """Folds a step over this program's part of the tiles that its rows visit."""
    tile = work.tiles.block_kv
    walk = _walk_of(spec, tile, known, here, spec.S)
    start, end = split_kv.part_of(walk.last - walk.first, here.part, here.parts)
    start, end = walk.first + start, walk.first + end
    inside = lambda x: jnp.minimum(jnp.maximum(x, start), end)
    first_whole, last_whole = inside(walk.first_whole), inside(walk.last_whole)
    partial = lambda t, state: step(state, t * tile, True)
    if known.mask is not None:
        state = lax.fori_loop(start, first_whole, partial, state)
    state = lax.fori_loop(first_whole, last_whole, lambda t, state: step(state, t * tile, False), state)
    return lax.fori_loop(jnp.maximum(last_whole, start), end, partial, state)


def _walk_of(a: AttentionSpec, tile: int, known: scores.Scores, here: Place, capacity: int) -> _Walk:
    last, whole = lax.div(here.length + (tile - 1), tile), lax.div(here.length, tile)
    if known.mask is None:
        return _Walk(0, last, 0, whole)
    assert a.programs.mask is not None
    tiles = pl.cdiv(capacity, tile)
    run = pl.cdiv(tiles, MOST_JUDGED)  # tiles judged as one
    count = 1 << (pl.cdiv(tiles, run) - 1).bit_length()
    nth = lax.broadcasted_iota(jnp.int32, (count,), 0)
    first_key = nth * (run * tile)
    seen = intervals.visibility(a.programs.mask, known.mask, first_key, first_key + (run * tile - 1))
    exists = nth * run < last
    some, all_of = seen.some & exists, seen.all & ((nth + 1) * run <= whole)
    first, after = _first_where(some, nth, count), _last_where(some, nth) + 1
    first_whole = _first_where(all_of, nth, count)
    last_whole = _first_where(~all_of & (nth > first_whole), nth, count)
    end = jnp.minimum(after * run, last)
    begin = jnp.minimum(first * run, end)
    return _Walk(begin, end, jnp.minimum(first_whole * run, end), jnp.minimum(last_whole * run, end))


def _first_where(x: jax.Array, nth: jax.Array, count: int) -> jax.Array:
    return jnp.min(jnp.where(x, nth, count))


def _last_where(x: jax.Array, nth: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(x, nth, -1))
