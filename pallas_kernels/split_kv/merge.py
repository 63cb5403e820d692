"""Split-KV merge: combines the partial results of a row of queries, one for each split of its keys.

Programs of one warp take rows of the output in a grid-stride loop, as many as there are whose keys are split: a full
wave of programs where there are many (the prefix of a cascade), and none of them where nothing is split.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.softmax import LEAST_EXPONENT
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv import fixed_splits, planner
from pallas_kernels.split_kv.ragged import KvExtents, SplitPlan, SplitRow
from pallas_kernels.split_kv.work import (
    NUM_SPLIT_QUERIES,
    PagedOperands,
    RequestExtents,
    Requests,
    Work,
    queries_to_merge,
    query_to_merge,
    requests,
)
from pallas_kernels.triton.forward import RowVectors
from pallas_kernels.triton.head_chunks import Columns, chunks, load_lines, store_lines
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import A, Index, Ref


class Partials(NamedTuple, Generic[A]):
    """Partial results of splits: refs to out [slots, heads, rows, Dv], lse and stats [slots, heads, rows], float32."""

    out: A
    lse: A
    stats: tuple[A, ...] = ()

    @classmethod
    def from_arrays(cls, arrays: Sequence[A]) -> Partials[A]:
        """From out, lse and stats."""
        out, lse, *stats = arrays
        return cls(out, lse, tuple(stats))


LOADED_AT_ONCE = 8  # partial results of a row with splits of a constant number of keys
PARTIALS_PER_WARP = 16  # read at once: 64 registers of a thread at 128 columns
MAX_FEW_ROWS = 132  # up to which the merge needs more warps in a program to fill the GPU


def _at_once(spec: AttentionSpec, max_splits: int, rows: int) -> tuple[int, int]:
    """Partial results that a merge program reads at once, and its warps.

    A few rows may have many splits each.
    """
    if spec.config.batch_invariant:
        return 2, 1
    run = min(1 << (max_splits - 1).bit_length(), PARTIALS_PER_WARP if rows > MAX_FEW_ROWS else 4 * PARTIALS_PER_WARP)
    return max(run, 2), max(1, run // PARTIALS_PER_WARP)


def merge_row(
    spec: AttentionSpec, partials: Partials[Ref], run: int, slot: Index, count: Index, at: tuple[Index, Index]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Output [Dv], in chunks of columns, and lse and ``spec.stats`` of one row.

    Without a softmax, outputs add up, and the lse is 0.

    Args:
      run: How many are read at once, a power of two.
      slot: The first of the row; the others follow.
      count: How many there are; with none, the row is fully masked.
      at: Head and row of the partial results.
    """
    if spec.config.batch_invariant:
        return _merge_fixed_row(spec, partials, slot, count, at)
    zeros = tuple(jnp.zeros((width,), jnp.float32) for _, width in chunks(spec.Dv))
    scalar = lambda x: jnp.full((), x, jnp.float32)
    stats = tuple(scalar(_START[name]) for name in spec.stats)
    start = _Row(scalar(-jnp.inf), jnp.zeros((), jnp.float32), zeros, stats)
    runs = lax.div(count + (run - 1), run)
    row = lax.fori_loop(0, runs, functools.partial(_accumulate, spec, partials, run, (slot, count), at), start)
    if spec.normalize == "none":  # each lse is 0, so each weight 1; or NaN, which marks the row
        return row.sums, (jnp.where(row.max == -jnp.inf, 0.0, row.max),)
    empty = row.sum == 0.0
    safe = jnp.where(empty, 1.0, row.sum)
    columns = tuple(x / safe for x in row.sums)
    lse = jnp.where(empty, -jnp.inf, row.max + jnp.log(safe))
    final = {"max": lambda x: x, "entropy": lambda x: x / safe + jnp.log(safe)}
    stats = (final[name](x) for name, x in zip(spec.stats, row.stats, strict=True))
    return columns, (lse, *stats)


class _Row(NamedTuple):
    """The merge of some partial results."""

    max: jax.Array
    sum: jax.Array  # sum of the weights ``exp(lse - max)``
    sums: tuple[jax.Array, ...]  # sums of the weights times the outputs, in chunks of columns
    # for each of ``spec.stats``: the largest score; the sum of the weights times the entropy of each minus the
    # logarithm of its weight, of terms that are not negative
    stats: tuple[jax.Array, ...]


_START = {"max": -jnp.inf, "entropy": 0.0}  # of the row, and of what does not exist


