"""Tangent kernel through Triton: pushes tangents of the inputs forward, in one pass over the keys.

One program computes a tile of queries of one head, over the tiles of keys that the forward kernel visits. The lse is
known, so there is no online softmax: the state is a sum of outputs and one or two sums of rows. `pallas_kernels
.tangents` has the formulas: five GEMMs (S, dQ K^T, Q dK^T, T V, P dV), fewer where an input has no tangent.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import log2_lse
from pallas_kernels.plan import TangentPlan
from pallas_kernels.program.evaluate import Product
from pallas_kernels.softmax import LEAST_EXPONENT, ScoreTile, mark
from pallas_kernels.spec import LN_2, Operands
from pallas_kernels.tangents import Moved, Pushed
from pallas_kernels.triton import scores
from pallas_kernels.triton.containment import Attended, Marked, cleared, repair_tiles
from pallas_kernels.triton.forward import QueryTile
from pallas_kernels.triton.head_chunks import Columns, add_rows, pv_dot, qk_dot, zero_rows
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Location, Ref


def tangent(plan: TangentPlan, arrays: Operands[jax.Array], moved: Moved[jax.Array]) -> Pushed[jax.Array]:
    """Computes the tangents; `arrays` have those of captured arrays (`pallas_kernels.tangents.with_tangents`)."""
    spec, tiles = plan.spec, plan.choice.tiles
    rows = jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.T), jnp.float32)
    out, lse, *logs = runner_of(spec).launch(
        functools.partial(_kernel, plan),
        (arrays, block_walk.row_order(spec, tiles, arrays), moved),
        [jax.ShapeDtypeStruct(moved.out.shape, moved.out.dtype), rows, *([rows] if "entropy" in spec.stats else [])],
        name="jflex_tangent",
        grid=(pl.cdiv(spec.T, tiles.block_q), spec.Hq, spec.B),
        tiles=tiles,
    )
    if spec.needs_marks:  # a masked NaN reaches the output alone, by its value
        out, lse = repair(plan, arrays, moved, (out, lse))
    return Pushed(out, lse, *logs) if logs else Pushed(out, lse, None)


def repair(
    plan: TangentPlan, arrays: Operands[jax.Array], moved: Moved[jax.Array], result: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Recomputes the tiles that have NaN in the tangent of the lse; see `containment`."""
    spec, tiles = plan.spec, repair_tiles(plan.choice.tiles)
    kernel, marked = functools.partial(_repair_kernel, plan, tiles), Marked(spec, spec.Hq, spec.T, tiles.block_q)
    out, lse = marked.launch(kernel, (arrays, moved), result, tiles, "jflex_tangent_repair")
    return out, lse


def _kernel(
    plan: TangentPlan,
    arrays: Operands[Ref],
    order: Ref | None,  # [list batch, list heads, tiles of queries], or None
    moved: Moved[Ref],
    out: Ref,  # [B, T, Hq, Dv] or [B, Hq, T, Dv]
    *vectors: Ref,  # [B, Hq, T]: the tangent of the lse, and sums for that of the entropy
) -> None:
    tile = QueryTile.of_program(plan.spec, plan.choice.tiles, arrays, order)
    queries = _Queries.from_refs(plan, tile, moved)
    sums = tile.walk(queries.start, lambda sums, *key: queries.add(sums, queries.tile_at(*key)))
    d_out, d_lse = queries.finish(sums)
    tile.store(out, d_out)
    d_lse = d_lse + mark(*d_out) if plan.spec.needs_marks else d_lse
    for ref, x in zip(vectors, (d_lse, sums.logs), strict=False):
        tile.store_vector(ref, x)


def _repair_kernel(
    plan: TangentPlan,
    tiles: Tiles,
    marked: Marked,
    arrays: Operands[Ref],
    moved: Moved[Ref],
    before: tuple[Ref, Ref],  # the tangents of out and lse, as the kernel left them
    out: Ref,  # [B, T, Hq, Dv] or [B, Hq, T, Dv], the same memory
    lse: Ref,  # [B, Hq, T], the same memory
) -> None:
    def fix(at: Location) -> None:
        query_tile = QueryTile(plan.spec, tiles, arrays, at)
        queries = _Queries.from_refs(plan, query_tile, moved)

        def step(state: tuple[_Sums, Attended], key: Index, is_partial: bool) -> tuple[_Sums, Attended]:
            (sums, attended), tile = state, queries.tile_at(key, is_partial)
            for rows in (tile.values, tile.d_values):
                attended = attended if rows is None else attended.to(rows, tile.scores.visible)
            return queries.add(sums, tile.cleared()), attended

        sums, attended = query_tile.walk((queries.start, Attended.none(tiles.block_q)), step)
        d_out, d_lse = queries.finish(sums)
        query_tile.store(out, attended.keep(query_tile.load(before[0]), d_out))
        query_tile.store_vector(lse, d_lse)

    marked.repair(before[1], fix)


class _Sums(NamedTuple):
    """Sums over the keys of each row of a tile, with the weights P and ``T = P * dS``."""

    out: Columns  # T V + P dV, [Bq, Dv]
    lse: jax.Array  # T, [Bq]
    logs: jax.Array  # T * log P, [Bq]; zeros without entropy


