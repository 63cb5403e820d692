"""Few queries against rows of keys that differ in length, or in how much of them the mask shows.

How many parts a row is divided into follows from its own tiles of keys, which only the device knows: see
`pallas_kernels.triton.split_kv`. A row that stays whole is written at once; of the others the parts are kept, and a
second, small kernel (`pallas_kernels.triton.decode.merge`) merges them.

Programs are started longest part first, all key heads of a part side by side: those that come last are short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import block_walk as blocks
from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import split_kv
from pallas_kernels.triton.head_chunks import Columns, chunks

FEWEST_LANES = 16  # of a vector of facts


class Facts(NamedTuple):
    """What the division follows from (in a kernel: the refs).

    Attributes:
      lengths: Keys of each batch entry, int32 [B], or None where all have S.
      counts: Partial blocks of each row of the mask's lists, int32 [list batch, list heads, 1], or None without lists.
      full_counts: Full ones.
    """

    lengths: Any
    counts: Any
    full_counts: Any

    def end(self, spec: AttentionSpec, b: Any) -> Any:
        """Where the keys of a batch entry end; None where all end at S."""
        if self.lengths is None:
            return None
        return jnp.minimum(jnp.maximum(plgpu.load(self.lengths.at[b]), 0), spec.S)


class Row(NamedTuple):
    """What a program works on.

    Attributes:
      b: Batch entry.
      kv_h: Key head.
      end: Where its keys end; None for S.
      part: Which part of them.
      exists: False where there is nothing to do.
      whole: Whether the row is not divided.
      slot: Where the part is kept otherwise.
    """

    b: Any
    kv_h: Any
    end: Any
    part: blocks.Part
    exists: Any
    whole: Any
    slot: Any


def whole_row(b: Any, kv_h: Any, end: Any = None) -> Row:
    """A row that one program works on alone."""
    yes = jnp.full((), 1, jnp.int32) == 1  # a constant would be refused where it is negated
    return Row(b, kv_h, end, blocks.Part(0, 1), yes, yes, 0)


class Divided(NamedTuple):
    """A row that is divided: its batch entry and key head, where its parts begin, and how many there are."""

    b: Any
    kv_h: Any
    slot: Any
    parts: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """How many programs, parts and rows there may be. Key heads with lists of their own are rows of their own."""

    spec: AttentionSpec
    tiles: Tiles

    @property
    def heads(self) -> int:
        """Key heads that are divided alike."""
        return self.spec.Hkv if self.spec.list_heads == 1 else 1

    @property
    def rows(self) -> int:
        """Rows of each of them."""
        return self.spec.B * (self.spec.Hkv // self.heads)

    @property
    def most_parts(self) -> int:
        """Of one row."""
        return min(self.shares + 1, max(1, all_tiles(self.spec, self.tiles) // split_kv.LEAST_TILES))

    @property
    def shares(self) -> int:
        """Into how many shares the work is divided."""
        return split_kv.shares_for(self.heads)

    @property
    def items(self) -> int:
        """Parts of all rows."""
        return min(split_kv.most_items(self.rows, self.shares), self.rows * self.most_parts)

    @property
    def slots(self) -> int:
        """Parts of divided rows: 2 of at least 1.2 shares, or more of more."""
        return min(2 * self.shares, self.items)

    @property
    def divided(self) -> int:
        """Rows that are divided."""
        return min(self.rows, self.shares)

    def place(self, row: Any, head: Any) -> tuple[Any, Any]:
        """Batch entry and key head."""
        if self.heads == self.spec.Hkv:
            return row, head
        return lax.div(row, self.spec.Hkv), lax.rem(row, self.spec.Hkv)

    def parts(self, facts: Facts) -> tuple[jax.Array, jax.Array]:
        """Tiles and parts of each row, int32 [rows, rounded up to a power of two]; parts are 0 past the last row."""
        spec = self.spec
        number = lax.broadcasted_iota(jnp.int32, (max(FEWEST_LANES, 1 << (self.rows - 1).bit_length()),), 0)
        row = jnp.minimum(number, self.rows - 1)
        b, kv_h = self.place(row, jnp.zeros_like(row))
        end = facts.end(spec, b)
        if facts.counts is None:
            tiles = lax.div(end + (self.tiles.block_kv - 1), self.tiles.block_kv)
        else:
            assert spec.block_size is not None
            most = most_blocks(spec, end)
            at = (*_list_position(spec, b, kv_h), jnp.zeros_like(row))
            listed = [plgpu.load(counts.at[at]) for counts in (facts.counts, facts.full_counts)]
            listed = [x if most is None else jnp.minimum(x, most) for x in listed]
            tiles = (listed[0] + listed[1]) * (spec.block_size[1] // self.tiles.block_kv)
        return tiles, split_kv.parts_of(tiles, (number < self.rows).astype(jnp.int32), self.shares)

    def row_of(self, facts: Facts, item: Any, head: Any) -> Row:
        """What the program of an item works on."""
        tiles, parts = self.parts(facts)
        row, nth = split_kv.locate_longest_first(tiles, parts, item)
        own, exists = split_kv.at(parts, row), row < self.rows
        b, kv_h = self.place(jnp.minimum(row, self.rows - 1), head)
        share = blocks.Part(jnp.where(exists, nth, 1), jnp.maximum(own, 1))  # the part after the last one is empty
        slot = _slots_before(parts, row) + nth
        return Row(b, kv_h, facts.end(self.spec, b), share, exists, own == 1, slot)

    def divided_row(self, parts: jax.Array, nth: Any, head: Any) -> Divided:
        """The nth of the rows that are divided."""
        row, _ = split_kv.locate((parts > 1).astype(jnp.int32), nth)
        b, kv_h = self.place(jnp.minimum(row, self.rows - 1), head)
        return Divided(b, kv_h, _slots_before(parts, row), split_kv.at(parts, row))


def all_tiles(spec: AttentionSpec, tiles: Tiles) -> int:
    """The most tiles of keys that a row may visit."""
    if spec.block_size is None:
        return pl.cdiv(spec.S, tiles.block_kv)
    return pl.cdiv(spec.S, spec.block_size[1]) * (spec.block_size[1] // tiles.block_kv)


def most_blocks(spec: AttentionSpec, end: Any) -> Any:
    """How many of a row's listed blocks may begin before `end`: lists ascend, so these are the first ones."""
    assert spec.block_size is not None
    return None if end is None else lax.div(end + (spec.block_size[1] - 1), spec.block_size[1])


