"""The merge kernel of split-KV decoding: combines the partial results of a row of queries, one for each split.

Programs of one warp take rows of the output in a grid-stride loop, as many rows as there are to merge: where no row was
split, they exit at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import fixed_splits, language, split_kv
from pallas_kernels.triton.decode.ragged import KvExtents, SplitPlan, SplitRow
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.split_merge import Partials, merge_row, partials_at_once
from pallas_kernels.types import Index, Ref

Results = Sequence[jax.Array]  # out, lse and stats, of splits or of rows


def merge_uniform(spec: AttentionSpec, splits: int, partials: Results, out_dtype: DTypeLike) -> Results:
    """Out, in the layout of the query, lse and stats [B, Hq, T], where every row has the same number of splits.

    Args:
      spec: The spec.
      splits: How many.
      partials: Out [B * splits, Hkv, rows, Dv], and lse and stats [B * splits, Hkv, rows], those of a batch entry side
        by side.
      out_dtype: Of the output.
    """
    lines = spec.group * spec.T
    run, warps = _at_once(spec, splits, spec.B * spec.Hkv * lines)
    return launch(
        functools.partial(_uniform_kernel, spec, splits, run),
        (Partials.of(partials),),
        result_shapes(spec, out_dtype),
        name="jflex_decode_merge",
        grid=(lines, spec.Hkv, spec.B),
        tiles=Tiles(run, run, warps, 1),
        spec=spec,
    )


def result_shapes(spec: AttentionSpec, out_dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """Of out, in the layout of the query, and of lse and stats [B, Hq, T]."""
    vectors = [jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32)] * (1 + len(spec.stats))
    return [jax.ShapeDtypeStruct(spec.rows_shape(spec.Dv), out_dtype), *vectors]


def merge_ragged(plan: SplitPlan, extents: KvExtents[jax.Array], partials: Results, result: Results) -> Results:
    """Writes the rows that are split into out, lse and stats [B, Hq, T], and returns these."""
    spec = plan.spec
    first_output = len(jax.tree.leaves((extents, partials)))
    rows = spec.group * spec.T * plan.heads * plan.max_split_rows
    run, warps = _at_once(spec, plan.max_splits, rows)
    return launch(
        functools.partial(_ragged_kernel, plan, run),
        (extents, Partials.of(partials), tuple(result)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in result],
        name="jflex_decode_merge",
        grid=(min(rows, split_kv.MAX_MERGE_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
        spec=spec,
        aliases={first_output + n: n for n in range(len(result))},
    )


def _at_once(spec: AttentionSpec, max_splits: int, rows: int) -> tuple[int, int]:
    return (2, 1) if spec.config.batch_invariant else partials_at_once(max_splits, rows)


def _uniform_kernel(spec: AttentionSpec, splits: int, run: int, partials: Partials[Ref], *result: Ref) -> None:
    line, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _merge_line(spec, run, partials, SplitRow(b, kv_h, b * splits, jnp.int32(splits)), (kv_h, line), result)


def _ragged_kernel(
    plan: SplitPlan,
    run: int,
    extents: KvExtents[Ref],
    partials: Partials[Ref],
    before: tuple[Ref, ...],
    *result: Ref,
) -> None:
    del before  # the memory of the outputs
    spec = plan.spec
    lines = spec.group * spec.T
    _, splits = plan.splits(extents)
    rows = jnp.sum((splits > 1).astype(jnp.int32)) * (lines * plan.heads)

    def merge(number: jax.Array) -> None:
        line, rest = lax.rem(number, lines), lax.div(number, lines)
        head, i = lax.rem(rest, plan.heads), lax.div(rest, plan.heads)
        _merge_line(spec, run, partials, plan.split_row(splits, i, head), (head, line), result)

    split_kv.grid_stride(rows, merge)


def _merge_line(
    spec: AttentionSpec,
    run: int,
    partials: Partials[Ref],
    row: SplitRow,
    location: tuple[Index, Index],
    result: Sequence[Ref],
) -> None:
    """Merges and stores one line of a split row; `location` is that of its partial results: head and line."""
    (out, *of_vectors), line = result, location[1]
    if spec.config.batch_invariant:
        columns, vectors = fixed_splits.merge_row(spec, partials, row.slot, row.splits, location)
    else:
        columns, vectors = merge_row(spec, partials, run, row.slot, row.splits, location)
    h, t = row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T)
    for ref, x in zip(of_vectors, vectors, strict=True):
        ref[row.b, h, t] = x
    for (first, width), x in zip(chunks(spec.Dv), columns, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
        at = (row.b, t, h, column) if spec.layout == "BTNH" else (row.b, h, t, column)
        language.store(spec.route, out.at[at], x.astype(out.dtype), mask=column < spec.Dv)
