"""Attention of packed, ragged queries over paged keys: decoding steps and prefill chunks of many requests in one call.

The rows of a tile are queries of one request, of all query heads that share a key head, so that keys are read once for
them (Ye et al. 2025, arXiv:2501.01005, section 3.1). A program computes one KV split of such a tile, looks up physical
pages as it walks, and writes the output, or, where a tile has several splits, a partial result that `merge_splits`
combines. Requests with few queries and with many are taken by launches with tiles of their own. The grid is one axis of
(work items, key heads), the heads of an item side by side, so that programs without work come last; `work` says what a
work item is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.plan import exceeds_pallas_indexing
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv import byte_pairs, fixed_splits, planner
from pallas_kernels.split_kv.key_rows import KeyRows
from pallas_kernels.split_kv.merge import merge_splits, partial_shapes
from pallas_kernels.split_kv.work import (
    PagedOperands,
    QueryBlocks,
    QueryRows,
    Requests,
    Work,
    WorkItem,
    item_of,
    requests,
    visited_tiles,
)
from pallas_kernels.triton import scores, vectors
from pallas_kernels.triton.containment import any_nan
from pallas_kernels.triton.forward import Attention, RowVectors, Tile, Walk
from pallas_kernels.triton.head_chunks import Columns, key_chunks, load_lines, store_lines, value_chunks
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Ref, S

MIN_WGMMA_ROWS = 64


def paged(spec: AttentionSpec, works: tuple[Work, ...], arrays: PagedOperands[jax.Array]) -> list[jax.Array]:
    """Computes out [N, Hq, Dv], lse, float32 [N, Hq], and ``spec.stats``, like the lse.

    Programs are traced with heads in rows. Each request is taken by one of the launches.
    """
    return repair(spec, works, arrays, attend(spec, works, arrays, []))


def attend(
    spec: AttentionSpec, works: tuple[Work, ...], arrays: PagedOperands[jax.Array], result: list[jax.Array]
) -> list[jax.Array]:
    """The results of these launches, before repairs, beside `result` of other requests, if it has any."""
    for work in works:
        outputs = _attend(_with_pairs(spec, work), work, arrays, result)
        result, splits = outputs[: 2 + len(spec.stats)], outputs[2 + len(spec.stats) :]
        if splits:
            result = merge_splits(spec, work, arrays, result, splits)
    return result


def repair(
    spec: AttentionSpec, works: tuple[Work, ...], arrays: PagedOperands[jax.Array], result: list[jax.Array]
) -> list[jax.Array]:
    """The results of these launches, with what masked NaN reached computed again (`pallas_kernels.softmax`)."""
    for work in works if spec.needs_marks else ():
        result = _repair(_with_pairs(spec, work), work, arrays, result)
    return result


def _with_pairs(spec: AttentionSpec, work: Work) -> AttentionSpec:
    """The spec of a launch, which loads eight bits in pairs where its rows are too few for wgmma.

    What feeds wgmma goes through shared memory in 16 bits in any case. H100, jax 0.11.2, 2048 causal queries at the end
    of 8192 keys, Hq 32, Hkv 8, D 128, in pairs and otherwise: e4m3 1032 and 1188 us, int8 1017 and 881. Latent vectors,
    of 512 and 64 columns, take 828 SASS instructions in pairs with 16 rows, 1170 otherwise; with 64 rows pairs spill
    1428 bytes. What Pallas reaches as words alone is loaded so in any case.
    """
    few = work.tiles.block_q < MIN_WGMMA_ROWS
    too_large = not spec.has_latent_tiles and any(
        exceeds_pallas_indexing(spec.paged_rows * size) for size in (spec.D, spec.Dv)
    )
    return spec.replace(pairs=few or too_large)


def _attend(
    spec: AttentionSpec, work: Work, arrays: PagedOperands[jax.Array], before: list[jax.Array]
) -> list[jax.Array]:
    per_row = lambda *shape: [jax.ShapeDtypeStruct(shape, jnp.float32)] * (1 + len(spec.stats))
    outputs = [jax.ShapeDtypeStruct((spec.T, spec.Hq, spec.Dv), spec.out_dtype), *per_row(spec.T, spec.Hq)]
    if work.max_splits(spec) > 1:
        outputs += partial_shapes(spec, (work.slots(spec), spec.Hkv, work.tiles.block_q))
    programs = spec.Hkv * work.num_items(spec)
    if spec.config.batch_invariant:
        programs = min(programs, fixed_splits.MAX_PROGRAMS)
    return _launch(_kernel, spec, work, arrays, before, outputs, "jflex_paged", programs)


def _repair(
    spec: AttentionSpec, work: Work, arrays: PagedOperands[jax.Array], result: list[jax.Array]
) -> list[jax.Array]:
    """Recomputes the tiles of queries that have an lse of NaN, without splits; see `containment`."""
    work = dataclasses.replace(work, may_split=False, tiles=dataclasses.replace(work.tiles, num_stages=1))
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in result]
    programs = QueryBlocks(spec, work).programs
    return _launch(_repair_kernel, spec, work, arrays, result, outputs, "jflex_paged_repair", programs)


def _launch(
    kernel: Callable[..., None],
    spec: AttentionSpec,
    work: Work,
    arrays: PagedOperands[jax.Array],
    before: list[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    name: str,
    programs: int,
) -> list[jax.Array]:
    """Runs a kernel on a grid of one axis; `before` is the memory of the first outputs."""
    count = len(jax.tree.leaves(arrays))
    if spec.holds_pairs(spec.D, spec.vector_programs.key):
        arrays = arrays._replace(key=byte_pairs.words(arrays.key))
    if spec.holds_pairs(spec.Dv, spec.vector_programs.value) and not spec.values_in_keys:
        arrays = arrays._replace(value=byte_pairs.words(arrays.value))
    return runner_of(spec).launch(
        functools.partial(kernel, spec, work),
        (arrays, before),
        outputs,
        name=name,
        grid=(programs,),
        tiles=work.tiles,
        aliases={count + n: n for n in range(len(before))},
    )


class _WorkTile(NamedTuple):
    """A program: its work item, the rows of that, and their attention."""

    item: WorkItem
    row: QueryRows
    attention: Attention

    @classmethod
    def from_number(
        cls, spec: AttentionSpec, work: Work, arrays: PagedOperands[Ref], number: jax.Array, planned: Requests
    ) -> _WorkTile:
        """From a number of work item and key head."""
        kv_h, item = lax.rem(number, spec.Hkv), lax.div(number, spec.Hkv)
        work_item = item_of(spec, work, planned, item)
        if spec.max_pages == 1:  # looked up once, so that the loads of the loop depend on no other
            work_item = work_item._replace(page=arrays.table[(work_item.request, 0)])
        row = work_item.rows(spec, work, kv_h)
        q, q_scale = _scaled_queries(spec, arrays.query, row)
        request, end, (h, q_idx) = work_item.request, work_item.length, (row.h[:, None], row.n[:, None])
        prepared = scores.prepare(spec, arrays.of_mods(), work.tiles.shape, request, h, q=q_idx, end=end)

        prepare_vectors = lambda program, refs: (
            None if program is None else vectors.prepare(spec, program, refs, work.tiles.block_kv, request, kv_h)
        )
        key_vectors = prepare_vectors(spec.vector_programs.key, arrays.captured.key)
        value_vectors = prepare_vectors(spec.vector_programs.value, arrays.captured.value)
        key_head = jnp.zeros_like(kv_h) if spec.values_in_keys else kv_h  # all heads share one

        def tile_at(key: jax.Array, is_partial: bool) -> Tile:
            at = KeyRows.look_up(spec, arrays, work_item, key_head, key, work.tiles.block_kv, may_end=is_partial)
            if spec.has_latent_tiles:
                k, k_scales = at.load_latents(arrays)  # K [Bk, D]
            else:
                k, k_scale = at.load_scaled(arrays.key, arrays.key_scale, key_vectors)
                k_scales = None if k_scale is None else (k_scale,)
            product = None if k_scales is None else functools.partial(byte_pairs.qk_product, spec, k_scales, q_scale)
            result = scores.compute(prepared, q, k, key, is_partial, product)  # S = QK^T, [block_q, Bk]
            if spec.values_in_keys:
                return Tile(result, k[: len(value_chunks(spec))], k_scales)
            v, v_scale = at.load_scaled(arrays.value, arrays.value_scale, value_vectors, weighs=True)  # V [Bk, Dv]
            return Tile(result, v, None if v_scale is None else (v_scale,))

        walk = functools.partial(_over_keys, spec, work, prepared, work_item)
        return cls(work_item, row, Attention(prepared, work.tiles.block_q, walk, tile_at))

    def fixed_splits(self, work: Work) -> tuple[Callable[[Index], Walk], Index, Index]:
        """The walk of each split of a constant number of keys, and which of them this program computes.

        All tiles are walked by one loop, which masks: in loops of their own, tiles that no row is masked in might be
        compiled to other arithmetic, and whether a tile is one depends on the other rows.
        """
        item, tile, prepared = self.item, work.tiles.block_kv, self.attention.prepared
        visited, size = visited_tiles(prepared.spec, tile, prepared.mask, item), fixed_splits.tiles_of_split(work.tiles)

        def split_walk(i: Index) -> Walk:
            begin, end = jnp.maximum(visited.first, i * size), jnp.minimum(visited.last, (i + 1) * size)
            return lambda state, step: lax.fori_loop(begin, end, lambda t, s: step(s, t * tile, True), state)

        is_split = item.splits > 1
        begin = jnp.full((), visited.first, jnp.int32) if isinstance(visited.first, int) else visited.first
        first = jnp.where(is_split, item.split, lax.div(begin, jnp.int32(size)))
        last = jnp.where(is_split, item.split + 1, lax.div(visited.last + (size - 1), jnp.int32(size)))
        return split_walk, first, last

    def store(
        self,
        refs: Sequence[Ref],
        columns: Columns,
        row_vectors: RowVectors,
        *,
        whole: jax.Array,
        keeps: jax.Array | None = None,
    ) -> None:
        """Stores the rows to the refs of out, lse and stats; outputs where `keeps` is true stay as they are.

        Padding rows repeat others, and are stored like them: masked stores must not alias them, for Pallas' interpreter
        writes the old values there.
        """
        row, whole, spec = self.row, jnp.broadcast_to(whole, row_vectors[0].shape), self.attention.spec
        out, *per_row = refs
        for ref, x in zip(per_row, row_vectors, strict=True):
            runner_of(spec).store(ref.at[(row.n, row.h)], x, mask=whole)
        mask = whole if keeps is None else whole & ~keeps
        store_lines(spec, out, (row.n, row.h), columns, mask, value_chunks(spec))


def _kernel(
    spec: AttentionSpec,
    work: Work,
    arrays: PagedOperands[Ref],
    before: list[Ref],
    *refs: Ref,  # out [N, Hq, Dv], lse and stats [N, Hq]; partial results, [slots, Hkv, block_q] in place of [N, Hq]
) -> None:
    del before  # the memory of the outputs but partial results
    planned, number, count = requests(spec, work, arrays), pl.program_id(0), 2 + len(spec.stats)
    items = jnp.sum(planned.tiles * planned.splits) * spec.Hkv

    def compute(number: jax.Array) -> None:
        tile = _WorkTile.from_number(spec, work, arrays, number, planned)
        if spec.config.batch_invariant:
            sums = fixed_splits.attend(tile.attention, *tile.fixed_splits(work))
            result, partial = fixed_splits.finish(spec, sums), (sums.out, sums.vectors)
        else:
            result = partial = tile.attention.attend()
        tile.store(refs[:count], *result, whole=(tile.item.queries > 0) & (tile.item.splits == 1))
        if len(refs) > count:
            _store_partial(tile, refs[count:], number, *partial)

    if spec.config.batch_invariant:
        planner.grid_stride(planner.program_of(), items, compute)
    else:
        # H200: 256 requests, two of them prompts in 2048 queries: this launch 218 us, and 182 where other programs end.
        pl.when(number < items)(lambda: compute(number))


def _store_partial(
    program: _WorkTile, refs: Sequence[Ref], number: jax.Array, columns: Columns, row_vectors: RowVectors
) -> None:
    """Stores the partial result of an item, if its keys are split: out and vectors."""
    (partial_out, *per_row), item, spec = refs, program.item, program.attention.spec
    kv_h = lax.rem(number, spec.Hkv)
    i = lax.broadcasted_iota(jnp.int32, (program.attention.rows,), 0)
    is_split = program.row.exists & (item.splits > 1)
    for ref, x in zip(per_row, row_vectors, strict=True):
        runner_of(spec).store(ref.at[(item.slot, kv_h, i)], x, mask=is_split)
    store_lines(spec, partial_out, (item.slot, kv_h, i), columns, is_split, value_chunks(spec))


def _repair_kernel(spec: AttentionSpec, work: Work, arrays: PagedOperands[Ref], before: list[Ref], *refs: Ref) -> None:
    blocks, program = QueryBlocks(spec, work), pl.program_id(0)
    block, kv_h = lax.div(program, spec.Hkv), lax.rem(program, spec.Hkv)

    def fix(item: jax.Array, planned: Requests) -> None:
        tile = _WorkTile.from_number(spec, work, arrays, item * spec.Hkv + kv_h, planned)
        row_lse = runner_of(spec).load(before[1].at[(tile.row.n, tile.row.h)])
        marked = (row_lse != row_lse) & (tile.item.queries > 0)  # others stay, to the last bit
        pl.when(any_nan(row_lse) & (tile.item.queries > 0))(lambda: _fix(tile, work, refs, marked))

    def fix_block() -> None:
        planned = requests(spec, work, arrays)
        first, end = blocks.items(planned, block)
        lax.fori_loop(first, end, lambda item, state: (fix(item, planned), state)[1], jnp.int32(0))

    pl.when(blocks.has_marks(before[1], block, kv_h))(fix_block)


def _fix(program: _WorkTile, work: Work, refs: Sequence[Ref], marked: jax.Array) -> None:
    """Computes a tile of queries again, and stores the rows that are marked."""
    spec = program.attention.spec
    if spec.config.batch_invariant:
        columns, row_vectors, attended = fixed_splits.repair(program.attention, *program.fixed_splits(work))
    else:
        columns, row_vectors, attended = program.attention.repair()
    program.store(refs, columns, row_vectors, whole=marked, keeps=attended.bad > 0.0)


def _scaled_queries(spec: AttentionSpec, ref: Ref, row: QueryRows) -> tuple[Columns, jax.Array | None]:
    """The queries of the rows, and what the product of those in float16 is to be multiplied by, if they were scaled."""
    q = load_lines(spec, ref, (row.n, row.h), pieces=key_chunks(spec))
    if not spec.holds_pairs(spec.D, spec.vector_programs.key):
        return q, None
    count = len(value_chunks(spec)) if spec.has_latent_tiles else len(q)  # rotated columns are no pairs
    scaled, factor = byte_pairs.in_float16(q[:count])
    return (*scaled, *q[count:]), factor


def _over_keys(
    spec: AttentionSpec,
    work: Work,
    prepared: scores.Scores,
    work_item: WorkItem,
    state: S,
    step: Callable[[S, jax.Array, bool], S],
) -> S:
    """Folds a step over this program's split of the tiles that its rows visit."""
    tile = work.tiles.block_kv
    visited = visited_tiles(spec, tile, prepared.mask, work_item)
    start, end = planner.split_range(visited.last - visited.first, work_item.split, work_item.splits)
    start, end = visited.first + start, visited.first + end
    inside = lambda x: jnp.minimum(jnp.maximum(x, start), end)
    first_whole, last_whole = inside(visited.first_whole), inside(visited.last_whole)
    partial = lambda t, state: step(state, t * tile, True)
    if prepared.mask is not None:
        state = lax.fori_loop(start, first_whole, partial, state)
    state = lax.fori_loop(first_whole, last_whole, lambda t, state: step(state, t * tile, False), state)
    return lax.fori_loop(jnp.maximum(last_whole, start), end, partial, state)
