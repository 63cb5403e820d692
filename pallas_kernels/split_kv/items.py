"""Work items of the Hopper kernels with split-KV, planned by a Triton kernel or on the host, and their merge."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv import planner
from pallas_kernels.split_kv.merge import merge_splits
from pallas_kernels.split_kv.work import (
    FIELDS,
    UNLIMITED,
    RequestExtents,
    Work,
    item_of,
    queries_to_merge,
    requests,
    requests_on_host,
    visited_tiles_of_all_heads,
)
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Ref

Extents: TypeAlias = "tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]"
"""`indptr` and `lengths` of `RequestExtents`, in numpy where they are known on the host."""


def work_of(rows: int, keys: int, queries: int) -> Work:
    """All requests in one launch, a CTA on each SM, with tiles of so many rows and keys, which hold so many queries."""
    return Work(Tiles(rows, keys, 8), 0, UNLIMITED, queries_of_tile=queries, resident=planner.NUM_SMS)


def plan_items(
    spec: AttentionSpec,
    work: Work,
    extents: Extents,
    mask_operands: tuple[jax.Array, ...],
    per_request: int | None = None,
) -> tuple[jax.Array, int]:
    """The work items of a launch, int32 [items, FIELDS], and an upper bound on partial results, 0 if none are split.

    Where the extents are known on the host, and no mask bounds the tiles that are visited, no kernel plans them.
    """
    indptr, lengths = extents
    if isinstance(indptr, np.ndarray) and isinstance(lengths, np.ndarray) and spec.mask_mod is None:
        items, slots = items_on_host(spec, work, RequestExtents(indptr, lengths))
        return jnp.asarray(items), slots
    arrays = RequestExtents(jnp.asarray(indptr), jnp.asarray(lengths))
    items = work_items(spec, work, arrays, mask_operands, per_request)
    return items, work.slots(spec) if work.max_splits(spec) > 1 else 0


def work_items(
    spec: AttentionSpec,  # the spec; its T counts packed queries
    work: Work,
    extents: RequestExtents[jax.Array],  # where queries begin, and how many keys there are
    mask_operands: tuple[jax.Array, ...],  # what the mask captures
    # queries of each request, if the mask counts them from the first of its own (dense calls)
    per_request: int | None = None,
) -> jax.Array:
    """The work items of a launch, int32 [items, FIELDS].

    Fields are the request, the first query, the queries from there on, the keys, the first tile of keys, one past the
    last, the slot of the partial result (-1 where keys are not split), the first tile of a run without masked keys, one
    past the last of them, and the numbers of items that are not padding and of queries whose keys are split.

    A program computes one item, as those of the paged kernel do. By XLA it takes eight kernels.
    """
    count = work.num_items(spec)
    [items] = runner_of(spec).launch(
        functools.partial(_kernel, spec, work, per_request),
        (extents, mask_operands),
        [jax.ShapeDtypeStruct((count, FIELDS), jnp.int32)],
        name="jflex_paged_plan",
        grid=(count,),
        tiles=Tiles(16, 16, 1, 1),
    )
    return items


def _kernel(
    spec: AttentionSpec,
    work: Work,
    per_request: int | None,
    extents: RequestExtents[Ref],
    mask_operands: tuple[Ref, ...],
    items: Ref,
) -> None:
    number = pl.program_id(0)
    planned = requests(spec, work, extents)
    item = item_of(spec, work, planned, number, longest_first=True)
    visited = visited_tiles_of_all_heads(spec, work, mask_operands, item, per_request)
    begin, end = (visited.first + x for x in planner.split_range(visited.last - visited.first, item.split, item.splits))
    slot = jnp.where(item.splits > 1, item.slot, -1)
    full_begin, full_end = (jnp.clip(x, begin, end) for x in (visited.first_whole, visited.last_whole))
    fields = (
        item.request,
        item.first,
        item.queries,
        item.length,
        begin,
        end,
        slot,
        full_begin,
        jnp.maximum(full_begin, full_end),
        jnp.sum(planned.tiles * planned.splits),
        jnp.sum(queries_to_merge(planned)),
    )
    for i, field in enumerate(fields):
        items[number, i] = field


def items_on_host(spec: AttentionSpec, work: Work, extents: RequestExtents[np.ndarray]) -> tuple[np.ndarray, int]:
    """The same, without padding, for extents that are known, and no mask; and how many partial results there are."""
    assert spec.programs.mask is None  # it bounds the tiles that are visited
    with jax.ensure_compile_time_eval():
        planned = requests_on_host(spec, work, extents.indptr, extents.lengths)
        start, queries, length, tiles, splits = (np.asarray(x) for x in planned)
    count = -(-length // work.tiles.block_kv)
    size, slots = -(-count // np.maximum(splits, 1)), np.where(splits > 1, tiles * splits, 0)
    order = np.argsort(-size, kind="stable") if size.size <= planner.MAX_SORTED_ROWS else np.arange(size.size)
    items = []
    for request in order:
        for within in range(tiles[request] * splits[request]):
            tile, split = divmod(within, splits[request])
            done, end = tile * work.queries(spec), count[request]
            bounds = min(split * size[request], end), min((split + 1) * size[request], end)
            slot = slots[:request].sum() + within if splits[request] > 1 else -1
            owner, remaining = min(request, spec.B - 1), max(queries[request] - done, 0)
            full_end = min(max(length[request] // work.tiles.block_kv, bounds[0]), bounds[1])
            items.append([owner, start[request] + done, remaining, length[request], *bounds, slot, bounds[0], full_end])
    shared = len(items), queries[splits > 1].sum()
    return np.array([[*row, *shared] for row in items], np.int32).reshape(-1, FIELDS), int(slots.sum())


def merge(
    spec: AttentionSpec, work: Work, extents: Extents, table: jax.Array, result: Sequence[jax.Array]
) -> list[jax.Array]:
    """Out [N, Hq, Dv] and lse [N, Hq], from these and the partial results of the launch, if keys may be split.

    `table` are the work items.
    """
    if len(result) == 2:
        return list(result)
    arrays = RequestExtents(*map(jnp.asarray, extents))
    return merge_splits(spec, work, arrays, result[:2], result[2:], table)


def count_splits(spec: AttentionSpec, work: Work, indptr: np.ndarray, lengths: np.ndarray) -> tuple[int, int]:
    """Tiles of queries, and the splits of their keys, for each group of heads."""
    planned = requests_on_host(spec, work, indptr, lengths)
    return int(planned.tiles.sum()), int((planned.tiles * planned.splits).sum())