def _accumulate(
    spec: AttentionSpec,
    partials: Partials[Ref],
    run: int,
    slots: tuple[Index, Index],
    at: tuple[Index, Index],
    n: Index,
    row: _Row,
) -> _Row:
    """Rescales the weighted sums of a row, and adds a run of partial results."""
    first_slot, count = slots
    i = n * run + lax.broadcasted_iota(jnp.int32, (run,), 0)
    exists, slot = i < count, first_slot + jnp.minimum(i, count - 1)
    lse = runner_of(spec).load(partials.lse.at[(slot, *at)], mask=exists, other=-jnp.inf)
    loaded = load_lines(spec, partials.out, (slot, *at), exists)  # before the lse are used: one latency covers both
    new_max = jnp.maximum(row.max, jnp.max(lse))
    safe_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    weight, alpha = jnp.exp(lse - safe_max), jnp.exp(row.max - safe_max)
    added = [x * alpha + jnp.sum(values * weight[:, None], axis=0) for x, values in zip(row.sums, loaded, strict=True)]
    row_sum, stats = row.sum * alpha + jnp.sum(weight), []
    for name, ref, x in zip(spec.stats, partials.stats, row.stats, strict=True):
        values = runner_of(spec).load(ref.at[(slot, *at)], mask=exists, other=_START[name])
        if name == "max":
            stats.append(jnp.maximum(x, jnp.max(values)))
        else:
            rescaled = (x - row.sum * _finite(row.max - safe_max)) * alpha
            stats.append(rescaled + jnp.sum(weight * (values - _finite(lse - safe_max))))
    return _Row(new_max, row_sum, tuple(added), tuple(stats))


def _finite(log_of_weight: jax.Array) -> jax.Array:
    """Logarithms of weights; of a weight of 0 a finite one, because 0 times -inf is NaN."""
    return jnp.maximum(log_of_weight, LEAST_EXPONENT)


def _merge_fixed_row(
    spec: AttentionSpec, partials: Partials[Ref], slot: Index, count: Index, at: tuple[Index, Index]
) -> tuple[Columns, RowVectors]:
    """Merges splits of a constant number of keys, in ascending order; otherwise like `merge_row`."""
    scalar = lambda x: jnp.full((), x, jnp.float32)
    zeros = tuple(jnp.zeros((width,), jnp.float32) for _, width in chunks(spec.Dv))
    exponent = scalar(0.0 if spec.normalize == "none" else -jnp.inf)
    start = fixed_splits.Sums(exponent, scalar(0.0), zeros, tuple(scalar(-jnp.inf) for _ in spec.stats))

    def load(i: jax.Array) -> fixed_splits.Sums:
        exists, here = i < count, slot + jnp.minimum(i, count - 1)
        vector = lambda ref, other: jnp.where(exists, ref[(here, *at)], other)
        row_sum, *row_max = partials.stats
        out = load_lines(spec, partials.out, (here, *at), exists)
        empty = 0.0 if spec.normalize == "none" else -jnp.inf
        max_values = tuple(vector(ref, -jnp.inf) for ref in row_max)
        return fixed_splits.Sums(vector(partials.lse, empty), vector(row_sum, 0.0), out, max_values)

    def run(n: jax.Array, sums: fixed_splits.Sums) -> fixed_splits.Sums:
        loaded = [load(n * LOADED_AT_ONCE + k) for k in range(LOADED_AT_ONCE)]  # before the first is used
        for other in loaded:
            sums = fixed_splits.add(sums, other)
        return sums

    return fixed_splits.finish(spec, lax.fori_loop(0, pl.cdiv(count, LOADED_AT_ONCE), run, start))


# --- few queries against contiguous keys


Results = Sequence[jax.Array]  # out, lse and stats, of splits or of rows


def merge_uniform(spec: AttentionSpec, splits: int, partials: Results, out_dtype: DTypeLike) -> Results:
    """Out, in the layout of the query, lse and stats [B, Hq, T], where every row has the same number of splits.

    Partial results are [B * splits, Hkv, rows, Dv] and [B * splits, Hkv, rows], those of a batch entry side by side.
    """
    lines = spec.group * spec.T
    run, warps = _at_once(spec, splits, spec.B * spec.Hkv * lines)
    return runner_of(spec).launch(
        functools.partial(_uniform_kernel, spec, splits, run),
        (Partials.from_arrays(partials),),
        result_shapes(spec, out_dtype),
        name="jflex_decode_merge",
        grid=(lines, spec.Hkv, spec.B),
        tiles=Tiles(run, run, warps, 1),
    )


def result_shapes(spec: AttentionSpec, out_dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """Shapes of out, in the layout of the query, and of lse and stats [B, Hq, T]."""
    vectors = [jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32)] * (1 + len(spec.stats))
    return [jax.ShapeDtypeStruct(spec.rows_shape(spec.Dv), out_dtype), *vectors]


