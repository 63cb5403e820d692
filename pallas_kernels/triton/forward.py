"""Forward kernel through Triton.

One program (CTA) computes a tile of queries of one head: it walks the listed blocks of keys, partial ones with the mask
and full ones without, and keeps the query, the online softmax state and the O accumulator in registers (Dong et al.
2024, arXiv:2412.05496, section 4; Dao 2023, arXiv:2307.08691, algorithm 1). The grid is (tiles of queries, query heads,
batch).

Roofline on an H200: GEMMs at 817 TFLOP/s as measured; the SFU at one exponential for each score, 16 a cycle and SM, is
1070 TFLOP/s at head size 64 and 2140 at 128. One after the other that is 463 and 591, and 450 and 501 to 553 are
reached without a mod: a Triton program waits for its MMAs before it computes exponentials, and only the other resident
program of the SM (occupancy 2) overlaps. To do better, one program must overlap both (ping-pong), which Triton cannot
express.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton import scores
from pallas_kernels.triton.attention import Attention, Tile
from pallas_kernels.triton.containment import Marked, repair_tiles
from pallas_kernels.triton.head_chunks import load_keys, load_queries, store_rows, store_vector
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Ref


def forward(spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array]) -> tuple[jax.Array, ...]:
    """Computes out, in the layout of the query and the dtype of the value, lse and ``spec.stats``, float32 [B, Hq, T].

    Args:
      arrays: Query [B, T, Hq, D], key [Bkv, S, Hkv, D] and value [Bkv, S, Hkv, Dv], or in the layout BNTH; lists of the
        mask; captured arrays; sinks.
    """
    order = block_walk.row_order(spec, tiles, arrays)
    outputs = [
        jax.ShapeDtypeStruct(spec.rows_shape(spec.Dv), arrays.value.dtype),
        *(jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32) for _ in ("lse", *spec.stats)),
    ]
    out, lse, *stats = runner_of(spec).launch(
        functools.partial(_kernel, spec, tiles),
        (arrays, order),
        outputs,
        name="jflex_forward",
        grid=(pl.cdiv(spec.T, tiles.block_q), spec.Hq, spec.B),
        tiles=tiles,
    )
    if spec.needs_marks:  # which a masked NaN reached by its value: the stats are those of scores, and stay
        out, lse = repair(spec, tiles, arrays, (out, lse))
    return out, lse, *stats


def repair(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array], result: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Recomputes the tiles that have an lse of NaN; see `containment`."""
    tiles = repair_tiles(tiles)
    marked = Marked(spec, spec.Hq, spec.B, spec.T, tiles.block_q)
    count = len(jax.tree.leaves(arrays))
    out, lse = runner_of(spec).launch(
        functools.partial(_repair_kernel, spec, tiles, marked),
        (arrays, tuple(result)),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in result],
        name="jflex_forward_repair",
        grid=(marked.programs,),
        tiles=tiles,
        aliases={count: 0, count + 1: 1},
    )
    return out, lse


def _kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[Ref],
    order: Ref | None,  # [list batch, list heads, tiles of queries], or None
    out: Ref,  # [B, T, Hq, Dv] or [B, Hq, T, Dv]
    lse: Ref,  # [B, Hq, T]
    *stats: Ref,  # [B, Hq, T] for each of `spec.stats`
) -> None:
    i, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = block_walk.row_at(spec, order, b, h, i, pl.num_programs(0))
    rows, vectors = _attention(spec, tiles, arrays, b, h, tile).attend()
    first, rows_end = tile * tiles.block_q, spec.T % tiles.block_q != 0
    store_rows(spec, out, b, h, first, rows, spec.T, may_end=rows_end)
    for ref, x in zip((lse, *stats), vectors, strict=True):
        store_vector(spec, ref, (b, h), first, x, spec.T, may_end=rows_end)


def _repair_kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    marked: Marked,
    arrays: Operands[Ref],
    before: tuple[Ref, Ref],  # out and lse, as the forward kernel left them
    out: Ref,  # [B, T, Hq, Dv] or [B, Hq, T, Dv], the same memory
    lse: Ref,  # [B, Hq, T], the same memory
) -> None:
    rows_end = spec.T % tiles.block_q != 0

    def fix(b: jax.Array, h: jax.Array, first: jax.Array) -> None:
        tile = lax.div(first, jnp.int32(tiles.block_q))
        clean, (row_lse, *_), attended = _attention(spec, tiles, arrays, b, h, tile).repair()
        rows = load_queries(spec, before[0], b, h, first, tiles.block_q, may_end=rows_end)
        rows = attended.keep(rows, clean)
        store_rows(spec, out, b, h, first, rows, spec.T, may_end=rows_end)
        store_vector(spec, lse, (b, h), first, row_lse, spec.T, may_end=rows_end)

    marked.repair(before[1], fix)


def _attention(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], b: jax.Array, h: jax.Array, tile: jax.Array
) -> Attention:
    """The attention of a tile of queries of a head."""
    rows_end, keys_end = spec.T % tiles.block_q != 0, spec.walk_passes_end("k", tiles.block_kv)
    first = tile * tiles.block_q
    q = load_queries(spec, arrays.query, b, h, first, tiles.block_q, may_end=rows_end)  # [Bq, D]
    prepared = scores.prepare(spec, arrays, tiles.shape, b, h, q_first=first)

    def tile_at(key: Index, is_partial: bool) -> Tile:
        load = functools.partial(
            load_keys, spec, b=b, h=h, first=key, rows=tiles.block_kv, may_end=is_partial and keys_end
        )
        result = scores.compute(prepared, q, load(arrays.key), key, is_partial)  # S = QK^T, [Bq, Bk]
        return Tile(result, load(arrays.value))  # V [Bk, Dv]

    walk = functools.partial(block_walk.over_keys, spec, tiles, arrays, (b, h, tile))
    may_be_empty = spec.programs.mask is not None or spec.programs.score is not None
    sink = None if arrays.sinks is None else arrays.sinks[h]
    return Attention(prepared, tiles.block_q, walk, tile_at, may_be_empty, sink)
