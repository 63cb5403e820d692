"""Split-KV forward kernel for few queries against many keys, as in decoding.

The queries of all query heads that share a key head (a GQA group) are packed into the rows of one tile, so that keys
and values are read once; and the keys that are visited are split among programs, so that one sequence keeps a GPU busy
(Dao et al. 2023, Flash-Decoding; Dong et al. 2024, arXiv:2412.05496, section 5). A second, small kernel merges the
partial results of the splits.

Where all rows are alike, each has the same static number of splits; the grid is (splits, key heads, batch). Where
lengths or lists make them differ, the programs plan the splits: the grid is (key heads, splits of all rows), and
`pallas_kernels.split_kv.ragged` maps a program to its split of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.split_kv import fixed_splits, merge, planner, ragged
from pallas_kernels.split_kv.ragged import KvExtents, Row, SplitPlan
from pallas_kernels.triton import scores
from pallas_kernels.triton.containment import any_nan
from pallas_kernels.triton.forward import Attention, Tile, Walk
from pallas_kernels.triton.head_chunks import load_lines, load_rows, store_lines
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Ref


def decode(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array], lengths: jax.Array | None = None
) -> merge.Results:
    """Computes out, in the layout of the query and the dtype of the value, lse and ``spec.stats``, float32 [B, Hq, T].

    Programs are traced with heads in rows, and `block_q` holds the ``group * T`` packed queries of a key head. Keys
    beyond the lengths, int32 [B], are not read.
    """
    by_row = spec.block_size is not None and max(spec.list_batch, spec.list_heads) > 1
    if lengths is not None or by_row:
        result = _decode_ragged(spec, tiles, arrays, lengths)
    else:
        result = _decode_uniform(spec, tiles, arrays)
    return repair(spec, tiles, arrays, lengths, result) if spec.needs_marks else result


def repair(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array], lengths: jax.Array | None, result: merge.Results
) -> merge.Results:
    """The results of `decode`, with the key heads that have an lse of NaN computed again, without splits.

    See `containment`.
    """
    return runner_of(spec).launch_in_place(
        functools.partial(_repair_kernel, spec, tiles),
        (arrays, lengths),
        tuple(result),
        name="jflex_decode_repair",
        grid=(spec.Hkv, spec.B),
        tiles=dataclasses.replace(tiles, num_stages=1),
    )


def _decode_uniform(spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array]) -> merge.Results:
    splits = row_splits(spec, tiles)
    if splits == 1:  # there is nothing to merge
        outputs = merge.result_shapes(spec, arrays.value.dtype)
    else:
        outputs = merge.partial_shapes(spec, (spec.B * splits, spec.Hkv, tiles.block_q))
    results = runner_of(spec).launch(
        functools.partial(_uniform_kernel, spec, tiles, splits),
        (arrays,),
        outputs,
        name="jflex_decode",
        grid=(splits, spec.Hkv, spec.B),
        tiles=tiles,
    )
    return results if splits == 1 else merge.merge_uniform(spec, splits, results, arrays.value.dtype)


def _decode_ragged(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array], lengths: jax.Array | None
) -> merge.Results:
    lists = (None, None) if arrays.lists is None else (arrays.lists[0], arrays.lists[2])
    plan, extents = SplitPlan(spec, tiles), KvExtents(lengths, *lists)
    result = merge.result_shapes(spec, arrays.value.dtype)
    items = min(plan.num_items, pl.cdiv(fixed_splits.MAX_PROGRAMS, plan.heads)) if plan.is_fixed else plan.num_items
    results = runner_of(spec).launch(
        functools.partial(_ragged_kernel, spec, tiles, plan),
        (arrays, lengths),
        [*result, *merge.partial_shapes(spec, (plan.slots, plan.heads, tiles.block_q))],
        name="jflex_decode",
        grid=(plan.heads, items),
        tiles=tiles,
    )
    whole, splits = results[: len(result)], results[len(result) :]
    return whole if plan.max_splits == 1 else merge.merge_ragged(plan, extents, splits, whole)


def row_splits(spec: AttentionSpec, tiles: Tiles) -> int:
    """Splits of the keys of each head, where all rows are alike."""
    target = planner.even_splits(max(1, spec.B * spec.Hkv))
    if spec.config.batch_invariant:
        fixed = ragged.max_fixed_splits(spec, tiles)
        return fixed if target > 1 and spec.B * spec.Hkv * fixed <= fixed_splits.MAX_PARTIALS else 1
    return max(1, min(target, ragged.max_tiles(spec, tiles) // planner.MIN_TILES_PER_SPLIT))


def _uniform_kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    splits: int,
    arrays: Operands[Ref],
    *result: Ref,  # out [B * splits, Hkv, block_q, Dv], lse and stats [B * splits, Hkv, block_q]; whole with one split
) -> None:
    split, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = Row(b, kv_h)
    attention, split_walk = _attention(spec, tiles, arrays, row, block_walk.Split(split, splits))
    if spec.config.batch_invariant:
        first, end = (0, ragged.max_fixed_splits(spec, tiles)) if splits == 1 else (split, split + 1)
        sums = fixed_splits.attend(attention, split_walk, first, end)
        rows, vectors = fixed_splits.finish(spec, sums) if splits == 1 else (sums.out, sums.vectors)
    else:
        rows, vectors = attention.attend()
    if splits == 1:
        return ragged.store_unsplit(spec, ragged.unsplit_item(row), rows, vectors, result)
    out, *of_vectors = result
    line = lax.broadcasted_iota(jnp.int32, (tiles.block_q,), 0)
    store_lines(spec, out, (b * splits + split, kv_h, line), rows)
    for ref, x in zip(of_vectors, vectors, strict=True):
        runner_of(spec).store(ref.at[(b * splits + split, kv_h, pl.ds(0, tiles.block_q))], x)


def _ragged_kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    plan: SplitPlan,
    arrays: Operands[Ref],
    lengths: Ref | None,  # [B], or None
    *refs: Ref,  # out, lse and stats [B, Hq, T]; partial results, [slots, heads, block_q] in place of [B, Hq, T]
) -> None:
    head, count = pl.program_id(0), 2 + len(spec.stats)
    extents = KvExtents(lengths, *((None, None) if arrays.lists is None else (arrays.lists[0], arrays.lists[2])))

    def compute(number: jax.Array) -> None:
        item = plan.item_at(extents, number, head)
        attention, split_walk = _attention(spec, tiles, arrays, item.row, item.split)
        if plan.is_fixed:
            sums = fixed_splits.attend(attention, split_walk, *item.fixed)
            ragged.store_partial(spec, item, head, sums.out, sums.vectors, refs[count:])
            rows, vectors = fixed_splits.finish(spec, sums)
        else:
            rows, vectors = attention.attend()
            ragged.store_partial(spec, item, head, rows, vectors, refs[count:])
        ragged.store_unsplit(spec, item, rows, vectors, refs[:count])

    if plan.is_fixed:
        planner.grid_stride(planner.program_of(axis=1), jnp.sum(plan.splits(extents)[1]), compute)
    else:
        compute(pl.program_id(1))


def _repair_kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[Ref],
    lengths: Ref | None,  # [B], or None
    before: tuple[Ref, ...],  # out, lse and stats, as the kernel left them
    *result: Ref,  # the same memory: out, and lse and stats [B, Hq, T]
) -> None:
    kv_h, b = pl.program_id(0), pl.program_id(1)
    fixed = ragged.max_fixed_splits(spec, tiles)
    item = ragged.unsplit_item(Row(b, kv_h, KvExtents(lengths, None, None).end(spec, b)), fixed)

    def fix() -> None:
        attention, split_walk = _attention(spec, tiles, arrays, item.row, item.split)
        if spec.config.batch_invariant:
            rows, vectors, attended = fixed_splits.repair(attention, split_walk, *item.fixed)
        else:
            rows, vectors, attended = attention.repair()
        ragged.store_unsplit(spec, item, rows, vectors, result, keeps=attended.bad > 0.0)

    pl.when(any_nan(ragged.load_lse(spec, item.row, tiles.block_q, before[1])))(fix)


def _attention(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], row: Row, split: block_walk.Split
) -> tuple[Attention, Callable[[Index], Walk]]:
    """Attention of the queries of a row over a split of its keys, and the walk of each split of constant size."""
    b, kv_h, end = row
    line = lax.broadcasted_iota(jnp.int32, (tiles.block_q, 1), 0)
    line = jnp.minimum(line, spec.group * spec.T - 1)  # lines beyond repeat the last one, and are dropped
    h, t = kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T)
    q = load_lines(spec, arrays.query, (b, t, h) if spec.layout == "BTNH" else (b, h, t))  # [block_q, D]
    prepared = scores.prepare(spec, arrays, tiles.shape, b, h, q=t, end=end)
    kv_b = b if spec.Bkv > 1 else 0

    def tile_at(key: Index, is_partial: bool, may_end: bool) -> Tile:
        length = spec.S if end is None else end
        load = {"b": kv_b, "h": kv_h, "first": key, "rows": tiles.block_kv, "length": length, "may_end": may_end}
        keys = functools.partial(load_rows, spec, **load)
        masked = prepared._replace(mask=prepared.mask if is_partial else None, end=end if may_end else None)
        tile = scores.compute(masked, q, keys(arrays.key), key, is_partial or may_end)  # S = QK^T, [block_q, Bk]
        return Tile(tile, keys(arrays.value))  # V [Bk, Dv]

    walk = functools.partial(ragged.over_keys, spec, tiles, arrays.lists, row)
    size = fixed_splits.tiles_of_split(tiles)
    split_walk = lambda i: functools.partial(walk, block_walk.FixedSplit(i, size))
    return Attention(prepared, tiles.block_q, functools.partial(walk, split), tile_at), split_walk
