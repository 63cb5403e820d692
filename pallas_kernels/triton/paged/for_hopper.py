"""What the Hopper kernel for pages leaves to these: the plan of its work items, and the merge of its partial results."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import split_kv
from pallas_kernels.triton.paged.merge import merge_splits
from pallas_kernels.triton.paged.work import PagedOperands, Work, item_of, requests_of_arrays

_UNLIMITED = 1 << 30


def work_of(rows: int, keys: int, queries: int) -> Work:
    """All requests in one launch, with tiles of so many rows and keys, which hold so many queries."""
    return Work(Tiles(rows, keys, 8), 0, _UNLIMITED, queries_of_tile=queries)


def work_items(spec: AttentionSpec, work: Work, indptr: jax.Array, lengths: jax.Array) -> tuple[jax.Array, ...]:
    """The work items of a launch, int32 [items] each.

    Returns:
      The request, the first query, the queries from there on, the keys, the first tile of keys, one past the last, and
      the slot of the partial result (-1 where keys are not split); then int32 [1], how many items are not padding.
    """
    of = requests_of_arrays(spec, work, indptr, lengths)
    items = jnp.arange(work.num_items(spec), dtype=jnp.int32)
    item = jax.vmap(functools.partial(item_of, spec, work, of))(items)
    tile = work.tiles.block_kv
    begin, end = split_kv.split_range(lax.div(item.length + (tile - 1), tile), item.split, item.splits)
    slot = jnp.where(item.splits > 1, item.slot, -1)
    count = jnp.sum(of.tiles * of.splits, dtype=jnp.int32)
    return item.request, item.first, item.queries, item.length, begin, end, slot, count[None]


def merge(
    spec: AttentionSpec, work: Work, arrays: PagedOperands[jax.Array], result: Sequence[jax.Array]
) -> list[jax.Array]:
    """Out [N, Hq, Dv] and lse [N, Hq], from these and the partial results of the launch."""
    return merge_splits(spec, work, arrays, result[:2], result[2:]) if len(result) > 2 else list(result)
