"""The walk of a warp group over tiles of queries, in the backward kernel that owns keys."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import through_mod
from pallas_kernels.marks import may_hide
from pallas_kernels.mosaic_gpu import bias_tiles, inline_ptx, scores
from pallas_kernels.mosaic_gpu import smem as memory
from pallas_kernels.mosaic_gpu.backward.one_pass import Place, QueryGradient
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    KEY,
    SHIFT,
    VALUE,
    Static,
    Stream,
    accumulator,
    awaited,
    awaited_all,
    load_vector,
)
from pallas_kernels.mosaic_gpu.pipeline import Ring
from pallas_kernels.mosaic_gpu.tile import COLUMN, ROW, TILE
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import Arrays, AttentionSpec


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
      keys: [groups, rows, D].
      values: [groups, rows, Dv].
      sums: float32 [groups, rows], to store cotangents of loads by key, and marks; None without.
      filled: A barrier a group, for keys and values.
      stream: What is walked.
      d_query: For dQ; None without.
    """

    keys: Any
    values: Any
    sums: Any
    filled: Any
    stream: Stream
    d_query: QueryGradient | None


def declare(spec: AttentionSpec, tiles: Tiles, dtype: Any, loads: LoadGroups, *, one_pass: bool = False) -> Scratch:
    """What a block of threads needs."""
    groups = tiles.num_warps // 4
    rows = tiles.block_kv // groups

    def make(elements: Ring | None) -> Scratch:
        return Scratch(
            memory.tiled((groups, rows, spec.D), dtype),
            memory.tiled((groups, rows, spec.Dv), dtype),
            plg.SMEM((groups, rows), jnp.float32) if loads.columns or may_hide(spec) else None,
            plg.Barrier(num_arrivals=2, num_barriers=groups),
            Stream.declare(spec, tiles.block_q, tiles.num_stages, dtype, groups, elements),
            QueryGradient.declare(spec, tiles, dtype) if one_pass else None,
        )

    return bias_tiles.beside(make, spec, tiles, transposed=True)


class State(NamedTuple):
    """Of a walk over queries: how many tiles came before, and where the last of them lies."""

    count: Any
    last: Place


