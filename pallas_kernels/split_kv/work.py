"""Work items of the paged kernel: the queries of a request, a split of their keys, and the tiles that they visit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.program import intervals
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Axes
from pallas_kernels.spec import AttentionSpec, Captured, Operands
from pallas_kernels.split_kv import fixed_splits, planner
from pallas_kernels.triton.containment import MARKS_AT_ONCE, MAX_PROGRAMS, any_nan
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.triton.scores import evaluation
from pallas_kernels.types import A, Index, Ref

UNLIMITED = 1 << 30  # queries of a request
ROWS_PER_KEY_TILE = 8  # rows of queries; a split has at least one tile of keys for each so many
# Numbers of a work item in memory, see `items.work_items`, and which of them are the same in all items.
FIELDS, NUM_ITEMS, NUM_SPLIT_QUERIES = 11, 9, 10
MAX_JUDGED_RUNS = 1024  # runs of tiles of keys whose mask is bounded at once, each a value in a register


class RequestExtents(NamedTuple, Generic[A]):
    """The fields of `PagedOperands` that the splits follow from."""

    indptr: A
    lengths: A


class PagedOperands(NamedTuple, Generic[A]):
    """The inputs of the kernel (in it: the refs to them)."""

    query: A  # [N, Hq, D], the requests one after the other
    key: A  # [pages of all layers, page_size, Hkv, D]
    value: A
    indptr: A  # int32 [R + 1], where each request's queries start, and where the last ones end
    lengths: A  # int32 [R], keys of each request
    table: A  # int32 [R, max_pages], the physical page of each logical page of `page_size` keys
    first_page: A  # int32 [1], the first page of the layer
    captured: Captured[A]
    # of keys of eight bits, float32: [Hkv], or [pages of all layers, page_size, Hkv]; None for others
    key_scale: A | None = None
    value_scale: A | None = None
    # of latent vectors of eight bits, the rotated columns of the keys, [pages of all layers, page_size, 1, D - Dv];
    # `key` then has Dv columns, and `key_scale` is [pages of all layers, page_size, tiles]. None for others.
    rope_key: A | None = None

    def of_mods(self) -> Operands[A]:
        """Inputs of the scores, in the form in which all kernels take them."""
        return Operands(self.query, self.key, self.value, None, self.captured)


@dataclasses.dataclass(frozen=True)
class Work:
    """The requests that one launch takes, and its tiles."""

    tiles: Tiles  # `block_q` holds queries times query heads of a key head
    min_queries: int  # fewest queries of a request that is taken
    max_queries: int  # most queries of a request that is taken
    may_split: bool = True  # whether the keys of a tile of queries may be split
    source: Literal["config", "table", "rule"] = "rule"  # of the tiles; see `pallas_kernels.plan.TileChoice`
    queries_of_tile: int | None = None  # queries in a tile; None for as many as its rows hold
    resident: int = planner.MAX_RESIDENT_PROGRAMS  # programs that are resident at once
    # multiple of packed queries at which the tiles of a request start, but the first; that one has fewer queries then
    alignment: int = 1
    last_first: bool = False  # whether the last queries of a request come first: by a causal mask they see most keys

    def queries(self, spec: AttentionSpec) -> int:
        """Queries in a tile."""
        return self.queries_of_tile or max(1, self.tiles.block_q // spec.group)

    def max_row_tiles(self, spec: AttentionSpec) -> int:
        """Upper bound on query tiles, padding (queries of no request) included."""
        N, R = spec.T, spec.B
        takers, extra = min(R + 1, N // self.min_queries if self.min_queries else R + 1), self.alignment - 1
        by_queries = (N + takers * extra) // self.queries(spec) + takers
        longest = min(self.max_queries, max(N, 1)) + extra
        return max(1, min(by_queries, takers * pl.cdiv(longest, self.queries(spec))))

    def missing(self, start: jax.Array) -> Index:
        """Queries that the first tile of a request lacks, which starts at the packed query `start`."""
        return lax.rem(start, jnp.int32(self.alignment)) if self.alignment > 1 else 0

    def num_splits(self, spec: AttentionSpec) -> int:
        """Splits to aim at for a key head, over all tiles of queries."""
        return planner.num_splits(spec.Hkv, self.resident)

    @property
    def min_tiles_per_split(self) -> int:
        """Fewest tiles of keys of a split: the partial result that it writes must be small beside those keys."""
        return max(planner.MIN_TILES_PER_SPLIT, self.tiles.block_q // ROWS_PER_KEY_TILE)

    def max_splits(self, spec: AttentionSpec) -> int:
        """Upper bound on the splits of a tile of queries."""
        if self.may_split and spec.config.batch_invariant:  # see `fixed_splits`
            return max(1, pl.cdiv(pl.cdiv(spec.S, self.tiles.block_kv), fixed_splits.tiles_of_split(self.tiles)))
        max_queries = pl.cdiv(spec.S, self.tiles.block_kv) // self.min_tiles_per_split if self.may_split else 1
        return max(1, min(max_queries, self.num_splits(spec) + 1))

    def num_items(self, spec: AttentionSpec) -> int:
        """Upper bound on the work items: splits of all tiles of queries."""
        rows, max_queries = self.max_row_tiles(spec), self.max_splits(spec)
        if spec.config.batch_invariant:
            return rows + self.slots(spec) if max_queries > 1 else rows
        return min(planner.max_items(rows, self.num_splits(spec)), rows * max_queries)

    def slots(self, spec: AttentionSpec) -> int:
        """Upper bound on partial results: a tile of 1.2 exact splits has 2, longer ones have more."""
        if spec.config.batch_invariant:
            return min(fixed_splits.max_slots(spec.Hkv), self.max_row_tiles(spec) * self.max_splits(spec))
        return min(2 * self.num_splits(spec), self.num_items(spec))

    def rows_to_merge(self, spec: AttentionSpec) -> int:
        """Upper bound on the pairs of a query and a query head whose keys are split."""
        tiles = min(self.max_row_tiles(spec), self.num_splits(spec))
        return spec.Hq * min(spec.T, tiles * self.queries(spec))


class Requests(NamedTuple):
    """Per request, and after the last one for queries of no request: int32 [R + 1, rounded up to a power of two]."""

    start: jax.Array
    queries: jax.Array  # how many there are
    length: jax.Array
    tiles: jax.Array  # tiles of queries, 0 where another launch takes them
    splits: jax.Array  # of the keys of each of these tiles

    @property
    def slots(self) -> jax.Array:
        """Partial results of the tiles that are split."""
        return jnp.where(self.splits > 1, self.tiles * self.splits, 0)


def requests(spec: AttentionSpec, work: Work, arrays: PagedOperands[Ref] | RequestExtents[Ref]) -> Requests:
    """Loads the lengths of all requests, and plans their tiles and splits."""
    R, N = spec.B, spec.T
    i = lax.broadcasted_iota(jnp.int32, (1 << R.bit_length(),), 0)
    start = runner_of(spec).load(arrays.indptr.at[i], mask=i <= R, other=N)
    end = runner_of(spec).load(arrays.indptr.at[i + 1], mask=i < R, other=N)
    return planned_requests(spec, work, start, end, runner_of(spec).load(arrays.lengths.at[i], mask=i < R))


def requests_on_host(spec: AttentionSpec, work: Work, indptr: np.ndarray, lengths: np.ndarray) -> Requests:
    """Plans requests of known lengths as the kernel does, for `jflex.explain`."""
    padding = (1 << spec.B.bit_length()) - spec.B
    padded = lambda x, count, value: jnp.asarray(np.pad(x, (0, count), constant_values=value))
    start, end = padded(indptr, padding - 1, spec.T), padded(indptr[1:], padding, spec.T)
    return planned_requests(spec, work, start, end, padded(lengths, padding, 0))


def planned_requests(spec: AttentionSpec, work: Work, start: jax.Array, end: jax.Array, length: jax.Array) -> Requests:
    """Plans the tiles and splits of all requests from their first queries, the ends of these, and their lengths."""
    bound = lambda x, most: jnp.minimum(jnp.maximum(x, 0), most)
    start, end, length = bound(start, spec.T), bound(end, spec.T), bound(length, spec.S)
    queries = jnp.maximum(end - start, 0)
    taken = (queries >= work.min_queries) & (queries <= work.max_queries)
    per_tile = work.queries(spec)
    tiles = jnp.where(taken, lax.div(queries + work.missing(start) + (per_tile - 1), per_tile), 0)
    key_tiles = lax.div(length + (work.tiles.block_kv - 1), work.tiles.block_kv)
    if work.max_splits(spec) == 1:
        splits = (tiles > 0).astype(jnp.int32)
    elif spec.config.batch_invariant:  # either all splits of constant size in programs of their own, or none
        even = planner.row_splits(key_tiles, tiles, work.num_splits(spec), work.min_tiles_per_split)
        size = fixed_splits.tiles_of_split(work.tiles)
        splits = jnp.where(even > 1, lax.div(key_tiles + (size - 1), size), jnp.minimum(even, 1))
        splits = fixed_splits.within_slots(splits, tiles, work.slots(spec))
    else:
        splits = planner.row_splits(key_tiles, tiles, work.num_splits(spec), work.min_tiles_per_split)
    return Requests(start, queries, length, tiles, splits)


class QueryRows(NamedTuple):
    """The rows of a tile, [block_q] each: packed query, query head, and False for padding, which repeats others."""

    n: jax.Array
    h: jax.Array
    exists: jax.Array


class WorkItem(NamedTuple):
    """Work of a program: a tile of queries, and a split of their keys."""

    request: jax.Array  # its index; the last one for queries of no request
    first: jax.Array  # the first query of the tile, packed
    queries: jax.Array  # queries from there to the end of the request; none if there is nothing to do
    length: jax.Array
    split: Index  # which split of the keys
    splits: Index
    slot: Index  # of the partial result, if there are several splits
    page: jax.Array | None = None  # the physical page of all keys, where a request has only one

    def rows(self, spec: AttentionSpec, work: Work, kv_h: Index) -> QueryRows:
        """The rows for a key head: the query heads of the first query, then of the next."""
        group = spec.group
        row = lax.broadcasted_iota(jnp.int32, (work.tiles.block_q,), 0)
        t = lax.div(row, group)
        exists = (t < self.queries) & (t < work.queries(spec))
        t = jnp.minimum(t, jnp.maximum(jnp.minimum(self.queries, work.queries(spec)) - 1, 0))
        n = jnp.minimum(self.first + t, spec.T - 1)
        return QueryRows(n, kv_h * group + lax.rem(row, group), exists)


def item_of(
    spec: AttentionSpec, work: Work, planned: Requests, item: jax.Array, *, longest_first: bool = False
) -> WorkItem:
    """The work item of an index, of planned requests: in their order, or those with the longest splits first."""
    if longest_first:
        key_tiles = lax.div(planned.length + (work.tiles.block_kv - 1), work.tiles.block_kv)
        number, within = planner.find_longest_first(key_tiles * planned.tiles, planned.tiles * planned.splits, item)
    else:
        number, within = planner.find_work_item(planned.tiles * planned.splits, item)
    splits = jnp.maximum(planner.at(planned.splits, number), 1)
    tile, split = lax.div(within, splits), lax.rem(within, splits)
    if work.last_first:
        tile = planner.at(planned.tiles, number) - 1 - tile
        within = tile * splits + split
    earlier = lax.broadcasted_iota(jnp.int32, planned.splits.shape, 0) < number
    slot = jnp.sum(jnp.where(earlier, planned.slots, 0)) + within
    return _item_at(spec, work, planned, number, tile)._replace(split=split, splits=splits, slot=slot)


class MergeItem(NamedTuple):
    """One query whose keys are split."""

    n: Index
    slot: Index  # of its first partial result
    splits: Index  # how many there are
    t: Index  # which query of the tile it is


def queries_to_merge(planned: Requests) -> jax.Array:
    """For each request, the number of queries whose keys are split."""
    return jnp.where(planned.splits > 1, planned.queries, 0)


def query_to_merge(spec: AttentionSpec, work: Work, planned: Requests, i: jax.Array) -> MergeItem:
    """The ith of the queries whose keys are split."""
    number, query = planner.find_work_item(queries_to_merge(planned), i)
    splits, per_tile = planner.at(planned.splits, number), work.queries(spec)
    earlier = lax.broadcasted_iota(jnp.int32, planned.splits.shape, 0) < number
    start = planner.at(planned.start, number)
    row = query + work.missing(start)
    slot = jnp.sum(jnp.where(earlier, planned.slots, 0)) + lax.div(row, per_tile) * splits
    return MergeItem(start + query, slot, splits, lax.rem(row, per_tile))


def _item_at(spec: AttentionSpec, work: Work, planned: Requests, number: jax.Array, tile: jax.Array) -> WorkItem:
    start = planner.at(planned.start, number)
    done = jnp.maximum(tile * work.queries(spec) - work.missing(start), 0)
    queries = jnp.maximum(planner.at(planned.queries, number) - done, 0)
    request = jnp.minimum(number, spec.B - 1)
    return WorkItem(request, start + done, queries, planner.at(planned.length, number), 0, 1, 0)


class KeyTiles(NamedTuple):
    """Tiles of keys that some queries visit, and the unmasked (full) ones among them: first, and one past the last."""

    first: Index
    last: Index
    first_whole: Index
    last_whole: Index


def visited_tiles(spec: AttentionSpec, tile: int, mask: Evaluation | None, item: WorkItem) -> KeyTiles:
    """The tiles of `tile` keys that a work item visits, by the mask of its rows, or None without one."""
    last, whole = lax.div(item.length + (tile - 1), tile), lax.div(item.length, tile)
    if mask is None:
        return KeyTiles(0, last, 0, whole)
    assert spec.programs.mask is not None  # that was evaluated
    tiles = pl.cdiv(spec.S, tile)
    run = pl.cdiv(tiles, MAX_JUDGED_RUNS)  # tiles judged as one
    count = 1 << (pl.cdiv(tiles, run) - 1).bit_length()
    i = lax.broadcasted_iota(jnp.int32, (count,), 0)
    first_key = i * (run * tile)
    visible = intervals.visibility(spec.programs.mask, mask, first_key, first_key + (run * tile - 1))
    exists = i * run < last
    some, whole_runs = visible.some & exists, visible.all & ((i + 1) * run <= whole)
    first, after = _first_where(some, i, count), jnp.max(jnp.where(some, i, -1)) + 1
    first_whole = _first_where(whole_runs, i, count)
    last_whole = _first_where(~whole_runs & (i > first_whole), i, count)
    end = jnp.minimum(after * run, last)
    begin = jnp.minimum(first * run, end)
    return KeyTiles(begin, end, jnp.minimum(first_whole * run, end), jnp.minimum(last_whole * run, end))


def visited_tiles_of_all_heads(
    spec: AttentionSpec, work: Work, refs: Sequence[Ref], item: WorkItem, per_request: int | None = None
) -> KeyTiles:
    """The tiles that all groups of heads of a work item visit, where they visit the same; all of them otherwise.

    With `per_request` queries of each request, the mask counts them from the first of the request.
    """
    program, tile = spec.programs.mask, work.tiles.block_kv
    if program is None or (spec.Hkv > 1 and program.argument("h") in program.nodes):
        unknown = visited_tiles(spec, tile, None, item)
        return unknown if program is None else unknown._replace(last_whole=0)
    row = item.rows(spec, work, jnp.zeros_like(item.request))
    q = row.n if per_request is None else row.n - item.request * per_request
    h = row.h[:, None] if spec.heads_in_rows else jnp.zeros_like(item.request)  # without them, the only one
    at = {"b": item.request, "h": h, "q": q[:, None]}
    mask = evaluation(program, refs, work.tiles.shape, at, approximate=True, runner=runner_of(spec))
    mask.prepare(program.nodes, (Axes.UNIFORM, Axes.ROW))
    return visited_tiles(spec, tile, mask, item)


def _first_where(x: jax.Array, i: jax.Array, count: int) -> jax.Array:
    return jnp.min(jnp.where(x, i, count))


class QueryBlocks(NamedTuple):
    """Blocks of packed queries that a repair looks at, with a program for each key head.

    A program that finds no mark ends without the plan of the requests. H200, jax 0.11.2, Hq 32, Hkv 8, D 128, 256
    requests that decode and 3840 tokens of prompts: 12.8 and 34.7 us with one program for each tile, which planned
    first; 1.8 and 2.1 with as many programs as here, each for all heads of fewer queries. This form was not timed. Each
    key head has programs of its own because a request whose queries are NaN is repaired in every step.
    """

    spec: AttentionSpec
    work: Work  # the launch whose tiles are repaired

    @property
    def size(self) -> int:
        """Queries of a block."""
        return pl.cdiv(self.spec.T, max(1, MAX_PROGRAMS // self.spec.Hkv))

    @property
    def programs(self) -> int:
        """Size of the grid: the key heads of a block side by side."""
        return pl.cdiv(self.spec.T, self.size) * self.spec.Hkv

    def has_marks(self, lse: Ref, block: Index, kv_h: Index) -> jax.Array:
        """True if there is a mark, for a key head, among the rows that the tiles of a block may hold."""
        group, reach = self.spec.group, self.size + self.work.queries(self.spec) - 1
        at_once = min(MARKS_AT_ONCE, pl.next_power_of_2(reach * group))

        def load(chunk: Index, any_marked: jax.Array) -> jax.Array:
            i = jnp.minimum(chunk * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0), reach * group - 1)
            n = jnp.minimum(block * self.size + lax.div(i, group), self.spec.T - 1)
            marked = any_nan(runner_of(self.spec).load(lse.at[(n, kv_h * group + lax.rem(i, group))]))
            return jnp.maximum(any_marked, marked.astype(jnp.int32))

        return lax.fori_loop(0, pl.cdiv(reach * group, at_once), load, jnp.int32(0)) > 0

    def items(self, planned: Requests, block: Index) -> tuple[jax.Array, jax.Array]:
        """The first of the work items that begin in a block, and one past the last, for work without splits."""
        per_tile = self.work.queries(self.spec)

        def before(query: Index) -> jax.Array:
            begin = lax.div(jnp.maximum(query - planned.start, 0) + (per_tile - 1), per_tile)
            return jnp.sum(jnp.minimum(begin, planned.tiles))

        return before(block * self.size), before((block + 1) * self.size)
