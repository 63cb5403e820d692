"""Joins what several programs found of one tile of queries, each over a part of the keys.

One program for a query head: it takes the queries of a tile one after the other, and reads all parts of one, some at
once. The grid is one axis of (tiles of queries with several parts, query heads).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.setting import Tiles
from pallas_kernels.triton.columns import chunks
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.paged_rows import Facts, PagedArrays, PagedSetting, Work, place_to_merge
from pallas_kernels.triton.parts import Parts, merge_row

RUN = 16  # parts read at once


def merge_parts(
    setting: PagedSetting,
    work: Work,
    arrays: PagedArrays,
    found: Sequence[jax.Array],
    parts: Sequence[jax.Array],
) -> list[jax.Array]:
    """Writes the rows that have several parts into out [N, Hq, Dv] and lse [N, Hq], and returns these."""
    a = setting.attention
    facts = Facts(arrays.indptr, arrays.lengths)
    return launch(
        functools.partial(_kernel, setting, work),
        (facts, Parts(*parts), tuple(found)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found],
        name="jflex_paged_merge",
        grid=(a.Hq * min(work.row_tiles(setting), work.shares(setting)),),
        tiles=Tiles(RUN, RUN, 1, 1),
        interpret=a.interpret,
        aliases={4: 0, 5: 1},
    )


def _kernel(setting: PagedSetting, work: Work, facts: Facts, parts: Parts, before: Any, out: Any, lse: Any) -> None:
    del before  # the memory of `out` and `lse`
    a = setting.attention
    h, tile = lax.rem(pl.program_id(0), a.Hq), lax.div(pl.program_id(0), a.Hq)
    here = place_to_merge(setting, work, facts, tile)
    kv_h, member = lax.div(h, a.group), lax.rem(h, a.group)

    def query(t: Any, done: Any) -> Any:
        columns, row_lse = merge_row(parts, RUN, here.slot, here.parts, (kv_h, t * a.group + member))
        n = jnp.minimum(here.first + t, a.T - 1)
        lse[n, h] = row_lse
        for (first, width), x in zip(chunks(a.Dv), columns, strict=True):
            column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
            plgpu.store(out.at[(n, h, column)], x.astype(out.dtype), mask=column < a.Dv)
        return done

    lax.fori_loop(0, jnp.where(here.parts > 1, jnp.minimum(here.queries, work.queries(setting)), 0), query, 0)
