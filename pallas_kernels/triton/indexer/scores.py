"""The scores of the lightning indexer (DeepSeek-V3.2), without a product in memory.

A program holds a block of keys, and walks over a block of queries. The rows of its tile are keys and the columns the
heads of one query, so that the sum over heads stays within the threads that share a row of an MMA.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.triton.head_chunks import MIN_DOT_SIZE, Columns, chunks
from pallas_kernels.triton.launch import Runner
from pallas_kernels.types import Index, Ref

MAX_HEADS_AT_ONCE = 64  # 64 registers of a thread for products with 128 keys, in 4 warps
WIDE_HEAD_SIZE = 128  # above which fewer keys are held: 128 of 256 columns leave the queries no shared memory on Ada
PROGRAMS = 8 * 132  # from which on a program takes several queries: it loads its keys once
WARPS, STAGES = 4, 2  # H100, 32 sequences of 65,536 keys, 64 heads of 128: 206 us, 215 with 8 warps, a copy 178


class _Tile(NamedTuple):
    """Sizes of the call and of what a program computes."""

    queries: int
    heads: int
    keys: int
    block_queries: int  # queries of a program
    block_heads: int  # heads of a tile, a power of two
    block_keys: int  # keys of a tile


def scores(runner: Runner, query: jax.Array, key: jax.Array, weights: jax.Array) -> jax.Array:
    """Float32 ``scores[n, s] = sum over h of weights[n, h] * relu(query[n, h] . key[s])``.

    Queries [N, H, D] and keys [S, D] are both bfloat16 or float16, with at least one of each; weights [N, H] are
    floating point.
    """
    tile = _tile_of(query.shape, key.shape[0])
    [out] = runner.launch(
        functools.partial(_kernel, runner, tile),
        (query, key, weights),
        [jax.ShapeDtypeStruct((tile.queries, tile.keys), jnp.float32)],
        name="jflex_indexer_scores",
        grid=(pl.cdiv(tile.keys, tile.block_keys), pl.cdiv(tile.queries, tile.block_queries)),
        tiles=Tiles(tile.block_heads, tile.block_keys, num_warps=WARPS, num_stages=STAGES),
    )
    return out


def _tile_of(shape: tuple[int, ...], keys: int) -> _Tile:
    queries, heads, size = shape
    block_keys = 128 if size <= WIDE_HEAD_SIZE else 64
    programs = pl.cdiv(PROGRAMS, pl.cdiv(keys, block_keys))  # along the queries
    block_heads = min(MAX_HEADS_AT_ONCE, max(MIN_DOT_SIZE, 1 << (heads - 1).bit_length()))
    return _Tile(queries, heads, keys, pl.cdiv(queries, programs), block_heads, block_keys)


def _kernel(runner: Runner, tile: _Tile, query: Ref, key: Ref, weights: Ref, out: Ref) -> None:
    first = pl.program_id(0) * tile.block_keys
    keys = _load_rows(runner, key, (), first, tile.block_keys, tile.keys)
    position = first + lax.broadcasted_iota(jnp.int32, (tile.block_keys,), 0)
    exists = None if tile.keys % tile.block_keys == 0 else position < tile.keys

    def score(n: Index) -> None:
        total = _sum_over_heads(runner, tile, query, weights, keys, n)
        runner.store(out.at[n, position], total, mask=exists)

    if tile.block_queries == 1:
        score(pl.program_id(1))
        return
    begin = pl.program_id(1) * tile.block_queries
    end = jnp.minimum(begin + tile.block_queries, tile.queries)
    lax.fori_loop(begin, end, lambda n, _: score(n), None)


def _sum_over_heads(runner: Runner, tile: _Tile, query: Ref, weights: Ref, keys: Columns, n: Index) -> jax.Array:
    """Scores [block_keys] of one query."""

    def add(first: Index, total: jax.Array) -> jax.Array:
        heads = _load_rows(runner, query, (n,), first, tile.block_heads, tile.heads)
        products = _dot(keys[0], heads[0])
        for a, b in zip(keys[1:], heads[1:], strict=True):
            products += _dot(a, b)
        products = runner.relu(products)
        head = first + lax.broadcasted_iota(jnp.int32, (tile.block_heads,), 0)
        if tile.heads % tile.block_heads == 0:
            weight = runner.load(weights.at[n, head])
        else:  # zeros for the heads that do not exist: with a key that is infinite, their products are NaN
            products = jnp.where(jnp.broadcast_to(head[None] < tile.heads, products.shape), products, 0.0)
            weight = runner.load(weights.at[n, head], mask=head < tile.heads)
        return total + jnp.sum(products * weight.astype(jnp.float32)[None], axis=1)

    start, blocks = jnp.zeros((tile.block_keys,), jnp.float32), pl.cdiv(tile.heads, tile.block_heads)
    if blocks == 1:
        return add(jnp.int32(0), start)
    return lax.fori_loop(0, blocks, lambda i, total: add(i * tile.block_heads, total), start)


def _load_rows(runner: Runner, ref: Ref, at: tuple[Index, ...], first: Index, rows: int, length: int) -> Columns:
    """Rows [rows, D] of the last two axes in chunks of columns; zeros outside of the array."""

    def load(start: int, width: int) -> jax.Array:
        row = first + lax.broadcasted_iota(jnp.int32, (rows, width), 0)
        column = start + lax.broadcasted_iota(jnp.int32, (rows, width), 1)
        exists = []
        if length % rows:
            exists.append(row < length)
        if start + width > ref.shape[-1]:
            exists.append(column < ref.shape[-1])
        mask = functools.reduce(jnp.logical_and, exists) if exists else None
        return runner.load(ref.at[(*at, row, column)], mask=mask)

    return tuple(load(*chunk) for chunk in chunks(ref.shape[-1]))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b.T`` with a float32 accumulator."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
