"""The mainloop of the dK/dV kernel: a consumer warp group walks tiles of queries."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import score_mod_vjp, weights_vjp
from pallas_kernels.mosaic_gpu import inline_ptx, schedule, smem
from pallas_kernels.mosaic_gpu.backward.one_pass import PAST_THE_END, DqAccumulator, TileIndex, is_tight, key_swizzle
from pallas_kernels.mosaic_gpu.backward.shared_scores import SharedScores
from pallas_kernels.mosaic_gpu.backward.stream import (
    DELTA,
    KEY,
    LSE,
    VALUE,
    BackwardStatic,
    QueryStream,
    load_vector,
    wait_and_get,
    wait_and_get_all,
)
from pallas_kernels.mosaic_gpu.score import bias_tiles, scores
from pallas_kernels.mosaic_gpu.score.tile import COLUMN, ROW, TILE, accumulator, uses_sfu
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Accumulator, Index, Ref


class Persistence(NamedTuple):
    """Shared memory and barriers of a persistent CTA, which loads the next keys while it stores dK and dV."""

    tile_ids: Ref  # `schedule.tile_id_scratch`
    full: Ref  # a barrier for each id: it is there
    empty: Ref  # two barriers: values, and keys, may be overwritten


class DkvScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    keys: Ref  # [groups, rows, D], or [1, rows, D] of shared keys
    values: Ref  # [groups, rows, Dv], or [1, rows, Dv]
    sums: Ref | None  # float32 [groups, rows], to stage cotangents of loads by key; None without
    full: Ref  # a barrier: keys and values have arrived
    stream: QueryStream  # rings of the tiles of queries
    d_query: DqAccumulator | None  # for dQ; None without. Declared as unions with `epilogue` if persistent
    scores: SharedScores | None  # S^T of shared keys; None without
    persistence: Persistence | None  # None for one tile of keys
    # In the kernel of persistent CTAs, to stage dV and dK: [groups, copies, rows, size], of which the first is used.
    epilogue: tuple[Ref, Ref] | None = None

    def open_unions(self) -> DkvScratch:
        """The scratch in the kernel, without unions."""
        if self.persistence is None or self.d_query is None or self.d_query.staged is None:
            return self
        (d_scores, values), (staged, keys) = self.d_query.d_scores, self.d_query.staged
        return self._replace(d_query=self.d_query._replace(d_scores=d_scores, staged=staged), epilogue=(values, keys))

    def staging(self, name: str, tile: Index) -> Ref:
        """Shared memory from which TMA stores the dK or dV of 64 keys."""
        if self.epilogue is None:
            return (self.keys if name == KEY else self.values).at[tile]
        return self.epilogue[name == KEY].at[tile, 0]


def declare(
    spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike, loads: LoadGroups, *, one_pass: bool = False
) -> DkvScratch:
    """The scratch of a CTA, which is persistent if it adds dQ by TMA and that fits."""
    groups, rows = tiles.num_warps // 4, smem.WARP_GROUP_ROWS
    key_tiles = tiles.block_kv // rows
    shares = key_tiles < groups
    swizzle = key_swizzle(spec, tiles) if one_pass else None

    def make(bias: Ring | None) -> DkvScratch:
        scratch = DkvScratch(
            smem.tiled((key_tiles, rows, spec.D), dtype, swizzle),
            smem.tiled((key_tiles, rows, spec.Dv), dtype),
            smem.declared(plg.SMEM((groups, rows), jnp.float32)) if loads.columns else None,
            smem.declared(plg.Barrier(num_arrivals=2 * key_tiles)),
            QueryStream.declare(spec, tiles, dtype, bias, swizzle),
            DqAccumulator.declare(spec, tiles, dtype) if one_pass else None,
            SharedScores.declare(tiles.block_q) if shares else None,
            None,
        )
        persistent = _add_persistence(scratch, swizzle)
        return scratch if smem.bytes_of(jax.tree.leaves(persistent)) > smem.LIMIT else persistent

    return bias_tiles.with_bias_ring(make, spec, tiles, transposed=True)


def _add_persistence(scratch: DkvScratch, swizzle: int | None) -> DkvScratch:
    """The scratch of a persistent CTA; as it is without dQ by TMA, or if dS or dQ have no room for dV or dK."""
    d_query, (groups, *_) = scratch.d_query, scratch.keys.shape
    if d_query is None or d_query.staged is None:
        return scratch
    size = lambda x: math.prod(x.shape[1:]) * jnp.dtype(x.dtype).itemsize  # bytes of a group
    if size(d_query.d_scores) < size(scratch.values) or size(d_query.staged) < size(scratch.keys):
        return scratch

    def union(x: Ref, rows: Ref, swizzle: int | None) -> Ref:
        """Aliases `x` with rows to stage. The rows of a group never overlap the `x` of another group."""
        copies = pl.cdiv(size(x), size(rows))
        return smem.declared(plg.RefUnion(x, smem.tiled((groups, copies, *rows.shape[1:]), rows.dtype, swizzle)))

    d_scores, staged = union(d_query.d_scores, scratch.values, None), union(d_query.staged, scratch.keys, swizzle)
    full = smem.declared(plg.Barrier(num_barriers=schedule.QUERY_STAGES))
    empty = smem.declared(plg.Barrier(num_arrivals=groups, num_barriers=2))
    return scratch._replace(
        d_query=d_query._replace(d_scores=d_scores, staged=staged),
        persistence=Persistence(schedule.tile_id_scratch(), full, empty),
    )


class DkvState(NamedTuple):
    """State of the mainloop: the number of tiles so far, and the index of the last of them."""

    count: Index
    last: TileIndex


Carried: TypeAlias = tuple[DkvState, tuple[jax.Array, ...]]  # and the cotangents of loads by key


class KeyTile(NamedTuple):
    """Per-warp-group key state, and its mainloop over tiles of queries."""

    static: BackwardStatic
    scratch: DkvScratch
    group: jax.Array  # index of its tile of keys
    b: jax.Array
    first: jax.Array  # its first key
    sums: dict[str, Accumulator]  # accumulators of dK [rows, D] and dV [rows, Dv], or of one of them, in registers
    out: Ref | None  # dQ in global memory, of `one_pass.sums_shape`, or None
    zero: Index = 0  # added to indices of shared memory; see `inline_ptx.unknown_zero`

    @property
    def is_tight(self) -> bool:
        """True if registers are tight (`one_pass.is_tight`)."""
        return len(self.sums) > 1 and is_tight(self.static.spec)

    def begin(self, kv_h: jax.Array, number: Index, count: jax.Array) -> DkvState:
        """Prologue: the state before the first tile, after `count` tiles of the CTA's earlier keys."""
        if self.scratch.d_query is not None:
            self.scratch.d_query.begin(count, self.group, is_first=number == 0)
        if self.scratch.scores is not None and VALUE not in self.sums:
            self.scratch.scores.begin_reads()
        return DkvState(count, TileIndex(kv_h * self.static.spec.group, jnp.int32(PAST_THE_END)))

    def end(self, state: DkvState) -> list[jax.Array]:
        """Epilogue: adds the dQ of the last tile; returns marks of the keys where they are needed for dQ."""
        d_query, out, persistence = self.scratch.d_query, self.out, self.scratch.persistence
        if d_query is None or out is None:
            return []

        def gemm(acc: Accumulator) -> tuple[jax.Array, list[jax.Array]]:
            d_query.start_gemm(acc, state.count - 1, self.group, self.scratch.keys)  # dQ = dS' K
            needs_marks, keys = self.static.spec.needs_marks, self.scratch.keys.at[self.group]
            marks = [mark(smem.load(keys, TILE))] if needs_marks else []  # while the GEMM runs
            return acc[...], marks

        if persistence is not None:
            plg.barrier_arrive(persistence.empty.at[0])
        x, marks = pl.run_scoped(gemm, d_query.gemm_accumulator(out))
        if persistence is not None:
            plg.barrier_arrive(persistence.empty.at[1])
        d_query.add(out, self.group, self.b, state.last, state.count - 1, x, is_last=True)
        return marks

    def step(self, arrays: Operands[Ref], h: jax.Array) -> Callable[[Carried, jax.Array, Index, bool], Carried]:
        """The mainloop step over a tile of queries; it carries the state and the cotangents of loads by key.

        Mods are evaluated at the head `h`, whatever head the step is of.
        """
        shape = (self.static.tiles.block_q, self.scratch.keys.shape[1])
        prepared = self.static.prepare(arrays, shape, self.b, h, k_first=self.first)
        tile = accumulator(prepared.tile[1], prepared.tile[0])

        def compute(carried: Carried, h: jax.Array, query: Index, is_partial: bool) -> Carried:
            state, sums = carried
            tile_step = self._replace(zero=inline_ptx.unknown_zero())
            q = wait_and_get(self.scratch.stream.queries, state.count)  # [block_q, D]
            gemms = functools.partial(tile_step._d_scores, prepared, state.count, query, is_partial, q)
            d_s, more = pl.run_scoped(gemms, tile, tile)
            tile_step._add(state, d_s, q)
            plg.wgmma_wait(0)
            self.scratch.stream.queries.release(state.count)
            sums = tuple(x + y for x, y in zip(sums, more, strict=True))
            return DkvState(state.count + 1, TileIndex(h, query)), sums

        def step(carried: Carried, h: jax.Array, query: Index, is_partial: bool) -> Carried:
            if prepared.visible is None or not is_partial:
                return compute(carried, h, query, is_partial)
            hidden, skip = prepared.visible.tile.hide(query, shape[0]), lambda x: self._skip(x, TileIndex(h, query))
            return lax.cond(hidden, skip, lambda x: compute(x, h, query, is_partial), carried)

        return step

    def _skip(self, carried: Carried, tile: TileIndex) -> Carried:
        """Passes over a tile of queries, none of which attends to a key of this warp group."""
        (state, sums), stream = carried, self.scratch.stream
        rings = [ring for ring in (stream.queries, stream.stats, stream.bias) if ring is not None]
        for ring in (*rings, stream.d_out):
            ring.wait(state.count)
        nothing = jnp.zeros((self.scratch.keys.shape[1], self.static.tiles.block_q), self.scratch.keys.dtype)
        self._replace(zero=inline_ptx.unknown_zero())._add(state, nothing, None)
        for ring in rings:
            ring.release(state.count)
        return DkvState(state.count + 1, tile), sums

    def _add(self, state: DkvState, d_s: jax.Array, q: Ref | None) -> None:
        """Issues the dK GEMM, and adds the tile before to dQ; without queries dS is 0, and adds nothing to dK."""
        d_query, out, stream = self.scratch.d_query, self.out, self.scratch.stream
        if d_query is None or out is None:
            if KEY in self.sums and q is not None:
                plg.wgmma(self.sums[KEY], d_s, q)  # dK += dS'^T Q [keys, D]
            plg.wgmma_wait(1 if len(self.sums) > 1 else 0)  # the dV GEMM is done
            stream.d_out.release(state.count)
            return

        def before(acc: Accumulator) -> jax.Array:
            d_query.write(state.count, self.group, d_s)
            if self.is_tight:
                d_query.commit(state.count, self.group)
            # dQ = dS' K, of the tile before
            d_query.start_gemm(acc, state.count - 1, self.group, self.scratch.keys, self.zero)
            if q is not None:
                operand = d_query.tile(state.count, self.group + self.zero) if self.is_tight else d_s
                plg.wgmma(self.sums[KEY], operand, q)  # dK += dS'^T Q [keys, D]
            return plg.wgmma_accumulator_load(acc, wait_n=int(q is not None))

        x = pl.run_scoped(before, d_query.gemm_accumulator(out))
        stream.d_out.release(state.count)
        d_query.add(out, self.group, self.b, state.last, state.count - 1, x)

    def _d_scores(
        self,
        prepared: scores.Scores,
        count: Index,
        query: Index,
        is_partial: bool,
        q: Ref,
        raw: Accumulator,
        d_weights: Accumulator,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """dS^T, as A operand of wgmma, and the cotangents of loads by key; issues the dV GEMM."""
        stream, spec = self.scratch.stream, self.static.spec
        stats = wait_and_get(stream.stats, count)
        vector = lambda which: lax.broadcast_in_dim(load_vector(stats.at[which], COLUMN), prepared.tile[::-1], (1,))
        folds_delta = KEY not in self.sums or (prepared.dropout is None and not self.is_tight)
        d_out = self._start_gemms(count, q, raw, d_weights, vector, folds_delta=folds_delta)
        s = self._scores(raw)
        rows = self.scratch.keys.shape[1]
        bias = [x.at[:, pl.ds(self.group * rows, rows)].T for x in wait_and_get_all(stream.bias, count)]
        tile = scores.modify(prepared, s, query, is_partial, bias=bias)
        if stream.bias is not None:
            stream.bias.release(count)
        if self.static.folds:
            p = inline_ptx.exp2(TILE, tile.s * prepared.log2_scale)  # P^T = exp2(S^T - lse)
        else:
            p = scores.weights(prepared, tile, -vector(LSE))
        tile = tile._replace(kept=scores.kept(prepared, query))
        if folds_delta:
            stream.stats.release(count)
        dropped = tile.drop(p).astype(d_out.dtype)
        if KEY not in self.sums:
            plg.wgmma(self.sums[VALUE], dropped, d_out)  # dV += P^T dO [keys, Dv]
            return dropped, ()
        # The dV GEMM consumes P, so that the exponentials come before the wait for dP; a mod on the SFU would spill.
        value_first = VALUE in self.sums and (self.is_tight or not uses_sfu(spec.programs.score))
        if value_first:
            plg.wgmma(self.sums[VALUE], dropped, d_out)  # dV += P^T dO [keys, Dv]
        if self.is_tight:
            self._start_d_weights(d_weights, d_out)
        wait_n = int(value_first and not self.is_tight)  # the dV GEMM may run on, if it was issued after the dP GEMM
        d_p = weights_vjp(spec, tile, plg.wgmma_accumulator_load(d_weights, wait_n=wait_n))
        if not folds_delta:
            d_p += vector(DELTA)
            stream.stats.release(count)
        if self.is_tight and prepared.dropout is None:
            p = inline_ptx.unknown(TILE, dropped).astype(p.dtype)
        d_s = scores.scores_vjp(prepared, tile, p, d_p)  # dS^T = P^T * (dP^T - delta)
        if VALUE in self.sums and not value_first:
            plg.wgmma(self.sums[VALUE], dropped, d_out)  # dV += P^T dO [keys, Dv]
        d_s, d_load = score_mod_vjp(self.static.derivative, tile, d_s)  # dS'^T, through the score mod
        more = tuple(jnp.sum(d_load(load), axis=1) for load in self.static.groups.columns)
        return self._without_padding(prepared, d_s).astype(d_out.dtype), more

    def _start_gemms(
        self,
        count: Index,
        q: Ref,
        raw: Accumulator,
        d_weights: Accumulator,
        vector: Callable[[int], jax.Array],
        *,
        folds_delta: bool,
    ) -> Ref:
        """Issues the GEMMs of S^T for dV and of dP^T for dK, from the row statistics on; returns dO."""
        # Before both GEMMs are issued: to initialize an accumulator waits for wgmma in flight.
        if VALUE in self.sums and self.static.folds:
            raw[...] = vector(LSE)
        if KEY in self.sums and folds_delta:
            d_weights[...] = vector(DELTA)
        if VALUE in self.sums:
            plg.wgmma(raw, self.scratch.keys.at[self.group + self.zero], q.T)  # S^T = K Q^T [keys, block_q]
        d_out = wait_and_get(self.scratch.stream.d_out, count)  # [block_q, Dv]
        if KEY in self.sums and not self.is_tight:
            self._start_d_weights(d_weights, d_out)
        return d_out

    def _start_d_weights(self, d_weights: Accumulator, d_out: Ref) -> None:
        values = self.scratch.values.at[self.group + self.zero]
        plg.wgmma(d_weights, values, d_out.T)  # dP^T = V dO^T [keys, block_q]

    def _scores(self, raw: Accumulator) -> jax.Array:
        """S^T of the GEMM, or of the other warp group, which hands it on."""
        shared = self.scratch.scores
        if shared is not None and VALUE not in self.sums:
            return shared.read()
        s = plg.wgmma_accumulator_load(raw, wait_n=int(KEY in self.sums and not self.is_tight))
        if shared is not None:
            shared.write(s)
        return s

    def _without_padding(self, prepared: scores.Scores, d_s: jax.Array) -> jax.Array:
        """Clears the dS of padding keys, which may be anything, because dQ sums over keys."""
        spec = self.static.spec
        if self.scratch.d_query is None or spec.S % self.static.tiles.block_kv == 0:
            return d_s
        rows = self.first + plg.broadcasted_iota(jnp.int32, (prepared.tile[1],), 0, layout=ROW)
        return jnp.where(lax.broadcast_in_dim(rows < spec.S, d_s.shape, (0,)), d_s, 0.0)
