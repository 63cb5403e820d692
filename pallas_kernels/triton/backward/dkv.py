"""Backward kernel for dK and dV, and for captured arrays with column loads (indexed by key).

One program computes a tile of keys of one key head, over the tiles of queries of all query heads that share it, so that
no atomics are needed. Scores are transposed, (keys, queries): then P^T and dS^T are A operands of the MMAs, and stay in
registers. The grid is (tiles of keys, key heads, batch).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import KernelStatics, RowOperands, log2_lse, score_mod_vjp, weights_vjp
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton import scores
from pallas_kernels.triton.containment import Attended, Marked, cleared, repair_tiles
from pallas_kernels.triton.head_chunks import (
    Columns,
    add_rows,
    load_rows,
    load_vector,
    pv_dot,
    qk_dot,
    store_rows,
    store_vector,
    zero_rows,
)
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Location, Ref, S


class DkvOutputs(NamedTuple):
    """dK and dV for each batch entry; cotangents [B, Hq, S] of ``groups.columns``."""

    key: jax.Array
    value: jax.Array
    columns: list[jax.Array]


def dkv(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[jax.Array],
    rows: RowOperands[jax.Array],
    derivative: Derivative | None,
    groups: LoadGroups,
) -> DkvOutputs:
    """Computes dK and dV in the layout of the key; float32 where a shared batch is still to be summed.

    Args:
      arrays: The operands of the forward pass.
      rows: dO [B, T, Hq, Dv] or [B, Hq, T, Dv]; lse, delta and dH [B, Hq, T].
      derivative: Of the score mod; None without one.
      groups: Loads of captured arrays with requested gradients.
    """
    dtype = arrays.key.dtype if spec.Bkv == spec.B else jnp.float32
    per_column = jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.S), jnp.float32)
    marks = jax.ShapeDtypeStruct((spec.B, spec.Hkv, spec.S), jnp.float32)
    outputs = [
        *(jax.ShapeDtypeStruct(spec.keys_shape(size), dtype) for size in (spec.D, spec.Dv)),
        *(per_column for _ in groups.columns),
        *([marks] if spec.needs_marks else []),
    ]
    d_key, d_value, *columns = runner_of(spec).launch(
        functools.partial(_kernel, KernelStatics(spec, tiles, derivative, groups)),
        (arrays, block_walk.column_order(spec, tiles, arrays), rows),
        outputs,
        name="jflex_backward_dkv",
        grid=(pl.cdiv(spec.S, tiles.block_kv), spec.Hkv, spec.B),
        tiles=tiles,
    )
    if spec.needs_marks:
        *columns, marks = columns
        d_key, d_value = repair(spec, tiles, arrays, rows, derivative, (d_key, d_value), marks)
    return DkvOutputs(d_key, d_value, columns)


def repair(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Operands[jax.Array],
    rows: RowOperands[jax.Array],
    derivative: Derivative | None,
    result: tuple[jax.Array, jax.Array],
    marks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Recomputes dK and dV of the tiles with marked keys; `marks` is float32 [B, Hkv, S]; see `containment`."""
    tiles = repair_tiles(tiles)
    marked = Marked(spec, spec.Hkv, spec.B, spec.S, tiles.block_kv)
    count = len(jax.tree.leaves((arrays, rows, marks)))
    d_key, d_value = runner_of(spec).launch(
        functools.partial(_repair_kernel, KernelStatics(spec, tiles, derivative), marked),
        (arrays, rows, marks, result),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in result],
        name="jflex_backward_dkv_repair",
        grid=(marked.programs,),
        tiles=tiles,
        aliases={count: 0, count + 1: 1},
    )
    return d_key, d_value


def _kernel(
    statics: KernelStatics,
    arrays: Operands[Ref],
    order: Ref | None,  # [list batch, key heads or 1, tiles of keys], or None
    rows: RowOperands[Ref],  # dO like the output; lse, delta and dH [B, Hq, T]
    d_key: Ref,  # [B, S, Hkv, D] or [B, Hkv, S, D]
    d_value: Ref,  # [B, S, Hkv, Dv] or [B, Hkv, S, Dv]
    *columns: Ref,  # [B, Hq, S] for each of `groups.columns`, then marks [B, Hkv, S]
) -> None:
    spec, tiles, derivative, groups = statics
    assert groups is not None  # but for a repair
    tile, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = block_walk.column_at(spec, order, b, kv_h, tile)
    keys = _Keys.from_refs(spec, tiles, arrays, (b, kv_h, tile))

    def one_head(member: Index, state: tuple[Columns, Columns]) -> tuple[Columns, Columns]:
        head = _Head(keys, derivative, groups, rows, kv_h * spec.group + member)
        start = (*state, tuple(jnp.zeros((tiles.block_kv,), jnp.float32) for _ in groups.columns))
        d_k, d_v, sums = head.walk(start, head.step())
        for ref, total in zip(columns, sums, strict=False):
            store_vector(spec, ref, (b, head.h), keys.first, total, spec.S, may_end=keys.keys_end)
        return d_k, d_v

    d_k, d_v = keys.over_heads(keys.zeros, one_head)
    keys.store(d_key, d_value, d_k, keys.scaled_up(d_v))
    if spec.needs_marks:
        store_vector(spec, columns[-1], (b, kv_h), keys.first, mark(*d_k, *d_v), spec.S, may_end=keys.keys_end)