def _list_position(spec: AttentionSpec, b: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros_like(b)
    return (b if spec.list_batch > 1 else zero), (h if spec.list_heads > 1 else zero)


def _slots_before(parts: jax.Array, row: Any) -> jax.Array:
    earlier = lax.broadcasted_iota(jnp.int32, parts.shape, 0) < row
    return jnp.sum(jnp.where(earlier & (parts > 1), parts, 0))


def store_part(row: Row, head: Any, rows: Columns, lse: jax.Array, parts: tuple[Any, Any]) -> None:
    """Keeps what a part of a divided row gave: its rows as they are, and their lse."""
    part_out, part_lse = parts
    kept, block_q = row.exists & ~row.whole, lse.shape[0]
    slot = jnp.minimum(row.slot, part_lse.shape[0] - 1)
    line = lax.broadcasted_iota(jnp.int32, (block_q,), 0)
    plgpu.store(part_lse.at[(slot, head, line)], lse, mask=jnp.broadcast_to(kept, (block_q,)))
    for (first, width), x in zip(chunks(part_out.shape[-1]), rows, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (block_q, width), 1)
        line = lax.broadcasted_iota(jnp.int32, (block_q, width), 0)
        plgpu.store(part_out.at[(slot, head, line, column)], x, mask=(column < part_out.shape[-1]) & kept)


def load_lse(spec: AttentionSpec, row: Row, block_q: int, lse: Any) -> jax.Array:
    """Loads the lse of the queries of a key head; lines past the last query repeat it."""
    line = jnp.minimum(lax.broadcasted_iota(jnp.int32, (block_q,), 0), spec.group * spec.T - 1)
    return plgpu.load(lse.at[(row.b, row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T))])


def store_whole(
    spec: AttentionSpec, row: Row, rows: Columns, row_lse: jax.Array, out: Any, lse: Any, keeps: jax.Array | None = None
) -> None:
    """Writes the rows of an undivided row to where they belong; `keeps`: outputs that stay as they are."""
    here, block_q = row.exists & row.whole, row_lse.shape[0]

    def place(line: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Lines past the last name rows of other heads, or none; as repeated ones they would undo, in the interpreter,
        # what the last one stores.
        there = here & (line < spec.group * spec.T)
        return row.kv_h * spec.group + lax.div(line, spec.T), lax.rem(line, spec.T), there

    h, t, there = place(lax.broadcasted_iota(jnp.int32, (block_q,), 0))
    plgpu.store(lse.at[(row.b, h, t)], row_lse, mask=there)
    for (first, width), x in zip(chunks(spec.Dv), rows, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (block_q, width), 1)
        h, t, there = place(lax.broadcasted_iota(jnp.int32, (block_q, width), 0))
        at = (row.b, t, h, column) if spec.layout == "BTNH" else (row.b, h, t, column)
        there = there if keeps is None else there & ~keeps[:, None]
        plgpu.store(out.at[at], x.astype(out.dtype), mask=(column < spec.Dv) & there)


def over_keys(
    spec: AttentionSpec, tiles: Tiles, lists: Any, row: Row, state: Any, step: Callable[[Any, Any, bool, bool], Any]
) -> Any:
    """Folds ``step(state, first, is_partial, may_end)`` over a row's part of the tiles of keys.

    `may_end` says that a tile may reach past `Row.end`: then something is hidden, whether the mask does so or not.
    """
    if spec.block_size is None:
        masked, tile = spec.programs.mask is not None, tiles.block_kv
        whole, all_of_it = lax.div(row.end, tile), lax.div(row.end + (tile - 1), tile)
        start, end = row.part.of(all_of_it)
        inside = lambda t, s: step(s, t * tile, masked, False)
        state = lax.fori_loop(jnp.minimum(start, whole), jnp.minimum(end, whole), inside, state)
        last = lambda t, s: step(s, t * tile, True, True)
        return lax.fori_loop(jnp.maximum(start, whole), jnp.maximum(end, whole), last, state)
    counts, indices, full_counts, full_indices = lists[:4]
    at = (*blocks.list_position(spec, row.b, row.kv_h), 0)
    block_row = blocks.BlockRow((counts, indices), (full_counts, full_indices), at)
    may_end = row.end is not None
    listed = lambda s, first, is_partial: step(s, first, is_partial, may_end or (is_partial and _ends(spec, tiles)))
    most = most_blocks(spec, row.end)
    return blocks.walk(block_row, spec.block_size[1], tiles.block_kv, spec.S, state, listed, row.part, most)


def _ends(spec: AttentionSpec, tiles: Tiles) -> bool:
    return spec.walk_passes_end("k", tiles.block_kv)
