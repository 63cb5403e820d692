"""Walking the lists of a block mask, in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import Tiles
from pallas_kernels.spec import Arrays, AttentionSpec

EMPTY, PARTIAL, FULL = 0, 1, 2  # kinds of blocks


class BlockRow(NamedTuple):
    """Which lists of which row of blocks a tile walks: refs to counts and indices, and where in them."""

    partial: tuple[Any, Any]
    full: tuple[Any, Any]
    at: tuple[Any, Any, Any]


def list_position(spec: AttentionSpec, b: Any, h: Any) -> tuple[Any, Any]:
    """Batch and head of the lists, which may be shared."""
    return (b if spec.list_batch > 1 else 0), (h if spec.list_heads > 1 else 0)


class Part(NamedTuple):
    """The share of a walk that one of several programs takes: the nth of so many of equal length."""

    nth: Any
    parts: Any

    def of(self, total: Any) -> tuple[Any, Any]:
        """Where it starts and ends among `total` tiles."""
        share = lax.div(total + (self.parts - 1), self.parts)
        return jnp.minimum(self.nth * share, total), jnp.minimum((self.nth + 1) * share, total)


def walk(
    row: BlockRow,
    block: int,
    tile: int,
    length: int,
    state: Any,
    step: Callable[[Any, Any, bool], Any],
    part: Part | None = None,
    most: Any = None,
) -> Any:
    """Folds ``step(state, first, is_partial)`` over the tiles of the listed blocks, `first` their first indices.

    Args:
      row: The lists.
      block: Size of a block along the walk.
      tile: Size of a tile along the walk; it divides the block.
      length: Of the axis that is walked.
      state: What is folded.
      step: One tile.
      part: Which of the listed tiles to take; all without.
      most: Of each list, only so many blocks are walked, the first ones.
    """
    per_block = block // tile  # lax.div and lax.rem below: `//` and `%` would repair the sign of a number that has none
    last = -(-length // block) - 1
    bounded = lambda count: count if most is None else jnp.minimum(count, most)
    lengths = [bounded(counts[row.at]) * per_block for counts, _ in (row.partial, row.full)]
    start, end = (0, None) if part is None else part.of(lengths[0] + lengths[1])
    for (_, indices), is_partial, tiles in zip((row.partial, row.full), (True, False), lengths, strict=True):

        def body(t, state, indices=indices, is_partial=is_partial):
            nth, within = (t, 0) if per_block == 1 else (lax.div(t, per_block), lax.rem(t, per_block))
            number = indices[(*row.at, nth)]
            number = jnp.minimum(jnp.maximum(number, 0), last)  # lists of the user's own may hold anything
            return step(state, number * block + within * tile, is_partial)

        if end is None:
            state = lax.fori_loop(0, tiles, body, state)
        else:  # the walk over both lists is one row of tiles, of which these are the first, then the rest
            state = lax.fori_loop(jnp.minimum(start, tiles), jnp.minimum(end, tiles), body, state)
            start, end = jnp.maximum(start - tiles, 0), jnp.maximum(end - tiles, 0)
    return state


def walk_all(
    tile: int,
    length: int,
    is_partial: bool,
    state: Any,
    step: Callable[[Any, Any, bool], Any],
    part: Part | None = None,
) -> Any:
    """As `walk` over all of an axis, without lists; a last tile that is cut short counts as partial."""
    whole = 0 if is_partial else length // tile
    tiles = -(-length // tile)
    if part is not None:
        start, end = part.of(tiles)
        first, last = jnp.minimum(start, whole), jnp.minimum(end, whole)
        state = lax.fori_loop(first, last, lambda t, s: step(s, t * tile, False), state)
        first, last = jnp.maximum(start, whole), jnp.maximum(end, whole)
        return lax.fori_loop(first, last, lambda t, s: step(s, t * tile, True), state)
    state = lax.fori_loop(0, whole, lambda t, s: step(s, t * tile, False), state)
    return lax.fori_loop(whole, tiles, lambda t, s: step(s, t * tile, True), state) if tiles > whole else state


MANY_ROWS = 32  # from which on sorting pays: it is two small kernels of 5 us together on an H200


def heaviest_first(counts: jax.Array) -> jax.Array | None:
    """Rows in the order in which they are started: those with most blocks first, so that none ends alone.

    None if there are so few that the last ones first will do, which is the same for a causal mask.
    """
    return None if counts.shape[-1] < MANY_ROWS else jnp.argsort(-counts, axis=-1).astype(jnp.int32)


def row_order(spec: AttentionSpec, tiles: Tiles, arrays: Arrays) -> jax.Array | None:
    """In which order the tiles of queries are started, [list batch, list heads, tiles]; None is the last one first."""
    if spec.block_size is None:
        return None
    weight = arrays.lists[0] + arrays.lists[2]
    per_block = spec.block_size[0] // tiles.block_q
    weight = jnp.repeat(weight, per_block, axis=-1)[..., : -(-spec.T // tiles.block_q)]
    return heaviest_first(weight)


def row_at(spec: AttentionSpec, order: Any, b: Any, h: Any, nth: Any, rows: Any) -> Any:
    """The tile of queries that is started as the nth of `rows`."""
    return rows - 1 - nth if order is None else order[(*list_position(spec, b, h), nth)]


def over_keys(
    spec: AttentionSpec, tiles: Tiles, arrays: Arrays, here: tuple[Any, Any, Any], state: Any, step: Any
) -> Any:
    """Folds a step over the tiles of keys that a tile of queries, of batch and head, visits."""
    b, h, tile = here
    if spec.block_size is None:
        return walk_all(tiles.block_kv, spec.S, spec.programs.mask is not None, state, step)
    counts, indices, full_counts, full_indices = arrays.lists[:4]
    at = (*list_position(spec, b, h), lax.div(tile, jnp.int32(spec.block_size[0] // tiles.block_q)))
    row = BlockRow((counts, indices), (full_counts, full_indices), at)
    return walk(row, spec.block_size[1], tiles.block_kv, spec.S, state, step)


def column_order(spec: AttentionSpec, tiles: Tiles, arrays: Arrays) -> jax.Array | None:
    """In which order the tiles of keys are started, [list batch, key heads or 1, tiles]; None is their own."""
    if spec.block_size is None:
        return None
    weight = arrays.lists[4] + arrays.lists[6]
    if spec.list_heads > 1:
        weight = weight.reshape(spec.list_batch, spec.Hkv, spec.group, -1).sum(axis=2)
    weight = jnp.repeat(weight, spec.block_size[1] // tiles.block_kv, axis=-1)[..., : -(-spec.S // tiles.block_kv)]
    return heaviest_first(weight)


def column_at(spec: AttentionSpec, order: Any, b: Any, kv_h: Any, nth: Any) -> Any:
    """The tile of keys that is started as the nth."""
    if order is None:
        return nth
    return order[b if spec.list_batch > 1 else 0, kv_h if spec.list_heads > 1 else 0, nth]


def over_queries(
    spec: AttentionSpec, tiles: Tiles, arrays: Arrays, here: tuple[Any, Any, Any], state: Any, step: Any
) -> Any:
    """Folds a step over the tiles of queries of one head that visit a tile of keys."""
    b, h, tile = here
    if spec.block_size is None:
        return walk_all(tiles.block_q, spec.T, spec.programs.mask is not None, state, step)
    counts, indices, full_counts, full_indices = arrays.lists[4:]
    at = (*list_position(spec, b, h), lax.div(tile, jnp.int32(spec.block_size[1] // tiles.block_kv)))
    column = BlockRow((counts, indices), (full_counts, full_indices), at)
    return walk(column, spec.block_size[0], tiles.block_q, spec.T, state, step)


def count_keys(spec: AttentionSpec, tiles: Tiles, arrays: Arrays, here: tuple[Any, Any, Any]) -> Any:
    """How many tiles `over_keys` visits."""
    if spec.block_size is None:
        return jnp.int32(-(-spec.S // tiles.block_kv))
    b, h, tile = here
    at = (*list_position(spec, b, h), lax.div(tile, jnp.int32(spec.block_size[0] // tiles.block_q)))
    listed = lambda counts: jnp.maximum(counts[at], 0)  # fewer than none are walked like none
    return (listed(arrays.lists[0]) + listed(arrays.lists[2])) * (spec.block_size[1] // tiles.block_kv)


def kinds(spec: AttentionSpec, lists: Any) -> jax.Array:
    """`EMPTY`, `PARTIAL` or `FULL` for each block, int32 [list batch, list heads, rows, columns]."""
    assert spec.block_size is not None
    columns = -(-spec.S // spec.block_size[1])
    counts, indices, full_counts, full_indices = lists[:4]
    found = jnp.zeros((*counts.shape, columns), jnp.int32)
    outer = jnp.indices(counts.shape, sparse=True)
    for count, index, kind in ((counts, indices, PARTIAL), (full_counts, full_indices, FULL)):
        listed = jax.lax.broadcasted_iota(jnp.int32, index.shape, 3) < count[..., None]
        at = (*(x[..., None] for x in outer), jnp.clip(index, 0, columns - 1))
        found = found.at[at].max(jnp.where(listed, kind, EMPTY))
    return found