def _repair_kernel(
    statics: KernelStatics,
    marked: Marked,
    arrays: Operands[Ref],
    rows: RowOperands[Ref],
    marks: Ref,  # [B, Hkv, S]
    before: tuple[Ref, Ref],  # dK and dV, as the kernel left them
    d_key: Ref,  # [B, S, Hkv, D] or [B, Hkv, S, D]
    d_value: Ref,  # [B, S, Hkv, Dv] or [B, Hkv, S, Dv]
) -> None:
    spec, tiles, derivative, _ = statics

    def fix(b: jax.Array, kv_h: jax.Array, first: jax.Array) -> None:
        keys = _Keys.from_refs(spec, tiles, arrays, (b, kv_h, lax.div(first, jnp.int32(tiles.block_kv))))

        def one_head(member: Index, state: _Repaired) -> _Repaired:
            head = _Head(keys, derivative, None, rows, kv_h * spec.group + member)
            return head.walk(state, head.repair_step())

        d_k, d_v, attended = keys.over_heads((*keys.zeros, Attended.none(tiles.block_kv)), one_head)
        keys.store(d_key, d_value, d_k, attended.keep(keys.load(before[1], b), keys.scaled_up(d_v)))

    marked.repair(marks, fix)


class _Keys(NamedTuple):
    """A tile of keys and values of a key head."""

    spec: AttentionSpec
    tiles: Tiles
    arrays: Operands[Ref]
    at: Location  # batch, key head, and index of the tile
    k: Columns  # [Bk, D], in chunks of columns
    v: Columns  # [Bk, Dv], in chunks of columns

    @classmethod
    def from_refs(cls, spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], at: Location) -> _Keys:
        """Loads it."""
        empty, b = cls(spec, tiles, arrays, at, (), ()), at[0] if spec.Bkv > 1 else 0
        return empty._replace(k=empty.load(arrays.key, b), v=empty.load(arrays.value, b))

    @property
    def first(self) -> Index:
        """The first key."""
        return self.at[2] * self.tiles.block_kv

    @property
    def keys_end(self) -> bool:
        """True if a tile may have padding keys."""
        return self.spec.S % self.tiles.block_kv != 0

    @property
    def zeros(self) -> tuple[Columns, Columns]:
        """Accumulators of dK [Bk, D] and dV [Bk, Dv]."""
        return tuple(zero_rows(self.tiles.block_kv, size) for size in (self.spec.D, self.spec.Dv))  # pyright: ignore

    def load(self, ref: Ref, b: Index) -> Columns:
        """Loads the tile's rows of an array over keys."""
        spec, rows = self.spec, self.tiles.block_kv
        return load_rows(spec, ref, b, self.at[1], self.first, rows, spec.S, may_end=self.keys_end)

    def over_heads(self, state: S, one: Callable[[Index, S], S]) -> S:
        """Folds ``one(index in the group, state)`` over the query heads of the key head."""
        return one(0, state) if self.spec.group == 1 else lax.fori_loop(0, self.spec.group, one, state)

    def scaled_up(self, d_v: Columns) -> Columns:
        """Scales dV for dropout."""
        return d_v if self.spec.dropout is None else tuple(x * self.spec.kept_scale for x in d_v)

    def store(self, d_key: Ref, d_value: Ref, d_k: Columns, d_v: Columns) -> None:
        """Epilogue: scales dK, and stores dK and dV."""
        b, kv_h, _ = self.at
        for ref, x in ((d_key, tuple(x * self.spec.scale for x in d_k)), (d_value, d_v)):
            store_rows(self.spec, ref, b, kv_h, self.first, x, self.spec.S, may_end=self.keys_end)


_Sums: TypeAlias = tuple[Columns, Columns, tuple[jax.Array, ...]]  # dK, dV, cotangents of the loads by key
_Repaired: TypeAlias = tuple[Columns, Columns, Attended]