class _Keys(NamedTuple):
    """A tile of keys."""

    scores: ScoreTile  # [Bq, Bk]
    d_scores: jax.Array | None  # the tangents of the modified scores; None where no score moves
    values: Columns  # [Bk, Dv]
    d_values: Columns | None  # None without tangents

    def cleared(self) -> _Keys:
        """With 0 for values and tangents of values that are NaN or infinite."""
        d_values = None if self.d_values is None else cleared(self.d_values)
        return self._replace(values=cleared(self.values), d_values=d_values)


class _Queries(NamedTuple):
    """A tile of queries of a head: what the prologue loads and prepares."""

    plan: TangentPlan
    tile: QueryTile
    moved: Moved[Ref]
    prepared: scores.Scores
    q: Columns  # [Bq, D], in chunks of columns
    d_q: Columns | None  # None without a tangent
    lse_log2: jax.Array  # the lse in base 2, [Bq, 1]

    @classmethod
    def from_refs(cls, plan: TangentPlan, tile: QueryTile, moved: Moved[Ref]) -> _Queries:
        """Loads it."""
        q, d_q = tile.load(tile.arrays.query), None if moved.query is None else tile.load(moved.query)
        prepared = tile.prepare(None if plan.tangent is None else plan.tangent.nodes)
        return cls(plan, tile, moved, prepared, q, d_q, log2_lse(tile.load_vector(moved.lse, -jnp.inf))[:, None])

    @property
    def start(self) -> _Sums:
        """The sums of no keys."""
        rows = jnp.zeros((self.tile.tiles.block_q,), jnp.float32)
        return _Sums(zero_rows(self.tile.tiles.block_q, self.plan.spec.Dv), rows, rows)

    def tile_at(self, key: Index, is_partial: bool) -> _Keys:
        """Loads a tile of keys, and computes its scores and their tangents."""
        load = functools.partial(self.tile.load_keys, key=key, may_end=is_partial and self.tile.keys_end)
        k, d_k = load(self.tile.arrays.key), None if self.moved.key is None else load(self.moved.key)
        tile = scores.compute(self.prepared, self.q, k, key, is_partial)  # S = Q K^T, [Bq, Bk]
        d_scores = self._d_scores(tile, k, d_k) if self.plan.requested.moves_scores else None
        d_values = None if self.moved.value is None else load(self.moved.value)
        return _Keys(tile, d_scores, load(self.tile.arrays.value), d_values)

    def _d_scores(self, tile: ScoreTile, k: Columns, d_k: Columns | None) -> jax.Array:
        """The tangents of the modified scores of a tile."""
        spec, tangent = self.plan.spec, self.plan.tangent
        products = [] if self.d_q is None else [qk_dot(spec, self.d_q, k)]
        products += [] if d_k is None else [qk_dot(spec, self.q, d_k)]  # dQ K^T + Q dK^T
        raw = sum(products[1:], start=products[0]) if products else None
        if tangent is None:
            assert raw is not None  # without a mod, scores move with queries and keys alone
            return raw * spec.scale
        assert tile.score is not None  # it is the tangent of a mod
        scaled = {} if raw is None else {tangent.d_score: Product(raw, jnp.full((), spec.scale, jnp.float32))}
        return tile.score.child({}, scaled).tile(tangent.output)

    def add(self, sums: _Sums, keys: _Keys) -> _Sums:
        """The sums with another tile of keys."""
        spec, tile, (out, lse, logs) = self.plan.spec, keys.scores, sums
        p = scores.probabilities(self.prepared, tile, self.lse_log2)  # P = exp2(S - lse)
        if keys.d_values is not None:
            out = add_rows(out, pv_dot(spec, tile.drop(p), keys.d_values))  # P dV
        if keys.d_scores is None:
            return sums._replace(out=out)
        if spec.normalize == "none":
            return sums._replace(out=add_rows(out, pv_dot(spec, tile.drop(tile.clear(keys.d_scores)), keys.values)))
        t = p * keys.d_scores
        if tile.visible is not None or self.plan.tangent is not None:  # a weight of 0 may have an infinite tangent
            t = jnp.where(p == 0.0, 0.0, t)
        if "entropy" in spec.stats:
            exponent = jnp.maximum(tile.s * self.prepared.log2_scale - self.lse_log2, LEAST_EXPONENT)
            logs = logs + jnp.sum(t * exponent, axis=1) * LN_2
        out = add_rows(out, pv_dot(spec, tile.drop(t), keys.values))  # T V
        return _Sums(out, lse + jnp.sum(t, axis=1), logs)

    def finish(self, sums: _Sums) -> tuple[Columns, jax.Array]:
        """Epilogue: the tangents of output and lse."""
        spec, d_lse = self.plan.spec, sums.lse
        out = tuple(x * spec.kept_scale for x in sums.out) if spec.dropout is not None else sums.out
        if spec.normalize == "none":
            return out, d_lse
        if self.moved.d_lse is not None:
            d_lse = d_lse + self.tile.load_vector(self.moved.d_lse, 0.0)
        before = self.tile.load(self.moved.out)
        return tuple(x - d_lse[:, None] * o.astype(jnp.float32) for x, o in zip(out, before, strict=True)), d_lse
