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
from pallas_kernels.types import Index, Location, Ref, S, Step


class DkvOutputs(NamedTuple):
    """dK and dV for each batch entry; cotangents [B, Hq, S] of ``groups.columns``."""

    key: jax.Array
    value: jax.Array
    columns: list[jax.Array]


def dkv(statics: KernelStatics, arrays: Operands[jax.Array], rows: RowOperands[jax.Array]) -> DkvOutputs:
    """Computes dK and dV in the layout of the key; float32 where a shared batch is still to be summed."""
    spec, tiles, _, groups = statics
    assert groups is not None  # but for a repair
    dtype = arrays.key.dtype if spec.Bkv == spec.B else jnp.float32
    per_column = jax.ShapeDtypeStruct((spec.B, spec.Hq, spec.S), jnp.float32)
    marks = jax.ShapeDtypeStruct((spec.B, spec.Hkv, spec.S), jnp.float32)
    outputs = [
        *(jax.ShapeDtypeStruct(spec.keys_shape(size), dtype) for size in (spec.D, spec.Dv)),
        *(per_column for _ in groups.columns),
        *([marks] if spec.needs_marks else []),
    ]
    d_key, d_value, *columns = runner_of(spec).launch(
        functools.partial(_kernel, statics),
        (arrays, block_walk.column_order(spec, tiles, arrays), rows),
        outputs,
        name="jflex_backward_dkv",
        grid=(pl.cdiv(spec.S, tiles.block_kv), spec.Hkv, spec.B),
        tiles=tiles,
    )
    if spec.needs_marks:
        *columns, marks = columns
        d_key, d_value = repair(statics, arrays, rows, (d_key, d_value), marks)
    return DkvOutputs(d_key, d_value, columns)


def repair(
    statics: KernelStatics,
    arrays: Operands[jax.Array],
    rows: RowOperands[jax.Array],
    result: tuple[jax.Array, jax.Array],
    marks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Recomputes dK and dV of the tiles with marked keys; `marks` is float32 [B, Hkv, S]; see `containment`."""
    spec, tiles = statics.spec, repair_tiles(statics.tiles)
    kernel = functools.partial(_repair_kernel, statics._replace(tiles=tiles, groups=None))
    marked = Marked(spec, spec.Hkv, spec.S, tiles.block_kv)
    d_key, d_value = marked.launch(kernel, (arrays, rows, marks), result, tiles, "jflex_backward_dkv_repair")
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
    spec, tiles, _, groups = statics
    assert groups is not None  # but for a repair
    tile, kv_h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile = block_walk.column_at(spec, order, b, kv_h, tile)
    keys = _Keys.from_refs(spec, tiles, arrays, (b, kv_h, tile))

    def one_head(member: Index, state: tuple[Columns, Columns]) -> tuple[Columns, Columns]:
        head = _Head(keys, statics, rows, kv_h * spec.group + member)
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
    spec, tiles = statics.spec, statics.tiles

    def fix(at: Location) -> None:
        keys = _Keys.from_refs(spec, tiles, arrays, at)

        def one_head(member: Index, state: _State) -> _State:
            head = _Head(keys, statics, rows, at[1] * spec.group + member)
            return head.walk(state, head.step())

        d_k, d_v, attended = keys.over_heads((*keys.zeros, Attended.none(tiles.block_kv)), one_head)
        assert isinstance(attended, Attended)  # as it was before
        keys.store(d_key, d_value, d_k, attended.keep(keys.load(before[1], at[0]), keys.scaled_up(d_v)))

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


# dK, dV, and cotangents of the loads by key, or in a repair the keys that must keep their dV
_State: TypeAlias = tuple[Columns, Columns, tuple[jax.Array, ...] | Attended]


class _Head(NamedTuple):
    """The mainloop over the queries of one query head."""

    keys: _Keys
    statics: KernelStatics
    rows: RowOperands[Ref]
    h: jax.Array  # index of the query head

    def walk(self, state: S, step: Step[S]) -> S:
        """Folds a step over the tiles of queries that visit the keys."""
        keys = self.keys
        return block_walk.over_queries(
            keys.spec, keys.tiles, keys.arrays, (keys.at[0], self.h, keys.at[2]), state, step
        )

    def step(self) -> Step[_State]:
        """The mainloop step over a tile of queries: adds to dK, dV and to the cotangents of the loads by key.

        A repair clears masked elements, and finds out what was attended to instead of the cotangents.
        """
        spec, prepared, (_, _, derivative, groups) = self.keys.spec, self._prepared(), self.statics
        clear = (lambda tile, x: tile.clear(x)) if groups is None else (lambda _, x: x)
        clean = cleared if groups is None else (lambda rows: rows)

        def step(state: _State, query: Index, is_partial: bool) -> _State:
            d_k, d_v, sums = state
            q, d_out, vector = self._load(query, is_partial)  # [Bq, D], [Bq, Dv]
            tile = scores.compute(prepared, q, self.keys.k, query, is_partial)  # S^T = KQ^T, [Bk, Bq]
            lse_log2 = log2_lse(vector(self.rows.lse, other=-jnp.inf))[None, :]
            p = clear(tile, scores.probabilities(prepared, tile, lse_log2))  # P^T = exp2(S^T - lse)
            d_v = add_rows(d_v, pv_dot(spec, tile.drop(p), clean(d_out)))  # dV += P^T dO
            d_p = weights_vjp(spec, tile, qk_dot(spec, self.keys.v, d_out))  # dP^T = V dO^T
            d_p = scores.entropy_vjp(prepared, tile, d_p, lse_log2, self.rows.load_d_entropy(vector))
            d_s = clear(tile, scores.scores_vjp(prepared, tile, p, d_p, vector(self.rows.delta, other=0.0)[None, :]))
            d_s, of_load = score_mod_vjp(derivative, tile, d_s)  # dS'^T of KQ^T, from dS = P * (dP - delta)
            if groups is not None and not isinstance(sums, Attended):
                sums = tuple(total + jnp.sum(of_load(n), axis=1) for total, n in zip(sums, groups.columns, strict=True))
            d_k = add_rows(d_k, pv_dot(spec, d_s, clean(q)))  # dK += dS'^T Q
            return d_k, d_v, sums.to(d_out, tile.visible) if isinstance(sums, Attended) else sums

        return step

    def _prepared(self) -> scores.Scores:
        keys, derivative = self.keys, self.statics.derivative
        nodes = None if derivative is None else derivative.nodes
        b, tile = keys.at[0], keys.tiles.shape
        return scores.prepare(keys.spec, keys.arrays, tile, b, self.h, k_first=keys.first, nodes=nodes)

    def _load(self, query: Index, is_partial: bool) -> tuple[Columns, Columns, Callable[..., jax.Array]]:
        """Q and dO of a tile of queries, and a function that loads a vector over them."""
        spec, rows, b = self.keys.spec, self.keys.tiles.block_q, self.keys.at[0]
        end = {"rows": rows, "length": spec.T, "may_end": is_partial and spec.walk_passes_end("q", rows)}
        load = functools.partial(load_rows, spec, b=b, h=self.h, first=query, **end)
        vector = functools.partial(load_vector, spec, at=(b, self.h), first=query, **end)
        return load(self.keys.arrays.query), load(self.rows.d_out), vector