def partial_shapes(spec: AttentionSpec, slots: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    """Shapes of partial results, float32: out [*slots, Dv], and lse and stats [*slots]."""
    count = (2 if spec.config.batch_invariant else 1) + len(spec.stats)  # see `fixed_splits.Sums.vectors`
    vectors = [jax.ShapeDtypeStruct(slots, jnp.float32)] * count
    return [jax.ShapeDtypeStruct((*slots, spec.Dv), jnp.float32), *vectors]


def merge_ragged(plan: SplitPlan, extents: KvExtents[jax.Array], partials: Results, result: Results) -> Results:
    """Writes the rows that are split into out, lse and stats [B, Hq, T], and returns these."""
    spec = plan.spec
    rows = spec.group * spec.T * plan.heads * min(plan.rows, plan.num_splits)  # an upper bound of the split rows
    run, warps = _at_once(spec, plan.max_splits, rows)
    return runner_of(spec).launch_in_place(
        functools.partial(_ragged_kernel, plan, run),
        (extents, Partials.from_arrays(partials)),
        tuple(result),
        name="jflex_decode_merge",
        grid=(min(rows, planner.MAX_MERGE_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
    )


def _uniform_kernel(spec: AttentionSpec, splits: int, run: int, partials: Partials[Ref], *result: Ref) -> None:
    line, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _merge_line(spec, run, partials, SplitRow(b, kv_h, b * splits, jnp.int32(splits)), (kv_h, line), result)


def _ragged_kernel(
    plan: SplitPlan, run: int, extents: KvExtents[Ref], partials: Partials[Ref], before: tuple[Ref, ...], *result: Ref
) -> None:
    del before  # the memory of the outputs
    spec = plan.spec
    lines = spec.group * spec.T
    _, splits = plan.splits(extents)
    rows = jnp.sum((splits > 1).astype(jnp.int32)) * (lines * plan.heads)

    def merge(number: jax.Array) -> None:
        line, row_head = lax.rem(number, lines), lax.div(number, lines)
        head, i = lax.rem(row_head, plan.heads), lax.div(row_head, plan.heads)
        _merge_line(spec, run, partials, plan.split_row(splits, i, head), (head, line), result)

    planner.grid_stride(planner.program_of(), rows, merge)


def _merge_line(
    spec: AttentionSpec,
    run: int,
    partials: Partials[Ref],
    row: SplitRow,
    location: tuple[Index, Index],
    result: Sequence[Ref],
) -> None:
    """Merges and stores one line of a split row; `location` is that of its partial results: head and line."""
    (out, *vector_refs), line = result, location[1]
    columns, vectors = merge_row(spec, partials, run, row.slot, row.splits, location)
    h, t = row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T)
    for ref, x in zip(vector_refs, vectors, strict=True):
        ref[row.b, h, t] = x
    store_lines(spec, out, (row.b, t, h) if spec.layout == "BTNH" else (row.b, h, t), columns)


# --- pages


def merge_splits(
    spec: AttentionSpec,
    work: Work,
    arrays: PagedOperands[jax.Array] | RequestExtents[jax.Array],
    result: Sequence[jax.Array],
    splits: Sequence[jax.Array],
    items: jax.Array | None = None,
) -> list[jax.Array]:
    """Writes the rows that have several splits into out [N, Hq, Dv], lse and stats [N, Hq], and returns these.

    With a table of work items, which counts their queries, nothing is planned where there are none.
    """
    extents, rows = RequestExtents(arrays.indptr, arrays.lengths), work.rows_to_merge(spec)
    run, warps = _at_once(spec, work.max_splits(spec), rows)
    return runner_of(spec).launch_in_place(
        functools.partial(_paged_kernel, spec, work, run),
        (extents, Partials.from_arrays(splits), items),
        tuple(result),
        name="jflex_paged_merge",
        grid=(min(rows, planner.MAX_MERGE_PROGRAMS if spec.B == 1 else planner.FEW_MERGE_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
    )


def _paged_kernel(
    spec: AttentionSpec,
    work: Work,
    run: int,
    extents: RequestExtents[Ref],
    splits: Partials[Ref],
    items: Ref | None,
    before: tuple[Ref, ...],
    *result: Ref,
) -> None:
    del before  # the memory of the outputs
    program, (out, *vector_refs) = planner.program_of(), result

    def merge(planned: Requests, number: jax.Array) -> None:
        h = lax.rem(number, spec.Hq)
        row = query_to_merge(spec, work, planned, lax.div(number, spec.Hq))
        at = lax.div(h, spec.group), row.t * spec.group + lax.rem(h, spec.group)
        columns, vectors = merge_row(spec, splits, run, row.slot, row.splits, at)
        n = jnp.minimum(row.n, spec.T - 1)
        for ref, x in zip(vector_refs, vectors, strict=True):
            ref[n, h] = x
        store_lines(spec, out, (n, h), columns)

    def merge_all() -> None:
        planned = requests(spec, work, extents)
        rows = jnp.sum(queries_to_merge(planned)) * spec.Hq
        planner.grid_stride(program, rows, functools.partial(merge, planned))

    merge_all() if items is None else pl.when(items[0, NUM_SPLIT_QUERIES] * spec.Hq > program[0])(merge_all)
