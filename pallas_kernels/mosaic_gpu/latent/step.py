"""Two tiles of keys by two consumer warp groups: QK^T of one each, PV of both with half of the columns (see `kernel`).

Tiles are folded in order, and each is published with its row_max: the weights of tile t are relative to the largest
score of tiles 0 to t. Warp group 0 publishes the even tiles, 1 the odd ones. Where group 0 computes the softmax of its
tile, QK^T of the other runs; where group 1 does, PV of the first tile runs. A buffer has two parts: *near*, the latent
columns that the group of its tile owns, and *far*, the columns of the other and the rotated keys. The near part is last
read by the group of the tile, the far part by the other one, so that each has one reader to wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.forward.step import normalized
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import ROW, TILE, accumulate, accumulator, over_columns, row_vector, zero_tile
from pallas_kernels.mosaic_gpu.smem import FIRST_FREE_BARRIER, WARP_GROUP_THREADS
from pallas_kernels.mosaic_gpu.split_kv import clear_values, finite, scores_of
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS
from pallas_kernels.softmax import mark
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Accumulator, Index, Ref

# Named barriers: the row_max of the tile in a buffer is published, its weights are, the sums of an item are.
_MAX_BARRIER, _WEIGHTS_BARRIER, _SUMS_BARRIER = FIRST_FREE_BARRIER, FIRST_FREE_BARRIER + 2, FIRST_FREE_BARRIER + 4
_ROWS = smem.WARP_GROUP_ROWS
# How far a score may exceed the row_max before that is raised: weights are up to 2 ** 8, and after the first tiles
# accumulators are hardly ever rescaled, which takes 128 multiplications of a thread for each tile.
MAX_EXCESS = 8.0


class Buffers(NamedTuple):
    """Two tiles of keys, their weights, and the state that consumers hand to each other; in shared memory."""

    latents: Ref  # [buffers, 2, keys, Dv / 2], the halves of the latent columns
    ropes: Ref  # [buffers, keys, D - Dv]; where it has the shape of weights, these overwrite it
    weights: Ref | None  # [buffers, rows, keys]; None where they overwrite the rotated keys
    row_max: Ref  # [buffers, rows]
    row_sum: Ref  # [2 * consumers, rows], of the item and of the next
    marks: Ref  # [2 * consumers, rows], of the item and of the next
    near_full: Ref  # for each buffer: its near part has arrived
    far_full: Ref  # its far part has arrived
    near_empty: Ref  # its near part has been read
    far_empty: Ref  # its far part has been read, and so have the weights

    def weights_of(self, b: Index) -> Ref:
        """The weights of the tile in a buffer."""
        return (self.ropes if self.weights is None else self.weights).at[b]


class LatentState(NamedTuple):
    """Online softmax state after some of the tiles."""

    out: jax.Array  # [rows, Dv / 2] float32: sum of weights times this half of the values
    row_max: jax.Array  # [rows]: the largest score so far, in base 2, or up to `MAX_EXCESS` less
    row_sum: jax.Array  # [rows, 8]: partial sums of the weights of the group's own tiles, each over every eighth column


def start(spec: AttentionSpec) -> LatentState:
    """The state before the first tile."""
    row_max = row_vector(_ROWS, -jnp.inf)
    return LatentState(zero_tile(_ROWS, spec.Dv // 2), row_max, zero_tile(_ROWS, inline_ptx.TILE_COLUMNS))


class LatentStep(NamedTuple):
    """The mainloop of a consumer warp group over the tiles of an item."""

    prepared: scores.Scores  # how scores are computed
    queries: Ref  # [2, rows, Dv / 2] in shared memory
    query_ropes: Ref  # [1, rows, D - Dv]
    buffers: Buffers
    group: int  # the warp group: 0 or 1; also the buffer of its own tiles, and the half of the columns that it owns
    length: jax.Array  # keys of the request
    end: jax.Array  # one past the last tile of keys
    in_turn: bool  # whether a tile is done before the next one is waited for
    zero: Index = 0  # added to indices of shared memory; see `inline_ptx.unknown_zero`

    def __call__(self, begin: jax.Array, pairs: jax.Array) -> LatentState:
        """The state after so many pairs of tiles from `begin` on; the second tile of the last may be past the end."""
        state = start(self.prepared.spec)
        if self.in_turn:
            return lax.fori_loop(0, pairs, lambda j, state: self._with_opaque_zero()._pair(state, begin + 2 * j), state)
        if self.group == 1:
            follow = lambda j, state: self._with_opaque_zero()._follow(state, begin + 2 * j)
            return lax.fori_loop(0, pairs, follow, state)

        def lead(state: LatentState) -> LatentState:
            state = self._with_opaque_zero()._own(state, begin)
            on = lambda j, state: self._with_opaque_zero()._lead_on(state, begin + 2 * j)
            return self._with_opaque_zero()._other(lax.fori_loop(0, pairs - 1, on, state), begin + 2 * pairs - 1)

        return lax.cond(pairs > 0, lead, lambda state: state, state)

    def _with_opaque_zero(self) -> LatentStep:
        """This step with a zero that the compilers do not know."""
        return self._replace(zero=inline_ptx.unknown_zero())

    def _pair(self, state: LatentState, tile: jax.Array) -> LatentState:
        """A tile of warp group 0 and the next, of 1; a buffer is released before the other one is waited for."""
        if self.group == 0:
            return self._other(self._own(state, tile), tile + 1)
        return self._own(self._other(state, tile), tile + 1)

    def _own(self, state: LatentState, tile: jax.Array) -> LatentState:
        """A tile of this warp group."""

        def qk(raw: Accumulator) -> jax.Array:
            self._start_near_scores(raw)
            self._start_far_scores(raw)
            return self._modify(plg.wgmma_accumulator_load(raw), tile)

        weights = self._weights(state.row_max, pl.run_scoped(qk, accumulator(_ROWS, TILE_KEYS)))
        return self._add_own(state, tile, *weights)

    def _other(self, state: LatentState, tile: jax.Array) -> LatentState:
        """PV of a tile of the other warp group."""
        b = 1 - self.group
        state = self._received_max(state, b)
        out = accumulate(state.out, lambda ref: self._add_received(ref, b, tile))
        plg.barrier_arrive(self.buffers.far_empty.at[b])
        return state._replace(out=out)

    def _lead_on(self, state: LatentState, tile: jax.Array) -> LatentState:
        """Warp group 0: PV of the tile of the other after `tile`, then its own next tile.

        Both GEMMs are issued together, so that the tensor cores go from one to the other without a bubble.
        """
        state = self._received_max(state, 1)

        def both(refs: tuple[Accumulator, ...], raw: Accumulator) -> None:
            self._add_received(refs[0], 1)
            self._start_near_scores(raw)
            plg.wgmma_wait(1)
            plg.barrier_arrive(self.buffers.far_empty.at[1])
            self._start_far_scores(raw)
            s = self._modify(plg.wgmma_accumulator_load(raw), tile + 2)
            weights = self._weights(state.row_max, s)
            for ref, x in zip(refs[1:], weights, strict=True):
                ref[...] = x

        raw = accumulator(_ROWS, TILE_KEYS)
        out, *weights = self._run(lambda refs: pl.run_scoped(functools.partial(both, refs), raw), state.out)
        return self._add_own(state._replace(out=out), tile + 2, *weights)

    def _add_own(
        self, state: LatentState, tile: jax.Array, row_max: jax.Array, p: jax.Array, added: jax.Array
    ) -> LatentState:
        """PV of a tile of this warp group, from its weights."""
        state = _rescaled(state, row_max)
        self._clear_past_end(self.group, tile)
        values = self._values(self.group)
        out = accumulate(state.out, lambda ref: plg.wgmma(ref, p, values))  # O += P V [rows, Dv / 2]
        plg.barrier_arrive(self.buffers.near_empty.at[self.group])
        return LatentState(out, row_max, state.row_sum + added)

    def _follow(self, state: LatentState, tile: jax.Array) -> LatentState:
        """Warp group 1: the tile of the other while its own QK^T runs, then its own."""

        def first(raw: Accumulator) -> tuple[jax.Array, ...]:
            self._start_near_scores(raw)
            self._start_far_scores(raw)
            received = self._received_max(state, 0)

            def both(refs: tuple[Accumulator, ...]) -> None:
                self._add_received(refs[0], 0, tile)
                s = self._modify(plg.wgmma_accumulator_load(raw, wait_n=1), tile + 1)
                weights = self._weights(received.row_max, s)
                for ref, x in zip(refs[1:], weights, strict=True):
                    ref[...] = x

            out, *weights = self._run(both, received.out)
            return out, received.row_max, received.row_sum, *weights

        *received, row_max, p, added = pl.run_scoped(first, accumulator(_ROWS, TILE_KEYS))
        plg.barrier_arrive(self.buffers.far_empty.at[0])
        return self._add_own(LatentState(*received), tile + 1, row_max, p, added)

    def _start_near_scores(self, raw: Accumulator) -> None:
        """Issues QK^T of the near part of the group's own tile: it arrives first."""
        b, keys = self.group, self.buffers.latents.at[self.group + self.zero, self.group]
        plg.barrier_wait(self.buffers.near_full.at[b])
        plg.wgmma(raw, self.queries.at[b + self.zero], keys.T)  # S = Q K^T [rows, keys], of Dv / 2 columns

    def _start_far_scores(self, raw: Accumulator) -> None:
        """Issues QK^T of the far part."""
        b, buffers = self.group, self.buffers
        plg.barrier_wait(buffers.far_full.at[b])
        plg.wgmma(raw, self.queries.at[1 - b + self.zero], buffers.latents.at[b + self.zero, 1 - b].T)  # S += Q K^T
        plg.wgmma(raw, self.query_ropes.at[self.zero], buffers.ropes.at[b + self.zero].T)  # S += Q K^T, rotated columns

    def _modify(self, raw: jax.Array, tile: jax.Array) -> jax.Array:
        """Scores of a tile: mods, and -inf past the end of the keys; all of a tile past the last one is masked."""
        first = jnp.minimum(tile, self.end - 1) * TILE_KEYS
        return scores_of(self.prepared, raw, first, jnp.where(tile < self.end, self.length, 0))

    def _weights(self, row_max: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The new row_max and the weights of the group's own tile, both published, and the weights' partial sums."""
        scale = self.prepared.log2_scale
        largest = jnp.max(s, axis=1) * scale
        row_max = jnp.where(largest > row_max + MAX_EXCESS, largest, row_max)
        self.buffers.row_max[self.group, :] = row_max
        number = jnp.int32(_MAX_BARRIER + self.group)
        row_max = inline_ptx.after_barrier(number, 2 * WARP_GROUP_THREADS, ROW, row_max, "arrive")
        p = inline_ptx.exp2(TILE, s * scale - over_columns(finite(row_max), s.shape))  # P = exp2(S - m)
        weights = row_max, p.astype(self.queries.dtype), inline_ptx.sum_columns(TILE, p)
        self._publish(weights[1])
        return weights

    def _run(self, both: Callable[[tuple[Accumulator, ...]], None], out: jax.Array) -> tuple[jax.Array, ...]:
        """Runs `both` on refs to O and to the results of `_weights`, and returns their values."""
        init, row_max = plg.WGMMAAccumulatorRef.init(out), row_vector(_ROWS)
        weights, row_sum = zero_tile(_ROWS, TILE_KEYS, self.queries.dtype), zero_tile(_ROWS, inline_ptx.TILE_COLUMNS)
        run = cast("Callable[[object], tuple[jax.Array, ...]]", pl.run_state(both))
        return run((init, row_max, weights, row_sum))

    def _publish(self, p: jax.Array) -> None:
        """Hands the weights of the group's own tile to the other group."""
        self.buffers.weights_of(self.group + self.zero)[...] = p
        plg.commit_smem()
        _barrier("arrive", _WEIGHTS_BARRIER + self.group)

    def _received_max(self, state: LatentState, b: int) -> LatentState:
        """The state, rescaled to the row_max of a tile of the other group.

        It is published before the weights, so that accumulators are rescaled while the other group computes these.
        """
        _barrier("sync", _MAX_BARRIER + b)
        return _rescaled(state, smem.load(self.buffers.row_max.at[b], ROW))

    def _add_received(self, out: Accumulator, b: int, tile: jax.Array | None = None) -> None:
        """Issues PV of a tile of the other group, once its weights are published; `tile` if it may be the last.

        It waits behind the fence with which an accumulator starts: ptxas moves the rescaling behind a barrier alone.
        """
        _barrier("sync", _WEIGHTS_BARRIER + b)
        plg.barrier_wait(self.buffers.far_full.at[b])  # long complete; its values are read through TMA's proxy
        if tile is not None:
            self._clear_past_end(b, tile)
        plg.wgmma(out, self.buffers.weights_of(b + self.zero), self._values(b))  # O += P V [rows, Dv / 2]

    def _values(self, b: int) -> Ref:
        return self.buffers.latents.at[b + self.zero, self.group]

    def _clear_past_end(self, b: int, tile: jax.Array) -> None:
        """Overwrites the values past the end of the keys with zeros: their weights are 0, and they may be NaN."""
        valid = jnp.where(tile < self.end, self.length - tile * TILE_KEYS, 0)
        clear_values(self._values(b), valid)

    def finish(self, state: LatentState, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Epilogue: this half of the output, and the lse; `turn` is 0 and 1 in turns."""
        buffers, marks = self.buffers, self.prepared.spec.needs_marks
        row, other_row = 2 * turn + self.group, 2 * turn + (1 - self.group)
        row_sum = jnp.sum(state.row_sum, axis=1)
        buffers.row_sum[row, :] = row_sum
        if marks:
            buffers.marks[row, :] = mark(state.out)
        plg.commit_smem()
        _barrier("sync", _SUMS_BARRIER)
        row_sum = row_sum + smem.load(buffers.row_sum.at[other_row], ROW)
        out, lse = normalized(state.out, state.row_max, row_sum, None, marks=marks)
        return out, lse + smem.load(buffers.marks.at[other_row], ROW) if marks else lse


def _barrier(operation: str, number: int) -> None:
    inline_ptx.hardware_barrier(operation, jnp.int32(number), 2 * WARP_GROUP_THREADS)


def _rescaled(state: LatentState, row_max: jax.Array) -> LatentState:
    """The state relative to a new row_max, if it is new to any row of the warp."""

    def rescale(sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        alpha = inline_ptx.exp2(ROW, state.row_max - finite(row_max))  # rescale factor of O and row_sum
        return tuple(x * over_columns(alpha, x.shape) for x in sums)

    differ = inline_ptx.differ_in_warp(ROW, row_max, state.row_max)
    out, row_sum = lax.cond(differ, rescale, lambda sums: sums, (state.out, state.row_sum))
    return LatentState(out, row_max, row_sum)
