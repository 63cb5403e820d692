"""Joins what several programs found of one tile of queries, each over a part of the keys.

Programs of one warp take pairs of a query and a query head by turns, as many as there are whose keys are divided: all
that the GPU runs at once where there are many (the prefix of a cascade), and none of them where nothing is divided.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.config import Tiles
from pallas_kernels.triton import split_kv
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.paged.work import (
    AttentionSpec,
    Facts,
    PagedArrays,
    Work,
    queries_to_merge,
    query_to_merge,
    requests,
)
from pallas_kernels.triton.split_merge import Parts, merge_row, parts_at_once


def merge_parts(
    spec: AttentionSpec,
    work: Work,
    arrays: PagedArrays,
    found: Sequence[jax.Array],
    parts: Sequence[jax.Array],
) -> list[jax.Array]:
    """Writes the rows that have several parts into out [N, Hq, Dv] and lse [N, Hq], and returns these."""
    a = spec
    facts, rows = Facts(arrays.indptr, arrays.lengths), work.rows_to_merge(spec)
    run, warps = parts_at_once(work.most_parts(spec), rows)
    return launch(
        functools.partial(_kernel, spec, work, run),
        (facts, Parts(*parts), tuple(found)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found],
        name="jflex_paged_merge",
        grid=(min(rows, split_kv.MERGING_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
        interpret=a.config.interpret,
        aliases={4: 0, 5: 1},
    )


def _kernel(
    spec: AttentionSpec, work: Work, run: int, facts: Facts, parts: Parts, before: Any, out: Any, lse: Any
) -> None:
    del before  # the memory of `out` and `lse`
    a = spec
    of = requests(spec, work, facts)
    rows = jnp.sum(queries_to_merge(of)) * a.Hq

    def merge(number: jax.Array) -> None:
        h = lax.rem(number, a.Hq)
        row = query_to_merge(spec, work, of, lax.div(number, a.Hq))
        line = row.t * a.group + lax.rem(h, a.group)
        columns, row_lse = merge_row(parts, run, row.slot, row.parts, (lax.div(h, a.group), line))
        n = jnp.minimum(row.n, a.T - 1)
        lse[n, h] = row_lse
        for (first, width), x in zip(chunks(a.Dv), columns, strict=True):
            column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
            plgpu.store(out.at[(n, h, column)], x.astype(out.dtype), mask=column < a.Dv)

    split_kv.by_turns(rows, merge)