class _Head(NamedTuple):
    """The mainloop over the queries of one query head."""

    keys: _Keys
    derivative: Derivative | None
    groups: LoadGroups | None
    rows: RowOperands[Ref]
    h: jax.Array  # index of the query head

    def walk(self, state: S, step: Callable[[S, Index, bool], S]) -> S:
        """Folds a step over the tiles of queries that visit the keys."""
        keys = self.keys
        return block_walk.over_queries(
            keys.spec, keys.tiles, keys.arrays, (keys.at[0], self.h, keys.at[2]), state, step
        )

    def step(self) -> Callable[[_Sums, Index, bool], _Sums]:
        """The mainloop step over a tile of queries: adds to dK, dV and to the cotangents of the loads by key."""
        spec, prepared, groups = self.keys.spec, self._prepared(), self.groups
        assert groups is not None  # but for a repair

        def step(state: _Sums, query: Index, is_partial: bool) -> _Sums:
            d_k, d_v, sums = state
            q, d_out, vector = self._load(query, is_partial)  # [Bq, D], [Bq, Dv]
            tile = scores.compute(prepared, q, self.keys.k, query, is_partial)  # S^T = KQ^T, [Bk, Bq]
            lse_log2 = log2_lse(vector(self.rows.lse, other=-jnp.inf))[None, :]
            p = scores.probabilities(prepared, tile, lse_log2)  # P^T = exp2(S^T - lse)
            d_v = add_rows(d_v, pv_dot(spec, tile.drop(p), d_out))  # dV += P^T dO
            d_p = weights_vjp(spec, tile, qk_dot(spec, self.keys.v, d_out))  # dP^T = V dO^T
            d_p = scores.entropy_vjp(prepared, tile, d_p, lse_log2, self.rows.load_d_entropy(vector))
            d_s = scores.scores_vjp(prepared, tile, p, d_p, vector(self.rows.delta, other=0.0)[None, :])
            d_s, of_load = score_mod_vjp(self.derivative, tile, d_s)  # dS'^T of KQ^T, from dS = P * (dP - delta)
            sums = tuple(total + jnp.sum(of_load(n), axis=1) for total, n in zip(sums, groups.columns, strict=True))
            return add_rows(d_k, pv_dot(spec, d_s, q)), d_v, sums  # dK += dS'^T Q

        return step

    def repair_step(self) -> Callable[[_Repaired, Index, bool], _Repaired]:
        """The mainloop step of a repair: dK and dV alone, with masked elements cleared."""
        spec, prepared = self.keys.spec, self._prepared()

        def step(state: _Repaired, query: Index, is_partial: bool) -> _Repaired:
            d_k, d_v, attended = state
            q, d_out, vector = self._load(query, is_partial)  # [Bq, D], [Bq, Dv]
            tile = scores.compute(prepared, q, self.keys.k, query, is_partial)  # S^T = KQ^T, [Bk, Bq]
            lse_log2 = log2_lse(vector(self.rows.lse, other=-jnp.inf))[None, :]
            p = tile.clear(scores.probabilities(prepared, tile, lse_log2))  # P^T = exp2(S^T - lse)
            d_v = add_rows(d_v, pv_dot(spec, tile.drop(p), cleared(d_out)))  # dV += P^T dO
            d_p = weights_vjp(spec, tile, qk_dot(spec, self.keys.v, d_out))  # dP^T = V dO^T
            d_p = scores.entropy_vjp(prepared, tile, d_p, lse_log2, self.rows.load_d_entropy(vector))
            d_s = tile.clear(scores.scores_vjp(prepared, tile, p, d_p, vector(self.rows.delta, other=0.0)[None, :]))
            d_s, _ = score_mod_vjp(self.derivative, tile, d_s)  # dS'^T of KQ^T, from dS = P * (dP - delta)
            d_k = add_rows(d_k, pv_dot(spec, d_s, cleared(q)))  # dK += dS'^T Q
            return d_k, d_v, attended.to(d_out, tile.visible)

        return step

    def _prepared(self) -> scores.Scores:
        keys, programs = self.keys, None if self.derivative is None else {"score": self.derivative.nodes}
        b, tile = keys.at[0], keys.tiles.shape
        return scores.prepare(keys.spec, keys.arrays, tile, b, self.h, k_first=keys.first, programs=programs)

    def _load(self, query: Index, is_partial: bool) -> tuple[Columns, Columns, Callable[..., jax.Array]]:
        """Q and dO of a tile of queries, and a function that loads a vector over them."""
        spec, rows, b = self.keys.spec, self.keys.tiles.block_q, self.keys.at[0]
        end = {"rows": rows, "length": spec.T, "may_end": is_partial and spec.walk_passes_end("q", rows)}
        load = functools.partial(load_rows, spec, b=b, h=self.h, first=query, **end)
        vector = functools.partial(load_vector, spec, at=(b, self.h), first=query, **end)
        return load(self.keys.arrays.query), load(self.rows.d_out), vector
