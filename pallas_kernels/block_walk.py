"""Loops over the tiles that a mask shows, partial ones before full ones, and the order of such loops.

A block mask lists the tiles. Without lists, they are the range of the program of the mask
(`pallas_kernels.program.ranges`), or all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.config import Tiles
from pallas_kernels.program.intervals import Span
from pallas_kernels.program.ranges import Range, has_range, is_range, visible_range
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Index, Location, Ref, S, Step

EMPTY, PARTIAL, FULL = 0, 1, 2  # states of blocks


class BlockRow(NamedTuple):
    """The lists of a row of blocks that a tile walks: refs to counts and indices, and the index of the row in them."""

    partial: tuple[Ref, Ref]
    full: tuple[Ref, Ref]
    at: tuple[Index, Index, Index]
    descending: bool = False  # whether both lists are walked from their ends, the full blocks first; not with splits


def list_position(spec: AttentionSpec, b: Index, h: Index) -> tuple[Index, Index]:
    """Batch and head index into the lists, which batch entries and heads may share."""
    return (b if spec.list_batch > 1 else 0), (h if spec.list_heads > 1 else 0)


def row_of_lists(spec: AttentionSpec, lists: Sequence[Ref], b: Index, h: Index, row: Index) -> BlockRow:
    """A row of blocks of a batch entry and head; `lists` are counts, indices, full counts and full indices."""
    counts, indices, full_counts, full_indices = lists
    return BlockRow((counts, indices), (full_counts, full_indices), (*list_position(spec, b, h), row))


class Split(NamedTuple):
    """One split of a walk (split-KV): the ith of `splits` of equal length."""

    i: Index
    splits: Index

    def tile_range(self, total: Index) -> tuple[Index, Index]:
        """First tile and end of the split, among `total` tiles."""
        size = lax.div(total + (self.splits - 1), self.splits)
        return jnp.minimum(self.i * size, total), jnp.minimum((self.i + 1) * size, total)


class FixedSplit(NamedTuple):
    """One split of a walk, the ith of `size` tiles each."""

    i: Index
    size: int

    def tile_range(self, total: Index) -> tuple[Index, Index]:
        """First tile and end of the split, among `total` tiles."""
        return jnp.minimum(self.i * self.size, total), jnp.minimum((self.i + 1) * self.size, total)


def walk(
    row: BlockRow,
    block: int,  # size of a block along the walk; that of a tile divides it
    tile: int,
    length: int,  # of the axis that is walked
    state: S,
    step: Step[S],
    split: Split | FixedSplit | None = None,  # which of the listed tiles to walk; all without
    max_blocks: Index | None = None,  # how many blocks of each list are walked, the first ones; None for all
) -> S:
    """Folds ``step(state, first, is_partial)`` over the tiles of the listed blocks, `first` their first indices."""
    per_block = block // tile  # lax.div and lax.rem below: `//` and `%` would repair the sign of a number that has none
    last = -(-length // block) - 1
    bounded = lambda count: count if max_blocks is None else jnp.minimum(count, max_blocks)
    lengths = [bounded(counts[row.at]) * per_block for counts, _ in (row.partial, row.full)]
    start, end = (0, None) if split is None else split.tile_range(lengths[0] + lengths[1])
    lists = list(zip((row.partial, row.full), (True, False), lengths, strict=True))
    for (_, indices), is_partial, tiles in lists[::-1] if row.descending else lists:

        def body(t, state, indices=indices, is_partial=is_partial, tiles=tiles):
            t = tiles - 1 - t if row.descending else t
            i, within = (t, 0) if per_block == 1 else (lax.div(t, per_block), lax.rem(t, per_block))
            block_id = block_at(indices, row.at, i, last + 1)
            block_id = jnp.minimum(jnp.maximum(block_id, 0), last)  # lists from the user may hold anything
            return step(state, block_id * block + within * tile, is_partial)

        if end is None:
            state = lax.fori_loop(0, tiles, body, state)
        else:  # a split covers the concatenation of both lists: the partial blocks, then the full ones
            state = lax.fori_loop(jnp.minimum(start, tiles), jnp.minimum(end, tiles), body, state)
            start, end = jnp.maximum(start - tiles, 0), jnp.maximum(end - tiles, 0)
    return state


def block_at(indices: Ref | jax.Array, at: tuple[Index, ...], i: Index, blocks: int) -> jax.Array:
    """The ith block of a row of a table; `i` is below the count of the row.

    If the table has fewer entries than there are `blocks`, the last entry of a row begins a run: the blocks after it
    follow one by one.
    """
    last = indices.shape[-1] - 1
    if last + 1 >= blocks:
        return indices[(*at, i)]
    entry = jnp.minimum(i, last)
    return indices[(*at, entry)] + (i - entry)


def walk_all(
    tile: int, length: int, is_partial: bool, state: S, step: Step[S], split: Split | FixedSplit | None = None
) -> S:
    """Walks like `walk`, over a whole axis without lists; a last tile with padding counts as partial."""
    whole = 0 if is_partial else length // tile
    tiles = -(-length // tile)
    if split is not None:
        start, end = split.tile_range(tiles)
        first, last = jnp.minimum(start, whole), jnp.minimum(end, whole)
        state = lax.fori_loop(first, last, lambda t, s: step(s, t * tile, False), state)
        first, last = jnp.maximum(start, whole), jnp.maximum(end, whole)
        return lax.fori_loop(first, last, lambda t, s: step(s, t * tile, True), state)
    state = lax.fori_loop(0, whole, lambda t, s: step(s, t * tile, False), state)
    return lax.fori_loop(whole, tiles, lambda t, s: step(s, t * tile, True), state) if tiles > whole else state


def walk_range(tiles: Range, tile: int, state: S, step: Step[S], *, descending: bool = False) -> S:
    """Walks like `walk`, over a range of tiles."""
    before, full = tiles.full_first - tiles.first, tiles.full_end - tiles.full_first
    partials = before + (tiles.end - tiles.full_end)

    def partial(t: Index, state: S) -> S:
        t = partials - 1 - t if descending else t
        at = tiles.first + t
        return step(state, jnp.where(t < before, at, at + full) * tile, True)

    def whole(t: Index, state: S) -> S:
        t = tiles.full_first + tiles.full_end - 1 - t if descending else t
        return step(state, t * tile, False)

    loops = [(0, partials, partial), (tiles.full_first, tiles.full_end, whole)]
    for first, end, body in loops[::-1] if descending else loops:
        state = lax.fori_loop(first, end, body, state)
    return state


def visible_tiles(spec: AttentionSpec, tiles: Tiles, walked: str, at: tuple[Index, ...]) -> Range | None:
    """The tiles along ``"k"`` or ``"q"`` that a tile of the other axis visits, at (batch, head, tile).

    None with a block mask, and where the mask proves nothing. Indices are int32 of any shapes that broadcast.
    """
    program = spec.programs.mask
    if spec.block_size is not None or program is None or not has_range(program, walked):
        return None
    (axis, size), (tile, length) = ("q", tiles.block_q), (tiles.block_kv, spec.S)
    if walked == "q":
        (axis, size), (tile, length) = ("k", tiles.block_kv), (tiles.block_q, spec.T)
    first = jnp.int32(at[2]) * size
    spans = {axis: Span(first, first + (size - 1)), "b": Span(at[0], at[0]), "h": Span(at[1], at[1])}
    return visible_range(program, walked, length, spans).in_tiles(tile)


def without_lists(spec: AttentionSpec, *axes: str) -> AttentionSpec:
    """The call without the lists of its BlockMask, if these follow from a mask that is a range along each of the axes.

    The axes are ``"k"`` for kernels that walk keys, and ``"q"`` for queries.
    """
    blocks, mask = spec.blocks, spec.programs.mask
    if blocks is None or mask is None or not blocks.follow_mod or any(size % 128 for size in blocks.size):
        return spec
    return spec.replace(blocks=None) if all(is_range(mask, axis) for axis in axes) else spec


def visits_all(spec: AttentionSpec) -> bool:
    """True if walks visit all tiles, whatever their sizes."""
    program = spec.programs.mask
    return spec.block_size is None and (program is None or not has_range(program, "k"))


def count_tiles(spec: AttentionSpec, tiles: Tiles) -> tuple[int, int, int] | None:
    """Counts tiles of keys over batch and heads: those that `over_keys` visits, full ones among them, and all.

    None where it walks no range.
    """
    sizes = spec.B, spec.Hq, -(-spec.T // tiles.block_q)
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        at = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in sizes), indexing="ij", sparse=True)
        visible = jax.jit(lambda *at: visible_tiles(spec, tiles, "k", at))(*at)
        if visible is None:
            return None
        total = lambda x: int(np.broadcast_to(x, sizes).sum(dtype=np.int64))
        visited, full = visible.end - visible.first, visible.full_end - visible.full_first
        return total(visited), total(full), total(-(-spec.S // tiles.block_kv))


MIN_SORTED_ROWS = 32  # from which on sorting pays: it is two small kernels of 5 us together on an H200


def _order(spec: AttentionSpec, arrays: Operands[jax.Array], axis: int, tile: int, length: int) -> jax.Array | None:
    """The order of tiles along an axis: tiles with most blocks first, so that the last wave is balanced.

    None for so few tiles that reverse order is good enough, which is the same for a causal mask. A mask may have the
    order of its blocks among its captured arrays: to sort the rows of each call takes two kernels.
    """
    if spec.block_size is None:
        return None
    number = None if spec.mask_mod is None else spec.mask_mod.limits
    if number is not None and spec.block_size[axis] == tile and spec.list_heads == 1:
        order = arrays.captured.mask[number + 2 + axis]
        if order.shape[-1] >= MIN_SORTED_ROWS:
            return order
    assert arrays.lists is not None  # of the blocks
    weight = arrays.lists[4 * axis] + arrays.lists[4 * axis + 2]
    if axis == 1 and spec.list_heads > 1:
        weight = weight.reshape(spec.list_batch, spec.Hkv, spec.group, -1).sum(axis=2)
    weight = jnp.repeat(weight, spec.block_size[axis] // tile, axis=-1)[..., : -(-length // tile)]
    return None if weight.shape[-1] < MIN_SORTED_ROWS else jnp.argsort(-weight, axis=-1).astype(jnp.int32)


def row_order(spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array]) -> jax.Array | None:
    """The order in which tiles of queries are started, [list batch, list heads, tiles]; None is reverse order."""
    return _order(spec, arrays, 0, tiles.block_q, spec.T)


def row_at(spec: AttentionSpec, order: Ref | None, b: Index, h: Index, i: jax.Array, rows: Index) -> jax.Array:
    """The tile of queries that is started as the ith of `rows`."""
    return rows - 1 - i if order is None else order[(*list_position(spec, b, h), i)]


def over_keys(spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], at: Location, state: S, step: Step[S]) -> S:
    """Folds a step over the tiles of keys that a tile of queries visits, at (batch, head, tile)."""
    b, h, tile = at
    if (visible := visible_tiles(spec, tiles, "k", at)) is not None:
        return walk_range(visible, tiles.block_kv, state, step)
    if spec.block_size is None:
        return walk_all(tiles.block_kv, spec.S, spec.programs.mask is not None, state, step)
    assert arrays.lists is not None  # of the blocks
    row = row_of_lists(spec, arrays.lists[:4], b, h, lax.div(tile, jnp.int32(spec.block_size[0] // tiles.block_q)))
    return walk(row, spec.block_size[1], tiles.block_kv, spec.S, state, step)


def column_order(spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array]) -> jax.Array | None:
    """The order in which tiles of keys are started, [list batch, key heads or 1, tiles]; None is ascending."""
    return _order(spec, arrays, 1, tiles.block_kv, spec.S)


def column_at(spec: AttentionSpec, order: Ref | None, b: Index, kv_h: Index, i: jax.Array) -> jax.Array:
    """The tile of keys that is started as the ith."""
    return i if order is None else order[(*list_position(spec, b, kv_h), i)]


def over_queries(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[Ref],
    at: Location,
    state: S,
    step: Step[S],
    *,
    descending: bool = False,
) -> S:
    """Folds a step over the tiles of queries of one head that visit a tile of keys, at (batch, head, tile).

    Where a mask chooses tiles, `descending` reverses their order.
    """
    b, h, tile = at
    if (visible := visible_tiles(spec, tiles, "q", at)) is not None:
        return walk_range(visible, tiles.block_q, state, step, descending=descending)
    if spec.block_size is None:
        return walk_all(tiles.block_q, spec.T, spec.programs.mask is not None, state, step)
    assert arrays.lists is not None  # of the blocks
    column = row_of_lists(spec, arrays.lists[4:], b, h, lax.div(tile, jnp.int32(spec.block_size[1] // tiles.block_kv)))
    column = column._replace(descending=descending)
    return walk(column, spec.block_size[0], tiles.block_q, spec.T, state, step)


def count_keys(spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], location: Location) -> jax.Array:
    """Number of tiles that `over_keys` visits."""
    if (visible := visible_tiles(spec, tiles, "k", location)) is not None:
        return jnp.asarray(visible.end - visible.first, jnp.int32)
    if spec.block_size is None:
        return jnp.int32(-(-spec.S // tiles.block_kv))
    assert arrays.lists is not None  # of the blocks
    b, h, tile = location
    at = (*list_position(spec, b, h), lax.div(tile, jnp.int32(spec.block_size[0] // tiles.block_q)))
    listed = lambda counts: jnp.maximum(counts[at], 0)  # a negative count is walked like 0
    return (listed(arrays.lists[0]) + listed(arrays.lists[2])) * (spec.block_size[1] // tiles.block_kv)


def states(spec: AttentionSpec, lists: Sequence[jax.Array]) -> jax.Array:
    """`EMPTY`, `PARTIAL` or `FULL` for each block, int32 [list batch, list heads, rows, columns]."""
    assert spec.block_size is not None
    columns = -(-spec.S // spec.block_size[1])
    counts, indices, full_counts, full_indices = lists[:4]
    result = jnp.zeros((*counts.shape, columns), jnp.int32)
    outer = jnp.indices(counts.shape, sparse=True)
    column = jnp.arange(columns, dtype=jnp.int32)[None, None, None]
    for count, index, state in ((counts, indices, PARTIAL), (full_counts, full_indices, FULL)):
        count, width = count[..., None], index.shape[-1]
        listed = jax.lax.broadcasted_iota(jnp.int32, index.shape, 3) < count
        at = (*(x[..., None] for x in outer), jnp.clip(index, 0, columns - 1))
        result = result.at[at].max(jnp.where(listed, state, EMPTY))
        if width < columns:  # a narrow table ends in a run, see `block_at`
            in_run = (column > index[..., -1:]) & (column <= index[..., -1:] + count - width)
            result = jnp.where(in_run, state, result)
    return result
