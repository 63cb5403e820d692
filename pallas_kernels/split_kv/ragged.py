"""Split-KV decoding over ragged rows: they differ in length, or in how many blocks the mask lists.

The number of splits of a row follows from its own tiles of keys, which only the device knows: see
`pallas_kernels.split_kv.planner`. The output of an unsplit row is written directly; the others keep partial results,
and a second, small kernel (`pallas_kernels.split_kv.merge`) merges them.

Programs are started longest split first, all key heads of a split side by side: those in the tail are short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv import fixed_splits, planner
from pallas_kernels.triton.forward import RowVectors
from pallas_kernels.triton.head_chunks import Columns, store_lines
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import A, Index, Ref, S

MIN_LANES = 16  # of a vector over rows


class KvExtents(NamedTuple, Generic[A]):
    """Keys that each row visits, from which the splits follow (in a kernel: the refs)."""

    lengths: A | None  # keys of each batch entry, int32 [B], or None where all have S
    # partial blocks of each row of the mask's lists, int32 [list batch, list heads, 1], or None without lists
    counts: A | None
    full_counts: A | None

    def end(self: KvExtents[Ref], spec: AttentionSpec, b: Index) -> jax.Array | None:
        """End of the keys of a batch entry; None where all end at S."""
        if self.lengths is None:
            return None
        return jnp.minimum(jnp.maximum(runner_of(spec).load(self.lengths.at[b]), 0), spec.S)


class Row(NamedTuple):
    """The queries of a key head, in a batch entry."""

    b: jax.Array
    kv_h: jax.Array
    end: jax.Array | None = None  # where its keys end; None for S


class WorkItem(NamedTuple):
    """The split of a row that a program computes."""

    row: Row
    split: block_walk.Split  # which split of them
    exists: jax.Array  # False where there is nothing to do
    unsplit: jax.Array  # whether the row has a single split
    slot: Index  # of the partial result otherwise
    # with splits of a constant number of keys, the first that is computed, and one past the last
    fixed: tuple[Index, Index] = (0, 0)


def unsplit_item(row: Row, fixed: int = 0) -> WorkItem:
    """A row that one program computes alone; it has so many splits of a constant number of keys."""
    yes = jnp.full((), 1, jnp.int32) == 1  # a constant would be refused where it is negated
    return WorkItem(row, block_walk.Split(0, 1), yes, yes, 0, (0, fixed))


class SplitRow(NamedTuple):
    """A row that is split: batch entry, key head, slot of its first partial result, and how many there are."""

    b: jax.Array
    kv_h: jax.Array
    slot: jax.Array
    splits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class SplitPlan:
    """Static bounds of programs, splits and rows. Key heads with lists of their own are rows of their own."""

    spec: AttentionSpec
    tiles: Tiles

    @property
    def is_fixed(self) -> bool:
        """True if the keys of a split are constant in number (`pallas_kernels.split_kv.fixed_splits`)."""
        return self.spec.config.batch_invariant

    @property
    def heads(self) -> int:
        """Key heads that are split alike."""
        return self.spec.Hkv if self.spec.list_heads == 1 else 1

    @property
    def rows(self) -> int:
        """Rows of each of them."""
        return self.spec.B * (self.spec.Hkv // self.heads)

    @property
    def max_splits(self) -> int:
        """Splits of one row, at most."""
        if self.is_fixed:
            return max_fixed_splits(self.spec, self.tiles)
        return min(self.num_splits + 1, max(1, max_tiles(self.spec, self.tiles) // planner.MIN_TILES_PER_SPLIT))

    @property
    def num_splits(self) -> int:
        """Splits to aim at, over all rows."""
        return planner.num_splits(self.heads)

    @property
    def num_items(self) -> int:
        """Splits of all rows, at most: the size of the grid for a key head."""
        if self.is_fixed:
            return self.rows + self.slots if self.max_splits > 1 else self.rows
        return min(planner.max_items(self.rows, self.num_splits), self.rows * self.max_splits)

    @property
    def slots(self) -> int:
        """Partial results, at most: a row of 1.2 exact splits has 2, longer ones have more."""
        if self.is_fixed:
            return min(fixed_splits.max_slots(self.heads), self.rows * self.max_splits)
        return min(2 * self.num_splits, self.num_items)

    def batch_and_head(self, row: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Batch entry and key head."""
        if self.heads == self.spec.Hkv:
            return row, head
        return lax.div(row, self.spec.Hkv), lax.rem(row, self.spec.Hkv)

    def splits(self, extents: KvExtents[Ref]) -> tuple[jax.Array, jax.Array]:
        """Tiles and splits of each row, int32 [rows, rounded up to a power of two]; splits are 0 past the last row."""
        spec = self.spec
        index = lax.broadcasted_iota(jnp.int32, (max(MIN_LANES, 1 << (self.rows - 1).bit_length()),), 0)
        row = jnp.minimum(index, self.rows - 1)
        b, kv_h = self.batch_and_head(row, jnp.zeros_like(row))
        end = extents.end(spec, b)
        if extents.counts is None or extents.full_counts is None:
            assert end is not None  # else rows are alike
            tiles = lax.div(end + (self.tiles.block_kv - 1), self.tiles.block_kv)
        else:
            assert spec.block_size is not None
            max_blocks_ = max_blocks(spec, end)
            zero = jnp.zeros_like(row)
            at = (b if spec.list_batch > 1 else zero), (kv_h if spec.list_heads > 1 else zero), zero
            listed = [runner_of(spec).load(counts.at[at]) for counts in (extents.counts, extents.full_counts)]
            listed = [x if max_blocks_ is None else jnp.minimum(x, max_blocks_) for x in listed]
            tiles = (listed[0] + listed[1]) * (spec.block_size[1] // self.tiles.block_kv)
        exists = (index < self.rows).astype(jnp.int32)
        splits = planner.row_splits(tiles, exists, self.num_splits)
        if self.is_fixed:  # either all splits of constant size in programs of their own, or none
            splits = jnp.where(splits > 1, self.fixed_splits(tiles), splits)
            splits = fixed_splits.within_slots(splits, exists, self.slots)
        return tiles, splits

    def fixed_splits(self, tiles: jax.Array) -> jax.Array:
        """Splits of a constant number of keys, in so many tiles."""
        size = fixed_splits.tiles_of_split(self.tiles)
        return lax.div(tiles + (size - 1), jnp.int32(size))

    def item_at(self, extents: KvExtents[Ref], item: jax.Array, head: jax.Array) -> WorkItem:
        """The work item of a program."""
        tiles, splits = self.splits(extents)
        row, i = self._find_split(tiles, splits, item)
        count, exists = planner.at(splits, row), row < self.rows
        b, kv_h = self.batch_and_head(jnp.minimum(row, self.rows - 1), head)
        # The split after the last one is empty.
        split = block_walk.Split(jnp.where(exists, i, 1), jnp.maximum(count, 1))
        slot = i if self.rows == 1 else _slots_before(splits, row) + i
        fixed = (0, 0)
        if self.is_fixed:
            fixed = jnp.where(count > 1, i, 0), jnp.where(count > 1, i + 1, self.fixed_splits(planner.at(tiles, row)))
        return WorkItem(Row(b, kv_h, extents.end(self.spec, b)), split, exists, count == 1, slot, fixed)

    def _find_split(self, tiles: jax.Array, splits: jax.Array, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row of a program, one past the last if it has nothing to do, and which split of it."""
        if self.rows == 1:
            return (item >= jnp.sum(splits)).astype(jnp.int32), item
        return planner.find_longest_first(tiles, splits, item)

    def split_row(self, splits: jax.Array, i: jax.Array, head: jax.Array) -> SplitRow:
        """The ith of the rows that are split."""
        if self.rows == 1:
            zero = jnp.zeros((), jnp.int32)
            return SplitRow(*self.batch_and_head(zero, head), zero, jnp.sum(splits))
        row, _ = planner.find_work_item((splits > 1).astype(jnp.int32), i)
        b, kv_h = self.batch_and_head(jnp.minimum(row, self.rows - 1), head)
        return SplitRow(b, kv_h, _slots_before(splits, row), planner.at(splits, row))


def max_tiles(spec: AttentionSpec, tiles: Tiles) -> int:
    """The most tiles of keys that a row may visit."""
    if spec.block_size is None:
        return pl.cdiv(spec.S, tiles.block_kv)
    return pl.cdiv(spec.S, spec.block_size[1]) * (spec.block_size[1] // tiles.block_kv)


def max_fixed_splits(spec: AttentionSpec, tiles: Tiles) -> int:
    """The most splits of a constant number of keys that a row may have."""
    return max(1, pl.cdiv(max_tiles(spec, tiles), fixed_splits.tiles_of_split(tiles)))


def max_blocks(spec: AttentionSpec, end: Index | None) -> jax.Array | None:
    """Bound on a row's listed blocks that begin before `end`: lists ascend, so these are the first ones."""
    assert spec.block_size is not None
    return None if end is None else lax.div(end + (spec.block_size[1] - 1), spec.block_size[1])


def _slots_before(splits: jax.Array, row: Index) -> jax.Array:
    earlier = lax.broadcasted_iota(jnp.int32, splits.shape, 0) < row
    return jnp.sum(jnp.where(earlier & (splits > 1), splits, 0))


def store_partial(
    spec: AttentionSpec, item: WorkItem, head: Index, rows: Columns, vectors: RowVectors, splits: Sequence[Ref]
) -> None:
    """Stores the partial result of a split: its rows [block_q, Dv] in float32, and their lse and stats [block_q]."""
    partial_out, *vector_refs = splits
    kept, block_q = item.exists & ~item.unsplit, vectors[0].shape[0]
    slot = jnp.minimum(item.slot, partial_out.shape[0] - 1)
    line = lax.broadcasted_iota(jnp.int32, (block_q,), 0)
    for ref, x in zip(vector_refs, vectors, strict=True):
        runner_of(spec).store(ref.at[(slot, head, line)], x, mask=jnp.broadcast_to(kept, (block_q,)))
    store_lines(spec, partial_out, (slot, head, line), rows, kept)


def load_lse(spec: AttentionSpec, row: Row, block_q: int, lse: Ref) -> jax.Array:
    """Loads the lse of the queries of a key head; lines past the last query repeat it."""
    line = jnp.minimum(lax.broadcasted_iota(jnp.int32, (block_q,), 0), spec.group * spec.T - 1)
    return runner_of(spec).load(lse.at[(row.b, row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T))])


def store_unsplit(
    spec: AttentionSpec,
    item: WorkItem,
    rows: Columns,
    vectors: RowVectors,
    result: Sequence[Ref],
    keeps: jax.Array | None = None,
) -> None:
    """Stores the output, lse and stats of an unsplit row; outputs where `keeps` is true stay as they are."""
    (out, *vector_refs), row = result, item.row
    line = lax.broadcasted_iota(jnp.int32, vectors[0].shape, 0)
    # Lines past the last name rows of other heads, or none; as repeated ones they would undo, in the interpreter, what
    # the last one stores.
    exists = item.exists & item.unsplit & (line < spec.group * spec.T)
    h, t = row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T)
    for ref, x in zip(vector_refs, vectors, strict=True):
        runner_of(spec).store(ref.at[(row.b, h, t)], x, mask=exists)
    at = (row.b, t, h) if spec.layout == "BTNH" else (row.b, h, t)
    store_lines(spec, out, at, rows, exists if keeps is None else exists & ~keeps)


