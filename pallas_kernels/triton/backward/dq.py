"""Backward kernel for dQ, and for captured arrays with row loads, tile loads or uniform loads.

One program computes a tile of queries of one head, over the tiles of keys that the forward kernel visits. The grid is
(tiles of queries, query heads, batch).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.ref import addupdate

from pallas_kernels import block_walk
from pallas_kernels.gradients import KernelStatics, RowOperands, log2_lse, score_mod_vjp, weights_vjp
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.softmax import ScoreTile, mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton import scores
from pallas_kernels.triton.containment import Marked, cleared, repair_tiles
from pallas_kernels.triton.forward import QueryTile
from pallas_kernels.triton.head_chunks import Columns, add_rows, pv_dot, qk_dot, zero_rows
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Location, Ref


class DqOutputs(NamedTuple):
    """dQ; cotangents [B, Hq, T] of ``groups.rows``; gradients of the arrays of ``groups.stores`` and ``.atomics``."""

    query: jax.Array
    rows: list[jax.Array]
    tiles: list[jax.Array]


def dq(statics: KernelStatics, arrays: Operands[jax.Array], rows: RowOperands[jax.Array]) -> DqOutputs:
    """Computes dQ, in the layout and dtype of the query, and cotangents of loads, from the operands of the forward."""
    (spec, tiles, _, groups), operands = statics, arrays.captured.score
    assert groups is not None  # but for a repair
    zeros = [jnp.zeros(operands[n.value].shape or (1,), operands[n.value].dtype) for n in groups.stores]
    zeros += [jnp.zeros(operands[n.value].shape, jnp.float32) for n in groups.atomics]
    inputs = (arrays, block_walk.row_order(spec, tiles, arrays), rows, zeros)
    per_row = jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32)
    outputs = [
        jax.ShapeDtypeStruct(arrays.query.shape, arrays.query.dtype),
        *(per_row for _ in groups.rows),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in zeros),
        *([per_row] if spec.needs_marks else []),
    ]
    before = len(jax.tree.leaves(inputs[:3]))
    aliases = {before + i: 1 + len(groups.rows) + i for i in range(len(zeros))}
    result = runner_of(spec).launch(
        functools.partial(_kernel, statics),
        inputs,
        outputs,
        name="jflex_backward_dq",
        grid=(pl.cdiv(spec.T, tiles.block_q), spec.Hq, spec.B),
        tiles=tiles,
        aliases=aliases,
    )
    d_query, captured = result[0], result[1 : 1 + len(groups.rows) + len(zeros)]
    if spec.needs_marks:
        d_query = repair(statics, arrays, rows, d_query, result[-1])
    return DqOutputs(d_query, list(captured[: len(groups.rows)]), list(captured[len(groups.rows) :]))


def repair(
    statics: KernelStatics,
    arrays: Operands[jax.Array],
    rows: RowOperands[jax.Array],
    d_query: jax.Array,
    marks: jax.Array,
) -> jax.Array:
    """Recomputes dQ of the tiles with marked rows; `marks` is float32 [B, Hq, T]; see `containment`."""
    spec, tiles = statics.spec, repair_tiles(statics.tiles)
    kernel = functools.partial(_repair_kernel, statics._replace(tiles=tiles, groups=None))
    marked = Marked(spec, spec.Hq, spec.T, tiles.block_q)
    [d_query] = marked.launch(kernel, (arrays, rows, marks), (d_query,), tiles, "jflex_backward_dq_repair")
    return d_query


def _kernel(
    statics: KernelStatics,
    arrays: Operands[Ref],
    order: Ref | None,  # [list batch, list heads, tiles of queries], or None
    rows: RowOperands[Ref],  # dO like the output; lse, delta and dH [B, Hq, T]
    zeros: list[Ref],  # initial gradients of `groups.stores` and `groups.atomics`, aliased with outputs
    d_query: Ref,  # [B, T, Hq, D] or [B, Hq, T, D]
    *captured: Ref,  # [B, Hq, T] for each of `groups.rows`, then gradients of arrays, then marks [B, Hq, T]
) -> None:
    spec, tiles, derivative, groups = statics
    assert groups is not None  # but for a repair
    query_tile = QueryTile.of_program(spec, tiles, arrays, order)
    queries, written = _Queries.from_refs(query_tile, derivative, rows), captured[len(groups.rows) :]

    def step(state: tuple[Columns, Columns], key: Index, is_partial: bool) -> tuple[Columns, Columns]:
        (d_q, sums), (k, tile, d_s) = state, queries.d_scores(key, is_partial)
        d_s, of_load = score_mod_vjp(derivative, tile, d_s)  # dS' of QK^T, from dS of the modified scores
        sums = tuple(total + jnp.sum(of_load(n), axis=1) for total, n in zip(sums, groups.rows, strict=True))
        for load, ref in zip((*groups.stores, *groups.atomics), written, strict=False):
            assert tile.score is not None  # which loads
            first, add = (query_tile.first, key), load in groups.atomics
            write_cotangents(spec, ref, tile.score, load, of_load(load), first, add=add)
        return add_rows(d_q, pv_dot(spec, d_s, k)), sums  # dQ += dS' K

    sums = tuple(jnp.zeros((tiles.block_q,), jnp.float32) for _ in groups.rows)
    d_q, sums = query_tile.walk((zero_rows(tiles.block_q, spec.D), sums), step)
    queries.store(d_query, d_q)
    vectors = zip(captured, sums, strict=False)
    for ref, x in [*vectors, (captured[-1], mark(*d_q))] if spec.needs_marks else vectors:
        query_tile.store_vector(ref, x)


def _repair_kernel(
    statics: KernelStatics,
    marked: Marked,
    arrays: Operands[Ref],
    rows: RowOperands[Ref],
    marks: Ref,  # [B, Hq, T], or [B, Hq, 1] for all of a head
    before: tuple[Ref],
    d_query: Ref,  # [B, T, Hq, D] or [B, Hq, T, D]
) -> None:
    del before  # the memory of `d_query`
    spec, tiles, derivative, _ = statics

    def fix(at: Location) -> None:
        queries = _Queries.from_refs(QueryTile(spec, tiles, arrays, at), derivative, rows)

        def step(d_q: Columns, key: Index, is_partial: bool) -> Columns:
            k, tile, d_s = queries.d_scores(key, is_partial)
            d_s, _ = score_mod_vjp(derivative, tile, tile.clear(d_s))
            return add_rows(d_q, pv_dot(spec, d_s, cleared(k)))  # dQ += dS' K

        queries.store(d_query, queries.tile.walk(zero_rows(tiles.block_q, spec.D), step))

    marked.repair(marks, fix)


class _Queries(NamedTuple):
    """A tile of queries of a head: what the prologue loads and prepares."""

    tile: QueryTile
    prepared: scores.Scores
    q: Columns  # [Bq, D], in chunks of columns
    d_out: Columns  # [Bq, Dv], in chunks of columns
    lse_log2: jax.Array  # the lse in base 2, [Bq], as are delta and the cotangent of the entropy
    delta: jax.Array
    d_entropy: jax.Array | None

    @classmethod
    def from_refs(cls, tile: QueryTile, derivative: Derivative | None, rows: RowOperands[Ref]) -> _Queries:
        """Loads it."""
        q, d_out, vector = tile.load(tile.arrays.query), tile.load(rows.d_out), tile.load_vector
        lse_log2, delta = log2_lse(vector(rows.lse, other=-jnp.inf)), vector(rows.delta, other=0.0)
        prepared = tile.prepare(None if derivative is None else derivative.nodes)
        return cls(tile, prepared, q, d_out, lse_log2, delta, rows.load_d_entropy(vector))

    def d_scores(self, key: Index, is_partial: bool) -> tuple[Columns, ScoreTile, jax.Array]:
        """A tile of keys, its scores, and the cotangents of the modified scores."""
        spec, arrays = self.tile.spec, self.tile.arrays
        load = functools.partial(self.tile.load_keys, key=key, may_end=is_partial and self.tile.keys_end)
        k = load(arrays.key)  # [Bk, D]
        tile = scores.compute(self.prepared, self.q, k, key, is_partial)  # S = QK^T, [Bq, Bk]
        lse_log2 = self.lse_log2[:, None]
        p = scores.probabilities(self.prepared, tile, lse_log2)  # P = exp2(S - lse)
        d_p = weights_vjp(spec, tile, qk_dot(spec, self.d_out, load(arrays.value)))  # dP = dO V^T
        d_p = scores.entropy_vjp(self.prepared, tile, d_p, lse_log2, self.d_entropy)
        return k, tile, scores.scores_vjp(self.prepared, tile, p, d_p, self.delta[:, None])  # dS = P * (dP - delta)

    def store(self, d_query: Ref, d_q: Columns) -> None:
        """Epilogue: scales and stores dQ."""
        self.tile.store(d_query, tuple(x * self.tile.spec.scale for x in d_q))


def write_cotangents(
    spec: AttentionSpec,
    ref: Ref,
    score: Evaluation,
    load: Node,
    cotangent: jax.Array,
    first: tuple[Index, Index],
    *,
    add: bool,
    split: Index | None = None,  # index of the leading axis of a gradient of splits
) -> None:
    """Writes the cotangents of a tile to the gradient of the array: a plain store where nothing else writes there."""
    (q_first, k_first), shape = first, cotangent.shape
    at = tuple(score.space.spread(score(i), i.kind, Axes.TILE) for i in load.inputs)
    at = at if split is None else (jnp.full(shape, split, jnp.int32), *at)
    exists = (q_first + lax.broadcasted_iota(jnp.int32, shape, 0) < spec.T) & (
        k_first + lax.broadcasted_iota(jnp.int32, shape, 1) < spec.S
    )
    # Indices of padding are clamped to the last row: what is added there is 0. The interpreter also writes masked
    # elements, with their old values; so there the one store becomes an addition to the zeros.
    if add or spec.config.interpret:
        addupdate(ref, at, jnp.where(exists, cotangent, 0.0).astype(ref.dtype))
    else:
        runner_of(spec).store(ref.at[at], cotangent.astype(ref.dtype), mask=exists)
