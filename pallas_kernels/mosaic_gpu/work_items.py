"""Work items of the kernels with split-KV: a tile of queries of a request, one split of its keys, a group of heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu.launch import NUM_SMS
from pallas_kernels.mosaic_gpu.score.tile import ROW
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv.work import NUM_ITEMS
from pallas_kernels.types import Axis, Index, Ref

TILE_KEYS = 64  # of a tile of keys
TILED_ROWS = 8  # of a swizzled tile: what TMA writes to shared memory is a multiple
PageRows: TypeAlias = "tuple[tuple[jax.Array, Axis], Axis]"  # a page and its rows, and which rows of a tile they are


class Item(NamedTuple):
    """One work item of one group of heads, as scalars."""

    group: jax.Array  # the group of heads: those that share a key head, or some heads of a latent cache
    request: jax.Array
    first: jax.Array  # the first query, packed
    queries: jax.Array  # queries from there to the end of the request
    length: jax.Array  # keys of the request
    begin: jax.Array  # the first tile of keys
    end: jax.Array  # one past the last
    slot: jax.Array  # of the partial result; -1 where the keys of the tile of queries are not split
    full_begin: jax.Array  # the first tile of keys from which on no key is masked
    full_end: jax.Array  # one past the last of them; at least `full_begin`

    @property
    def tiles(self) -> jax.Array:
        """Tiles of keys."""
        return jnp.maximum(self.end - self.begin, 0)

    @property
    def pairs(self) -> jax.Array:
        """Pairs of tiles of keys; the last may have but one."""
        return lax.div(self.end - self.begin + 1, jnp.int32(2))


def over_items(
    items: Ref, groups: int, cta_id: Index, body: Callable[[jax.Array, Item, jax.Array], jax.Array]
) -> jax.Array:
    """Runs ``count = body(i, item, count)`` for the items of a persistent CTA; `count` is the caller's, from 0 on.

    The groups of heads of an item lie side by side, so that CTAs that run at once read the same keys from L2, or
    neighboring ones. `items` is the table, int32 [items, FIELDS], and `i` the number of an item in the CTA.
    """
    heads, ctas = jnp.int32(groups), jnp.int32(NUM_SMS)
    total = items[0, NUM_ITEMS] * heads
    # Every other round in reverse: where the longest items come first, a CTA with a long one gets a short one next.
    position = lambda i: jnp.where(lax.rem(i, jnp.int32(2)) == 0, cta_id, ctas - 1 - cta_id)

    def run(i: jax.Array, count: jax.Array) -> jax.Array:
        number = position(i) + i * ctas
        at, group = lax.div(number, heads), lax.rem(number, heads)
        return body(i, Item(group, *(items[at, field] for field in range(NUM_ITEMS))), count)

    whole = lax.div(total, ctas)
    rounds = whole + (position(whole) < lax.rem(total, ctas)).astype(jnp.int32)
    return lax.fori_loop(0, rounds, run, jnp.int32(0))


def num_ctas(items: int, groups: int) -> int:
    """CTAs of a launch: one on each SM, if there is work for so many."""
    return min(NUM_SMS, items * groups)


def num_queries(spec: AttentionSpec) -> int:
    """Packed queries: of all batch entries in a dense call."""
    return spec.T if spec.paging is not None else spec.B * spec.T


def page_rows(spec: AttentionSpec, table: Ref, first_page: Ref, item: Item, tile: jax.Array) -> list[PageRows]:
    """Pages and rows of the `tile`-th tile of keys; past the length of the request, its last page is read.

    `table` is int32 [R, max_pages], and `first_page` int32 [1].
    """
    size = rows_of_piece(spec)
    places = [look_up_page(spec, table, first_page, item, (tile, i)) for i in range(pieces_of_tile(spec))]
    return [((page, pl.ds(row, size)), pl.ds(i * size, size)) for i, (page, row) in enumerate(places)]


def look_up_page(
    spec: AttentionSpec, table: Ref, first_page: Ref, item: Item, at: tuple[jax.Array, int], keys: int = TILE_KEYS
) -> tuple[jax.Array, Index]:
    """Page and first row of a piece of a tile of so many keys; `at` are the numbers of both."""
    size, pieces, (tile, piece) = rows_of_piece(spec, keys), pieces_of_tile(spec, keys), at
    page, row = tile * pieces + piece, 0
    if spec.page_size > size:
        per_page = jnp.int32(spec.page_size // size)
        page, row = lax.div(page, per_page), lax.rem(page, per_page) * size
    if pieces > 1:
        page = jnp.minimum(page, lax.div(item.length - 1, jnp.int32(spec.page_size)))
    return jnp.clip(table[item.request, page], 0, spec.num_pages - 1) + first_page[0], row


def lines_of_tile(
    spec: AttentionSpec, table: Ref, first_page: Ref, item: Item, tile: jax.Array, keys: int
) -> jax.Array:
    """Lines of a tile of so many keys in the pages of one head, int32 [keys]; past the length, the last key."""
    key = jnp.minimum(tile * keys + plg.broadcasted_iota(jnp.int32, (keys,), 0, layout=ROW), item.length - 1)
    size = jnp.int32(spec.page_size)
    page = inline_ptx.load_elements(table.at[item.request], lax.div(key, size), ROW, np.dtype(np.int32))
    page = jnp.minimum(jnp.maximum(page, 0), spec.num_pages - 1) + first_page[0]
    return page * size + lax.rem(key, size)


def rows_of_piece(spec: AttentionSpec, keys: int = TILE_KEYS) -> int:
    """Keys of a TMA copy: of a page, as far as it lies in one tile of so many keys."""
    return math.gcd(spec.page_size, keys)


def pieces_of_tile(spec: AttentionSpec, keys: int = TILE_KEYS) -> int:
    """TMA copies of a tile of so many keys."""
    return keys // rows_of_piece(spec, keys)


def limit_of_pages(spec: AttentionSpec) -> str | None:
    """Why pages of a size do not make up tiles, as a sentence, or None."""
    size = spec.page_size
    if size % TILED_ROWS == 0 and (TILE_KEYS % size == 0 or size % TILE_KEYS == 0):
        return None
    return f"its kernel takes pages of 8, 16 or 32 keys or of a multiple of {TILE_KEYS}, not of {size}"
