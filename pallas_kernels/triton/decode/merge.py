"""The second kernel of decoding: joins what several programs found of one row of queries, each over a part of the keys.

Programs of one warp take one row of the output after the other, as many rows as there are to merge: where lengths say
that nothing was divided, they end at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import split_kv
from pallas_kernels.triton.decode.ragged import Divided, Division, Facts
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.split_merge import Parts, merge_row, parts_at_once

Found = tuple[jax.Array, jax.Array]  # out and lse, of parts or of rows


def merge_even(spec: AttentionSpec, parts: int, kept: Found, out_dtype: Any) -> Found:
    """Out, in the layout of the query, and lse [B, Hq, T], where every row has as many parts.

    Args:
      spec: The spec.
      parts: How many.
      kept: Out [B * parts, Hkv, rows, Dv] and lse [B * parts, Hkv, rows], those of a batch entry side by side.
      out_dtype: Of the output.
    """
    lines = spec.group * spec.T
    run, warps = parts_at_once(parts, spec.B * spec.Hkv * lines)
    out, lse = launch(
        functools.partial(_even_kernel, spec, parts, run),
        (Parts(*kept),),
        [
            jax.ShapeDtypeStruct(spec.rows_shape(spec.Dv), out_dtype),
            jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32),
        ],
        name="jflex_decode_merge",
        grid=(lines, spec.Hkv, spec.B),
        tiles=Tiles(run, run, warps, 1),
        interpret=spec.config.interpret,
    )
    return out, lse


def merge_uneven(division: Division, facts: Facts, kept: Found, found: Found) -> Found:
    """Writes the rows that are divided into out and lse [B, Hq, T], and returns these."""
    spec = division.spec
    first_output = len(jax.tree.leaves((facts, kept)))
    rows = spec.group * spec.T * division.heads * division.divided
    run, warps = parts_at_once(division.most_parts, rows)
    out, lse = launch(
        functools.partial(_uneven_kernel, division, run),
        (facts, Parts(*kept), found),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found],
        name="jflex_decode_merge",
        grid=(min(rows, split_kv.MERGING_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
        interpret=spec.config.interpret,
        aliases={first_output: 0, first_output + 1: 1},
    )
    return out, lse


def _even_kernel(spec: AttentionSpec, parts: int, run: int, kept: Parts, out: Any, lse: Any) -> None:
    line, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _merge_line(spec, run, kept, Divided(b, kv_h, b * parts, jnp.int32(parts)), (kv_h, line), (out, lse))


def _uneven_kernel(division: Division, run: int, facts: Facts, kept: Parts, before: Any, out: Any, lse: Any) -> None:
    del before  # the memory of `out` and `lse`
    spec = division.spec
    lines = spec.group * spec.T
    _, parts = division.parts(facts)
    rows = jnp.sum((parts > 1).astype(jnp.int32)) * (lines * division.heads)

    def merge(number: jax.Array) -> None:
        line, within = lax.rem(number, lines), lax.div(number, lines)
        head, nth = lax.rem(within, division.heads), lax.div(within, division.heads)
        _merge_line(spec, run, kept, division.divided_row(parts, nth, head), (head, line), (out, lse))

    split_kv.by_turns(rows, merge)


def _merge_line(
    spec: AttentionSpec, run: int, kept: Parts, row: Divided, here: tuple[Any, Any], found: tuple[Any, Any]
) -> None:
    """Merges and stores one line of a divided row; `here` is where it is kept: head and line."""
    (out, lse), line = found, here[1]
    columns, row_lse = merge_row(kept, run, row.slot, row.parts, here)
    h, t = row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T)
    lse[row.b, h, t] = row_lse
    for (first, width), x in zip(chunks(spec.Dv), columns, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
        at = (row.b, t, h, column) if spec.layout == "BTNH" else (row.b, h, t, column)
        plgpu.store(out.at[at], x.astype(out.dtype), mask=column < spec.Dv)