def over_keys(
    spec: AttentionSpec,
    tiles: Tiles,
    lists: tuple[Ref, ...] | None,
    row: Row,
    split: block_walk.Split | block_walk.FixedSplit,
    state: S,
    step: Callable[[S, Index, bool, bool], S],
) -> S:
    """Folds ``step(state, first, is_partial, may_end)`` over a split of the tiles of keys that a row visits.

    `may_end` says that a tile may reach past the end of the keys: then padding is masked, with or without a mask mod.
    """
    (b, kv_h, end), tile, masked = row, tiles.block_kv, spec.programs.mask is not None
    passes_end = spec.walk_passes_end("k", tile)
    visit = lambda s, first, is_partial: step(s, first, is_partial, end is not None or (is_partial and passes_end))
    if spec.block_size is not None:
        assert lists is not None  # of the blocks
        block_row = block_walk.row_of_lists(spec, lists[:4], b, kv_h, 0)
        return block_walk.walk(block_row, spec.block_size[1], tile, spec.S, state, visit, split, max_blocks(spec, end))
    if end is None:
        return block_walk.walk_all(tile, spec.S, masked, state, visit, split)
    unsplit, all_of_it = lax.div(end, tile), lax.div(end + (tile - 1), tile)
    first, last = split.tile_range(all_of_it)
    inside = lambda t, s: step(s, t * tile, masked, False)
    state = lax.fori_loop(jnp.minimum(first, unsplit), jnp.minimum(last, unsplit), inside, state)
    at_end = lambda t, s: step(s, t * tile, True, True)
    return lax.fori_loop(jnp.maximum(first, unsplit), jnp.maximum(last, unsplit), at_end, state)
