"""Forward kernel through Triton, and the attention and the tile of queries that other kernels share with it.

One program (CTA) computes a tile of queries of one head: it walks the listed blocks of keys, partial ones with the mask
and full ones without, and keeps the query, the online softmax state and the O accumulator in registers (Dong et al.
2024, arXiv:2412.05496, section 4; Dao 2023, arXiv:2307.08691, algorithm 1). The grid is (tiles of queries, query heads,
batch).

Roofline on an H200: GEMMs at 817 TFLOP/s as measured, and then the SFU's exponentials, 16 a cycle and SM, are 463
TFLOP/s at head size 64 and 591 at 128; 450 and 501 to 553 are reached without a mod. A Triton program waits for its
MMAs before it computes exponentials, and only the other resident program of the SM (occupancy 2) overlaps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk, softmax
from pallas_kernels.config import Tiles
from pallas_kernels.program.ir import Node
from pallas_kernels.softmax import ScoreTile, mark
from pallas_kernels.spec import LN_2, AttentionSpec, Operands
from pallas_kernels.triton import scores
from pallas_kernels.triton.containment import Attended, Marked, cleared, repair_tiles
from pallas_kernels.triton.head_chunks import (
    Columns,
    load_rows,
    load_vector,
    powers_of_two,
    pv_dot,
    store_rows,
    store_vector,
    zero_values,
)
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.triton.scores import Scores, linear_weights, weights
from pallas_kernels.types import Index, Location, Ref, S, Step


class Tile(NamedTuple):
    """A tile of keys."""

    scores: ScoreTile  # its scores, [rows, Bk]
    values: Columns  # its values, [Bk, Dv]
    # what equal shares of their columns are to be multiplied by: scalars, or [Bk] each; None for 1
    scales: tuple[jax.Array, ...] | None = None

    def product(self, spec: AttentionSpec, p: jax.Array) -> Columns:
        """The PV GEMM, float32, of the weights before dropout, which scales multiply in float32.

        float16 holds no small weights, nor large ones without a softmax: where the values are float16 and have scales,
        each row of the tile is divided by a power of two, near its largest weight. What is 2 ** 38 times smaller than
        that becomes 0.
        """
        p, values, scales = self.scores.drop(p), self.values, self.scales
        if scales is None:
            return pv_dot(spec, p, values)
        if values[0].dtype != jnp.float16:
            return pv_dot(spec, p * _along_keys(scales[0]), values)
        largest = functools.reduce(jnp.maximum, scales)
        smaller, factor = powers_of_two(jnp.max(jnp.abs(p * _along_keys(largest)), axis=1))
        share, products = len(values) // len(scales), []
        for number, scale in enumerate(scales):
            columns = values[number * share : (number + 1) * share]
            products += [x * factor for x in pv_dot(spec, p * _along_keys(scale) * smaller, columns)]
        return tuple(products)

    def cleared(self) -> Tile:
        """With 0 for values that are NaN or infinite, also by their scale."""
        if self.scales is None:
            return self._replace(values=cleared(self.values))
        values = tuple(
            jnp.where(jnp.abs(x) < jnp.inf, stored, jnp.zeros_like(stored))
            for x, stored in zip(self.scaled_values, self.values, strict=True)
        )
        return Tile(self.scores, values, cleared(self.scales))

    @property
    def scaled_values(self) -> Columns:
        """The values times their scales, in float32."""
        if self.scales is None:
            return self.values
        share = len(self.values) // len(self.scales)
        scales = [scale[:, None] if scale.ndim else scale for scale in self.scales for _ in range(share)]
        return tuple(x.astype(jnp.float32) * scale for x, scale in zip(self.values, scales, strict=True))


def _along_keys(scale: jax.Array) -> jax.Array:
    return scale[None, :] if scale.ndim else scale


class Walk(Protocol):
    """A mainloop: folds ``step(state, *key)`` over tiles of keys."""

    def __call__(self, state: S, step: Callable[..., S], /) -> S: ...  # noqa: D102


RowVectors = tuple[jax.Array, ...]  # lse and ``spec.stats`` of the rows of a tile, [rows] each


class Attention(NamedTuple):
    """Attention of the rows of a tile over the keys that it visits."""

    prepared: Scores  # statics and loop-invariant values of the mods
    rows: int
    walk: Walk  # the mainloop, ``(state, step) -> state``: folds ``step(state, *key)`` over tiles of keys
    tile_at: Callable[..., Tile]  # loads a tile of keys, ``(*key) -> Tile``
    may_be_empty: bool = True  # whether a row may still be fully masked after a tile
    sink: jax.Array | None = None  # the logit of the sink of the head, a scalar; None without

    @property
    def spec(self) -> AttentionSpec:
        """The call."""
        return self.prepared.spec

    def attend(self) -> tuple[Columns, RowVectors]:
        """Output [rows, Dv], in chunks of columns, lse (natural log) and ``spec.stats``, [rows] each.

        Zeros and an lse of -inf for fully masked rows. The lse is NaN where the output must be repaired.
        """
        state = self.state()
        out, lse = self._finish(state)
        return out, (lse + mark(*out) if self.spec.needs_marks else lse, *self._stats(state))

    def repair(self) -> tuple[Columns, RowVectors, Attended]:
        """Results from cleared values, with the lse as it is, and the rows that must keep the output of `attend`."""
        state, attended = self.repaired_state(Attended.none(self.rows))
        out, lse = self._finish(state)
        return out, (lse, *self._stats(state)), attended

    def state(self) -> softmax.SoftmaxState:
        """The state after all keys of the walk."""

        def step(state: softmax.SoftmaxState, *key: Index) -> softmax.SoftmaxState:
            return self._fold(state, self.tile_at(*key))

        return self.walk(self._start, step)

    def repaired_state(self, attended: Attended) -> tuple[softmax.SoftmaxState, Attended]:
        """The state from cleared values, and the rows that must keep their output, added to those of `attended`."""

        def step(state: tuple[softmax.SoftmaxState, Attended], *key: Index) -> tuple[softmax.SoftmaxState, Attended]:
            tile = self.tile_at(*key)
            return self._fold(state[0], tile.cleared()), state[1].to(tile.scaled_values, tile.scores.visible)

        return self.walk((self._start, attended), step)

    @property
    def _start(self) -> softmax.SoftmaxState:
        return softmax.start(self.rows, zero_values(self.spec, self.rows), entropy="entropy" in self.spec.stats)

    def _finish(self, state: softmax.SoftmaxState) -> tuple[Columns, jax.Array]:
        if self.spec.normalize == "none":
            return tuple(x * self.spec.kept_scale for x in state.out), jnp.zeros((self.rows,), jnp.float32)
        return softmax.finish(self._with_sink(state), self.prepared.log2_scale, self.spec.kept_scale)

    def _with_sink(self, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
        return state if self.sink is None else softmax.with_sink(state, self.sink, self.prepared.log2_scale)

    def _stats(self, state: softmax.SoftmaxState) -> tuple[jax.Array, ...]:
        """Statistics of the state after all keys; the max is the natural score, and without the sink."""
        values = {
            "max": lambda: state.row_max * (self.prepared.log2_scale * LN_2),
            "entropy": lambda: softmax.entropy(self._with_sink(state)),
        }
        return tuple(values[name]() for name in self.spec.stats)

    def _fold(self, state: softmax.SoftmaxState, tile: Tile) -> softmax.SoftmaxState:
        """The state after another tile of keys."""
        spec, log2_scale = self.spec, self.prepared.log2_scale
        product = lambda p: tile.product(spec, p)  # P V
        if spec.normalize == "none":
            return softmax.add_weights(state, product, linear_weights(self.prepared, tile.scores))
        return softmax.update(
            state,
            tile.scores.s,
            log2_scale=log2_scale,
            exp2=lambda s, row_max_log2: weights(spec, s, log2_scale, row_max_log2),  # P = exp2(S - m)
            pv_dot=product,  # O = alpha O + P V
            may_be_empty=self.may_be_empty,
            exact=spec.config.batch_invariant,
        )


class QueryTile(NamedTuple):
    """A tile of queries of a head."""

    spec: AttentionSpec
    tiles: Tiles
    arrays: Operands[Ref]
    at: Location  # batch, query head, and index of the tile

    @classmethod
    def of_program(cls, spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], order: Ref | None) -> QueryTile:
        """The tile of a program of the grid (tiles of queries, query heads, batch), by the order of tiles."""
        i, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        return cls(spec, tiles, arrays, (b, h, block_walk.row_at(spec, order, b, h, i, pl.num_programs(0))))

    @property
    def first(self) -> Index:
        """The first query."""
        return self.at[2] * self.tiles.block_q

    @property
    def may_end(self) -> bool:
        """True if a tile may have padding queries."""
        return self.spec.T % self.tiles.block_q != 0

    @property
    def keys_end(self) -> bool:
        """True if a partial tile of keys may have padding."""
        return self.spec.walk_passes_end("k", self.tiles.block_kv)

    def load(self, ref: Ref) -> Columns:
        """Rows of an array like query or output."""
        (b, h, _), rows = self.at, self.tiles.block_q
        return load_rows(self.spec, ref, b, h, self.first, rows, self.spec.T, may_end=self.may_end)

    def store(self, ref: Ref, x: Columns) -> None:
        """Stores what `load` would load."""
        b, h, _ = self.at
        store_rows(self.spec, ref, b, h, self.first, x, self.spec.T, may_end=self.may_end)

    def load_vector(self, ref: Ref, other: float) -> jax.Array:
        """A number of each query, [Bq]; `other` for padding."""
        rows, length = self.tiles.block_q, self.spec.T
        return load_vector(self.spec, ref, self.at[:2], self.first, rows, length, other, may_end=self.may_end)

    def store_vector(self, ref: Ref, x: jax.Array) -> None:
        """Stores what `load_vector` would load."""
        store_vector(self.spec, ref, self.at[:2], self.first, x, self.spec.T, may_end=self.may_end)

    def load_keys(self, ref: Ref, key: Index, *, may_end: bool) -> Columns:
        """A tile of key or value from a key on: of the key head that a group shares; their batch may be shared too."""
        spec, (b, h, _) = self.spec, self.at
        b, kv_h = (b if spec.Bkv > 1 else 0), lax.div(h, spec.group)
        return load_rows(spec, ref, b, kv_h, key, self.tiles.block_kv, spec.S, may_end=may_end)

    def prepare(self, nodes: Sequence[Node] | None = None) -> scores.Scores:
        """Prologue of the mods; `nodes` of the score mod, by default of its program alone."""
        b, h, _ = self.at
        return scores.prepare(self.spec, self.arrays, self.tiles.shape, b, h, q_first=self.first, nodes=nodes)

    def walk(self, state: S, step: Step[S]) -> S:
        """Folds a step over the tiles of keys that the queries visit."""
        return block_walk.over_keys(self.spec, self.tiles, self.arrays, self.at, state, step)


def forward(spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array]) -> tuple[jax.Array, ...]:
    """Out, in the layout of the query and the dtype of the value, lse and ``spec.stats``, float32 [B, Hq, T]."""
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
    if spec.needs_marks:  # a masked NaN reaches sums by its value, and statistics are of scores alone
        out, lse = repair(spec, tiles, arrays, (out, lse))
    return out, lse, *stats


def repair(
    spec: AttentionSpec, tiles: Tiles, arrays: Operands[jax.Array], result: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Recomputes the tiles that have an lse of NaN; see `containment`."""
    tiles = repair_tiles(tiles)
    kernel, marked = functools.partial(_repair_kernel, tiles), Marked(spec, spec.Hq, spec.T, tiles.block_q)
    out, lse = marked.launch(kernel, (arrays,), tuple(result), tiles, "jflex_forward_repair")
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
    queries = QueryTile.of_program(spec, tiles, arrays, order)
    rows, vectors = _attention(queries).attend()
    queries.store(out, rows)
    for ref, x in zip((lse, *stats), vectors, strict=True):
        queries.store_vector(ref, x)