class Walker(NamedTuple):
    """What a warp group needs on the way over tiles of queries.

    Attributes:
      static: Statics.
      scratch: Shared memory and barriers.
      group: Its number.
      b: Batch.
      first: Its first key.
      sums: Accumulators of dK and dV, or of one of them.
      out: dQ, or None.
    """

    static: Static
    scratch: Scratch
    group: Any
    b: Any
    first: Any
    sums: dict[str, Any]
    out: Any

    def begin(self, kv_h: Any) -> State:
        """Before the first tile."""
        if self.scratch.d_query is not None:
            self.scratch.d_query.begin(self.group)
        return State(jnp.int32(0), Place(kv_h * self.static.spec.group, jnp.int32(0)))

    def end(self, state: State) -> None:
        """After the last tile."""
        d_query = self.scratch.d_query
        if d_query is None:
            return

        def product(acc: Any) -> jax.Array:
            d_query.start(acc, state.count - 1, self.group, self.scratch.keys)
            return acc[...]

        x = pl.run_scoped(product, d_query.product)
        d_query.add(self.out, self.group, self.b, state.last, x)

    def zero_sums(self) -> tuple[jax.Array, ...]:
        """For cotangents of loads by key."""
        rows = self.scratch.keys.shape[1]
        return tuple(plg.layout_cast(jnp.zeros((rows,), jnp.float32), ROW) for _ in self.static.groups.columns)

    def step(self, arrays: Arrays, h: Any) -> Any:
        """The step over a tile of queries of a head: `(state, cotangents of loads by key), first query, is partial`."""
        static, spec = self.static, self.static.spec
        known = scores.prepare(
            spec,
            arrays,
            static.captured,
            (static.tiles.block_q, self.scratch.keys.shape[1]),
            self.b,
            h,
            k_first=self.first,
            may_end=spec.S % static.tiles.block_kv != 0,
            nodes=static.nodes,
        )
        tile = accumulator(known.tile[1], known.tile[0])

        def step(carried: tuple[State, Any], query: Any, is_partial: bool) -> tuple[State, Any]:
            state, sums = carried
            q = awaited(self.scratch.stream.queries, state.count)
            products = functools.partial(self._d_scores, known, state.count, query, is_partial, q)
            d_s, more = pl.run_scoped(products, tile, tile)
            self._add(state, d_s, q)
            plg.wgmma_wait(0)
            self.scratch.stream.queries.release(state.count)
            sums = tuple(x + y for x, y in zip(sums, more, strict=True))
            return State(state.count + 1, Place(h, query)), sums

        return step

    def _add(self, state: State, d_s: jax.Array, q: Any) -> None:
        """Starts to add to dK, and adds the tile before to dQ."""
        d_query, stream = self.scratch.d_query, self.scratch.stream
        if d_query is None:
            if KEY in self.sums:
                plg.wgmma(self.sums[KEY], d_s, q)
            plg.wgmma_wait(1 if len(self.sums) > 1 else 0)  # that for dV is done
            stream.d_out.release(state.count)
            return

        def before(acc: Any) -> jax.Array:
            d_query.write(state.count, self.group, d_s)
            d_query.start(acc, state.count - 1, self.group, self.scratch.keys)
            plg.wgmma(self.sums[KEY], d_s, q)
            d_query.commit()
            return plg.wgmma_accumulator_load(acc, wait_n=1)

        x = pl.run_scoped(before, d_query.product)
        stream.d_out.release(state.count)
        d_query.add(self.out, self.group, self.b, state.last, x)

    def _d_scores(
        self, known: scores.Scores, count: Any, query: Any, is_partial: bool, q: Any, raw: Any, d_weights: Any
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Cotangents of scores, as operand of products, and of loads by key; starts to add to dV."""
        stream = self.scratch.stream
        statistics = awaited(stream.statistics, count)
        vector = lambda which: lax.broadcast_in_dim(load_vector(statistics.at[which], COLUMN), known.tile[::-1], (1,))
        # Before both products: to set an accumulator waits for those that run.
        if self.static.folds:
            raw[...] = vector(SHIFT)
        if KEY in self.sums:
            d_weights[...] = vector(DELTA)
        plg.wgmma(raw, self.scratch.keys.at[self.group], q.T)
        d_out = awaited(stream.d_out, count)
        if KEY in self.sums:
            plg.wgmma(d_weights, self.scratch.values.at[self.group], d_out.T)
        scores_of = plg.wgmma_accumulator_load(raw, wait_n=int(KEY in self.sums))
        rows = self.scratch.keys.shape[1]
        elements = [x.at[:, pl.ds(self.group * rows, rows)].T for x in awaited_all(stream.elements, count)]
        tile = scores.modify(known, scores_of, query, is_partial, brought=elements)
        if stream.elements is not None:
            stream.elements.release(count)
        if self.static.folds:
            p = inline_ptx.exp2(TILE, tile.s * known.unit)
        else:
            p = inline_ptx.weights(TILE, tile.s, known.unit, -vector(SHIFT))
        stream.statistics.release(count)
        if KEY not in self.sums:
            plg.wgmma(self.sums[VALUE], p.astype(d_out.dtype), d_out)
            return p.astype(d_out.dtype), ()
        d_s = p * plg.wgmma_accumulator_load(d_weights, wait_n=0)
        if VALUE in self.sums:
            plg.wgmma(self.sums[VALUE], p.astype(d_out.dtype), d_out)
        d_s, of_load = through_mod(self.static.derivative, tile, d_s)
        more = tuple(jnp.sum(of_load(load), axis=1) for load in self.static.groups.columns)
        return self._existing(known, d_s).astype(d_out.dtype), more

    def _existing(self, known: scores.Scores, d_s: jax.Array) -> jax.Array:
        """Without keys past the end, whose dS may be anything: dQ sums over keys."""
        spec = self.static.spec
        if self.scratch.d_query is None or spec.S % self.static.tiles.block_kv == 0:
            return d_s
        rows = self.first + plg.broadcasted_iota(jnp.int32, (known.tile[1],), 0, layout=ROW)
        return jnp.where(lax.broadcast_in_dim(rows < spec.S, d_s.shape, (0,)), d_s, 0.0)
