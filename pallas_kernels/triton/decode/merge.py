"""The merge kernel of split-KV decoding: combines the partial results of a row of queries, one for each split.

Programs of one warp take rows of the output in a grid-stride loop, as many rows as there are to merge: where no row was
split, they exit at once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import language, split_kv
from pallas_kernels.triton.decode.ragged import KvExtents, SplitPlan, SplitRow
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.split_merge import Partials, merge_row, partials_at_once
from pallas_kernels.types import Index, Ref

OutAndLse = tuple[jax.Array, jax.Array]  # of splits or of rows


def merge_uniform(spec: AttentionSpec, splits: int, partials: OutAndLse, out_dtype: DTypeLike) -> OutAndLse:
    """Out, in the layout of the query, and lse [B, Hq, T], where every row has the same number of splits.

    Args:
      spec: The spec.
      splits: How many.
      partials: Out [B * splits, Hkv, rows, Dv] and lse [B * splits, Hkv, rows], those of a batch entry side by side.
      out_dtype: Of the output.
    """
    lines = spec.group * spec.T
    run, warps = partials_at_once(splits, spec.B * spec.Hkv * lines)
    out, lse = launch(
        functools.partial(_uniform_kernel, spec, splits, run),
        (Partials(*partials),),
        [
            jax.ShapeDtypeStruct(spec.rows_shape(spec.Dv), out_dtype),
            jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32),
        ],
        name="jflex_decode_merge",
        grid=(lines, spec.Hkv, spec.B),
        tiles=Tiles(run, run, warps, 1),
        spec=spec,
    )
    return out, lse


def merge_ragged(plan: SplitPlan, extents: KvExtents[jax.Array], partials: OutAndLse, result: OutAndLse) -> OutAndLse:
    """Writes the rows that are split into out and lse [B, Hq, T], and returns these."""
    spec = plan.spec
    first_output = len(jax.tree.leaves((extents, partials)))
    rows = spec.group * spec.T * plan.heads * plan.max_split_rows
    run, warps = partials_at_once(plan.max_splits, rows)
    out, lse = launch(
        functools.partial(_ragged_kernel, plan, run),
        (extents, Partials(*partials), result),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in result],
        name="jflex_decode_merge",
        grid=(min(rows, split_kv.MAX_MERGE_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
        spec=spec,
        aliases={first_output: 0, first_output + 1: 1},
    )
    return out, lse


def _uniform_kernel(spec: AttentionSpec, splits: int, run: int, partials: Partials[Ref], out: Ref, lse: Ref) -> None:
    line, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _merge_line(spec, run, partials, SplitRow(b, kv_h, b * splits, jnp.int32(splits)), (kv_h, line), (out, lse))


def _ragged_kernel(
    plan: SplitPlan, run: int, extents: KvExtents[Ref], partials: Partials[Ref], before: OutAndLse, out: Ref, lse: Ref
) -> None:
    del before  # the memory of `out` and `lse`
    spec = plan.spec
    lines = spec.group * spec.T
    _, splits = plan.splits(extents)
    rows = jnp.sum((splits > 1).astype(jnp.int32)) * (lines * plan.heads)

    def merge(number: jax.Array) -> None:
        line, rest = lax.rem(number, lines), lax.div(number, lines)
        head, i = lax.rem(rest, plan.heads), lax.div(rest, plan.heads)
        _merge_line(spec, run, partials, plan.split_row(splits, i, head), (head, line), (out, lse))

    split_kv.grid_stride(rows, merge)


def _merge_line(
    spec: AttentionSpec,
    run: int,
    partials: Partials[Ref],
    row: SplitRow,
    location: tuple[Index, Index],
    result: tuple[Ref, Ref],
) -> None:
    """Merges and stores one line of a split row; `location` is that of its partial results: head and line."""
    (out, lse), line = result, location[1]
    columns, row_lse = merge_row(spec, partials, run, row.slot, row.splits, location)
    h, t = row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T)
    lse[row.b, h, t] = row_lse
    for (first, width), x in zip(chunks(spec.Dv), columns, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
        at = (row.b, t, h, column) if spec.layout == "BTNH" else (row.b, h, t, column)
        language.store(spec.route, out.at[at], x.astype(out.dtype), mask=column < spec.Dv)