def _repair_kernel(
    tiles: Tiles,
    marked: Marked,
    arrays: Operands[Ref],
    before: tuple[Ref, Ref],  # out and lse, as the forward kernel left them
    out: Ref,  # [B, T, Hq, Dv] or [B, Hq, T, Dv], the same memory
    lse: Ref,  # [B, Hq, T], the same memory
) -> None:
    def fix(at: Location) -> None:
        queries = QueryTile(marked.spec, tiles, arrays, at)
        clean, (row_lse, *_), attended = _attention(queries).repair()
        queries.store(out, attended.keep(queries.load(before[0]), clean))
        queries.store_vector(lse, row_lse)

    marked.repair(before[1], fix)


def _attention(queries: QueryTile) -> Attention:
    """The attention of a tile of queries of a head."""
    spec, arrays = queries.spec, queries.arrays
    q, prepared = queries.load(arrays.query), queries.prepare()  # [Bq, D]

    def tile_at(key: Index, is_partial: bool) -> Tile:
        load = functools.partial(queries.load_keys, key=key, may_end=is_partial and queries.keys_end)
        result = scores.compute(prepared, q, load(arrays.key), key, is_partial)  # S = QK^T, [Bq, Bk]
        return Tile(result, load(arrays.value))  # V [Bk, Dv]

    may_be_empty = spec.programs.mask is not None or spec.programs.score is not None
    sink = None if arrays.sinks is None else arrays.sinks[queries.at[1]]
    return Attention(prepared, queries.tiles.block_q, queries.walk, tile_at, may_be_empty, sink)
