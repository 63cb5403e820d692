"""The merge kernel of paged split-KV: combines the partial results of a tile of queries, one for each split.

Programs of one warp take pairs of a query and a query head in a grid-stride loop, as many as there are whose keys are
split: a full wave of programs where there are many (the prefix of a cascade), and none of them where nothing is split.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import Tiles
from pallas_kernels.triton import fixed_splits, language, split_kv
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.paged.work import (
    AttentionSpec,
    PagedOperands,
    RequestExtents,
    Work,
    queries_to_merge,
    query_to_merge,
    requests,
)
from pallas_kernels.triton.split_merge import Partials, merge_row, partials_at_once
from pallas_kernels.types import Ref


def merge_splits(
    spec: AttentionSpec,
    work: Work,
    arrays: PagedOperands[jax.Array] | RequestExtents[jax.Array],
    result: Sequence[jax.Array],
    splits: Sequence[jax.Array],
) -> list[jax.Array]:
    """Writes the rows that have several splits into out [N, Hq, Dv], lse and stats [N, Hq], and returns these."""
    extents, rows = RequestExtents(arrays.indptr, arrays.lengths), work.rows_to_merge(spec)
    run, warps = (2, 1) if work.fixed_splits else partials_at_once(work.max_splits(spec), rows)
    return launch(
        functools.partial(_kernel, spec, work, run),
        (extents, Partials.of(splits), tuple(result)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in result],
        name="jflex_paged_merge",
        grid=(min(rows, split_kv.MAX_MERGE_PROGRAMS),),
        tiles=Tiles(run, run, warps, 1),
        spec=spec,
        aliases={2 + len(splits) + n: n for n in range(len(result))},
    )


def _kernel(
    spec: AttentionSpec,
    work: Work,
    run: int,
    extents: RequestExtents[Ref],
    splits: Partials[Ref],
    before: tuple[Ref, ...],
    out: Ref,
    *of_vectors: Ref,
) -> None:
    del before  # the memory of the outputs
    a = spec
    of = requests(spec, work, extents)
    rows = jnp.sum(queries_to_merge(of)) * a.Hq

    def merge(number: jax.Array) -> None:
        h = lax.rem(number, a.Hq)
        row = query_to_merge(spec, work, of, lax.div(number, a.Hq))
        line = row.t * a.group + lax.rem(h, a.group)
        at = lax.div(h, a.group), line
        if work.fixed_splits:
            columns, vectors = fixed_splits.merge_row(spec, splits, row.slot, row.splits, at)
        else:
            columns, vectors = merge_row(spec, splits, run, row.slot, row.splits, at)
        n = jnp.minimum(row.n, a.T - 1)
        for ref, x in zip(of_vectors, vectors, strict=True):
            ref[n, h] = x
        for (first, width), x in zip(chunks(a.Dv), columns, strict=True):
            column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
            language.store(spec.route, out.at[(n, h, column)], x.astype(out.dtype), mask=column < a.Dv)

    split_kv.grid_stride(rows, merge)
