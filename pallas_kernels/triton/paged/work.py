"""Which queries of which request a program of the paged kernel takes, and which part of their keys."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import split_kv

ROWS_FOR_TILE = 8  # of queries, for each of which a part has another tile of keys


class Facts(NamedTuple):
    """What the plan depends on, of `PagedArrays`."""

    indptr: Any
    lengths: Any


class PagedArrays(NamedTuple):
    """The inputs of the kernel (in it: the refs to them).

    Attributes:
      query: [N, Hq, D], the requests one after the other.
      key: [pages of all layers, page_size, Hkv, D].
      value: Likewise, with Dv.
      indptr: int32 [R + 1], where each request's queries start, and where the last ones end.
      lengths: int32 [R], keys of each request.
      table: int32 [R, max_pages], the page of each run of `page_size` keys.
      first_page: int32 [1], the first page of the layer.
      score_operands: What the score mod captures; booleans as int8.
      mask_operands: What the mask captures; booleans as int8.
    """

    query: Any
    key: Any
    value: Any
    indptr: Any
    lengths: Any
    table: Any
    first_page: Any
    score_operands: tuple[Any, ...]
    mask_operands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """The requests that one launch takes, and its tiles.

    Attributes:
      tiles: `block_q` holds queries times query heads of a key head.
      least: Fewest queries of a request that is taken.
      most: Most queries of a request that is taken.
      splits: Whether the keys of a tile of queries may be divided.
    """

    tiles: Tiles
    least: int
    most: int
    splits: bool = True

    def queries(self, spec: AttentionSpec) -> int:
        """Queries in a tile."""
        return max(1, self.tiles.block_q // spec.group)

    def row_tiles(self, spec: AttentionSpec) -> int:
        """The most tiles of queries that there are, those of what belongs to no request among them."""
        N, R = spec.T, spec.B
        takers = min(R + 1, N // self.least if self.least else R + 1)
        by_queries = N // self.queries(spec) + takers
        return max(1, min(by_queries, takers * pl.cdiv(min(self.most, max(N, 1)), self.queries(spec))))

    def shares(self, spec: AttentionSpec) -> int:
        """Into how many shares the work of a key head is divided."""
        return split_kv.shares_for(spec.Hkv)

    @property
    def least_tiles(self) -> int:
        """Fewest tiles of keys of a part: what a part of many rows writes for the merge must be little beside them."""
        return max(split_kv.LEAST_TILES, self.tiles.block_q // ROWS_FOR_TILE)

    def most_parts(self, spec: AttentionSpec) -> int:
        """Into how many parts the keys of a tile of queries may be divided."""
        most = pl.cdiv(spec.S, self.tiles.block_kv) // self.least_tiles if self.splits else 1
        return max(1, min(most, self.shares(spec) + 1))

    def items(self, spec: AttentionSpec) -> int:
        """The most parts of tiles of queries that there are."""
        rows, most = self.row_tiles(spec), self.most_parts(spec)
        return min(split_kv.most_items(rows, self.shares(spec)), rows * most)

    def slots(self, spec: AttentionSpec) -> int:
        """The most parts of those tiles that have several: 2 of at least 1.2 shares, or more of more."""
        return min(2 * self.shares(spec), self.items(spec))

    def rows_to_merge(self, spec: AttentionSpec) -> int:
        """The most pairs of a query and a query head whose keys are divided."""
        tiles = min(self.row_tiles(spec), self.shares(spec))
        return spec.Hq * min(spec.T, tiles * self.queries(spec))


class Requests(NamedTuple):
    """Of each request, and after the last one of what belongs to none: int32 [R + 1, rounded up to a power of two].

    Attributes:
      start: The first query.
      queries: How many there are.
      length: Keys.
      tiles: Tiles of queries, 0 where another launch takes them.
      parts: Into how many parts the keys of each of these tiles are divided.
    """

    start: jax.Array
    queries: jax.Array
    length: jax.Array
    tiles: jax.Array
    parts: jax.Array

    @property
    def slots(self) -> jax.Array:
        """Parts of tiles that have several."""
        return jnp.where(self.parts > 1, self.tiles * self.parts, 0)


def requests(spec: AttentionSpec, work: Work, arrays: PagedArrays | Facts) -> Requests:
    """Reads how much there is to do, and divides it."""
    R, N = spec.B, spec.T
    nth = lax.broadcasted_iota(jnp.int32, (1 << R.bit_length(),), 0)
    bound = lambda x: jnp.minimum(jnp.maximum(x, 0), N)
    start = bound(plgpu.load(arrays.indptr.at[nth], mask=nth <= R, other=N))
    end = bound(plgpu.load(arrays.indptr.at[nth + 1], mask=nth < R, other=N))
    length = plgpu.load(arrays.lengths.at[nth], mask=nth < R, other=0)
    length = jnp.minimum(jnp.maximum(length, 0), spec.S)
    queries = jnp.maximum(end - start, 0)
    taken = (queries >= work.least) & (queries <= work.most)
    per_tile = work.queries(spec)
    tiles = jnp.where(taken, lax.div(queries + (per_tile - 1), per_tile), 0)
    key_tiles = lax.div(length + (work.tiles.block_kv - 1), work.tiles.block_kv)
    if work.most_parts(spec) == 1:
        parts = (tiles > 0).astype(jnp.int32)
    else:
        parts = split_kv.parts_of(key_tiles, tiles, work.shares(spec), work.least_tiles)
    return Requests(start, queries, length, tiles, parts)


class QueryRows(NamedTuple):
    """The rows of a tile: packed query, query head, whether there is such a row; those that are not repeat others."""

    n: jax.Array
    h: jax.Array
    exists: jax.Array


class Place(NamedTuple):
    """What a program works on.

    Attributes:
      request: Its number; the last one for what belongs to none.
      first: The first query of the tile, packed.
      queries: Queries from there to the end of the request; none if there is nothing to do.
      length: Keys.
      part: Which part of the keys.
      parts: Of how many.
      slot: Where the part is written, if there are several.
      page: That of all keys, where a request may have but one.
    """

    request: Any
    first: Any
    queries: Any
    length: Any
    part: Any
    parts: Any
    slot: Any
    page: Any = None

    def rows(self, spec: AttentionSpec, work: Work, kv_h: Any) -> QueryRows:
        """The rows for a key head: the query heads of the first query, then of the next."""
        group = spec.group
        row = lax.broadcasted_iota(jnp.int32, (work.tiles.block_q,), 0)
        t = lax.div(row, group)
        exists = (t < self.queries) & (t < work.queries(spec))
        t = jnp.minimum(t, jnp.maximum(jnp.minimum(self.queries, work.queries(spec)) - 1, 0))
        n = jnp.minimum(self.first + t, spec.T - 1)
        return QueryRows(n, kv_h * group + lax.rem(row, group), exists)


def place_of(spec: AttentionSpec, work: Work, arrays: PagedArrays, item: Any) -> Place:
    """What an item is."""
    of = requests(spec, work, arrays)
    number, within = split_kv.locate(of.tiles * of.parts, item)
    parts = jnp.maximum(split_kv.at(of.parts, number), 1)
    tile, part = lax.div(within, parts), lax.rem(within, parts)
    earlier = lax.broadcasted_iota(jnp.int32, of.parts.shape, 0) < number
    slot = jnp.sum(jnp.where(earlier, of.slots, 0)) + within
    return _place(spec, work, of, number, tile)._replace(part=part, parts=parts, slot=slot)


class ToMerge(NamedTuple):
    """One query whose keys are divided: packed, where its first part is kept, how many there are, and its place there.

    Attributes:
      n: The query, packed.
      slot: Of the first part.
      parts: How many.
      t: Which query of the tile it is.
    """

    n: Any
    slot: Any
    parts: Any
    t: Any


def queries_to_merge(of: Requests) -> jax.Array:
    """Of each request, the queries whose keys are divided."""
    return jnp.where(of.parts > 1, of.queries, 0)


def query_to_merge(spec: AttentionSpec, work: Work, of: Requests, nth: Any) -> ToMerge:
    """The nth of the queries whose keys are divided."""
    number, query = split_kv.locate(queries_to_merge(of), nth)
    parts, per_tile = split_kv.at(of.parts, number), work.queries(spec)
    earlier = lax.broadcasted_iota(jnp.int32, of.parts.shape, 0) < number
    slot = jnp.sum(jnp.where(earlier, of.slots, 0)) + lax.div(query, per_tile) * parts
    return ToMerge(split_kv.at(of.start, number) + query, slot, parts, lax.rem(query, per_tile))


def _place(spec: AttentionSpec, work: Work, of: Requests, number: Any, tile: Any) -> Place:
    done = tile * work.queries(spec)
    queries = jnp.maximum(split_kv.at(of.queries, number) - done, 0)
    request = jnp.minimum(number, spec.B - 1)
    return Place(request, split_kv.at(of.start, number) + done, queries, split_kv.at(of.length, number), 0, 1, 0)
