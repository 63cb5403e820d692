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
        (facts, tuple(parts), tuple(found)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found],
        name="jflex_paged_merge",
        grid=(a.Hq * min(work.row_tiles(setting), work.shares(setting)),),
        tiles=Tiles(RUN, RUN, 1, 1),
        interpret=a.interpret,
        aliases={4: 0, 5: 1},
    )


def _kernel(setting: PagedSetting, work: Work, facts: Facts, parts: Any, before: Any, out: Any, lse: Any) -> None:
    del before  # the memory of `out` and `lse`
    a = setting.attention
    h, tile = lax.rem(pl.program_id(0), a.Hq), lax.div(pl.program_id(0), a.Hq)
    here = place_to_merge(setting, work, facts, tile)
    kv_h, member = lax.div(h, a.group), lax.rem(h, a.group)
    runs = lax.div(here.parts + (RUN - 1), RUN)

    def query(t: Any, done: Any) -> Any:
        row = t * a.group + member
        start = (jnp.full((), -jnp.inf), jnp.zeros(()), tuple(jnp.zeros((width,)) for _, width in chunks(a.Dv)))
        top, total, sums = lax.fori_loop(0, runs, functools.partial(_take_in, a.Dv, parts, here, (kv_h, row)), start)
        empty = total == 0.0
        safe = jnp.where(empty, 1.0, total)
        n = jnp.minimum(here.first + t, a.T - 1)
        lse[n, h] = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
        for (first, width), x in zip(chunks(a.Dv), sums, strict=True):
            column = first + lax.broadcasted_iota(jnp.int32, (width,), 0)
            plgpu.store(out.at[(n, h, column)], (x / safe).astype(out.dtype), mask=column < a.Dv)
        return done

    lax.fori_loop(0, jnp.where(here.parts > 1, jnp.minimum(here.queries, work.queries(setting)), 0), query, 0)


def _take_in(size: int, parts: Any, here: Any, at: tuple[Any, Any], run: Any, state: Any) -> Any:
    """Adds a run of parts to the weighted sums of a row."""
    top, total, sums = state
    part_out, part_lse = parts
    nth = run * RUN + lax.broadcasted_iota(jnp.int32, (RUN,), 0)
    slot, there = here.slot + jnp.minimum(nth, here.parts - 1), nth < here.parts
    lse = plgpu.load(part_lse.at[(slot, *at)], mask=there, other=-jnp.inf)
    new_top = jnp.maximum(top, jnp.max(lse))
    shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    share, keep = jnp.exp(lse - shift), jnp.exp(top - shift)
    added = []
    for (first, width), x in zip(chunks(size), sums, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (RUN, width), 1)
        slots = jnp.broadcast_to(slot[:, None], column.shape)
        values = plgpu.load(part_out.at[(slots, *at, column)], mask=(column < size) & there[:, None], other=0.0)
        added.append(x * keep + jnp.sum(values * share[:, None], axis=0))
    return new_top, total * keep + jnp.sum(share), tuple(added)
