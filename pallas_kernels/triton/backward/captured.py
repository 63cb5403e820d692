"""Backward kernel for captured arrays with tile loads that are constant along some axes (broadcast axes).

A pair bias ``bias[h, q, k]`` is constant along the batch, a table ``t[h, q - k]`` along diagonals. One program owns a
tile of scores, or a diagonal of tiles, recomputes the scores and their cotangents along those axes, and reduces them in
registers; so each element is written once, and not once for each load. Two further GEMMs for each tile are little
against atomics by element in global memory.

The grid is (tiles or diagonals times splits, heads, batch), the last two of length 1 where they are summed over.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import KernelStatics, RowOperands, log2_lse, score_mod_vjp, weights_vjp
from pallas_kernels.program.broadcast_axes import BroadcastAxes
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import covers, stores
from pallas_kernels.program.ir import Node
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton import scores
from pallas_kernels.triton.backward.dq import write_cotangents
from pallas_kernels.triton.forward import QueryTile
from pallas_kernels.triton.head_chunks import qk_dot
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.triton.plan.plan import fitted
from pallas_kernels.types import Index, Ref

MAX_TILE = 64
TARGET_PROGRAMS = 1024  # for a GPU with about a hundred SMs; with fewer, the work of each is split


class CapturedWork(NamedTuple):
    """Work of one launch."""

    spec: AttentionSpec
    axes: BroadcastAxes  # along which the loads are constant
    loads: tuple[Node, ...]
    tiles: Tiles  # square
    splits: int = 1  # programs that share a tile or diagonal

    @classmethod
    def from_group(
        cls, spec: AttentionSpec, tiles: Tiles, group: tuple[BroadcastAxes, tuple[Node, ...]]
    ) -> CapturedWork:
        """The work of a group of `LoadGroups.repeated`, with splits where there are few programs."""
        whole = cls(spec, *group, _tiles(spec, tiles))
        kept_heads, kept_batch = whole.kept
        summed = spec.B * spec.Hq // (kept_heads * kept_batch)
        programs = whole.positions * kept_heads * kept_batch
        return whole._replace(splits=max(1, min(summed, TARGET_PROGRAMS // programs)))

    @property
    def tile(self) -> int:
        """Queries of a tile, and keys."""
        return self.tiles.block_q

    @property
    def grid_of_tiles(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        return pl.cdiv(self.spec.T, self.tile), pl.cdiv(self.spec.S, self.tile)

    @property
    def positions(self) -> int:
        """Tiles, or diagonals of tiles, with sums of their own."""
        rows, columns = self.grid_of_tiles
        return rows + columns - 1 if self.axes.diagonal else rows * columns

    @property
    def kept(self) -> tuple[int, int]:
        """Heads and batch entries that are not summed over."""
        return (1 if self.axes.heads else self.spec.Hq), (1 if self.axes.batch else self.spec.B)

    def stores(self, load: Node) -> bool:
        """True if a load's cotangents are stored, each split in an array of its own, and not added by atomics."""
        return stores(self.spec, self.loads, load, self.axes)

    def writes_all(self, load: Node) -> bool:
        """True if no element of the gradient must be zero before."""
        shape = self.spec.score_shapes[load.value]
        return self.stores(load) and covers(self.spec, load, shape) and not self.spec.config.interpret

    def gradient(self, load: Node, operand: jax.Array) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the gradient in the launch, with a leading axis of splits where it is stored."""
        if not self.stores(load):
            return jax.ShapeDtypeStruct(operand.shape, jnp.float32)
        return jax.ShapeDtypeStruct((self.splits, *operand.shape), operand.dtype if self.splits == 1 else jnp.float32)


def captured(
    statics: KernelStatics,
    arrays: Operands[jax.Array],
    rows: RowOperands[jax.Array],
    group: tuple[BroadcastAxes, tuple[Node, ...]],
) -> list[jax.Array]:
    """Computes the gradients, of the shape of the array, that each load of a group contributes."""
    spec, tiles, derivative, _ = statics
    assert derivative is not None  # whose loads they are
    work = CapturedWork.from_group(spec, tiles, group)
    shapes = [work.gradient(load, arrays.captured.score[load.value]) for load in work.loads]
    states = None if arrays.lists is None else block_walk.states(spec, arrays.lists)
    zeroed = [i for i, load in enumerate(work.loads) if not work.writes_all(load)]
    zeros = [jnp.zeros(shapes[i].shape, shapes[i].dtype) for i in zeroed]
    inputs = (arrays, states, rows, zeros)
    before = len(jax.tree.leaves(inputs[:3]))
    outs = runner_of(spec).launch(
        functools.partial(_kernel, work, derivative),
        inputs,
        shapes,
        name="jflex_backward_captured",
        grid=(work.positions * work.splits, *work.kept),
        tiles=fitted(spec, "captured", work.tiles, [derivative.d_loads[x] for x in work.loads]),
        aliases={before + n: i for n, i in enumerate(zeroed)},
    )
    return [x.sum(axis=0) if work.stores(load) else x for x, load in zip(outs, work.loads, strict=True)]


def _tiles(spec: AttentionSpec, tiles: Tiles) -> Tiles:
    """H200, pair bias at S 384, head size 32: 188 us with 64 x 64 and 3 stages, 280 with 2, 534 with 32 x 32."""
    deep, tile = max(spec.D, spec.Dv) <= 64 and tiles.num_stages > 1, min(*tiles.shape, MAX_TILE)
    return Tiles(tile, tile, tiles.num_warps, 3 if deep else tiles.num_stages)


def _kernel(
    work: CapturedWork,
    derivative: Derivative,
    arrays: Operands[Ref],
    states: Ref | None,  # [list batch, list heads, rows of blocks, columns of blocks], or None
    rows: RowOperands[Ref],  # dO like the output; lse, delta and dH [B, Hq, T]
    zeros: list[Ref],  # initial gradients, aliased with those outputs that are not written as a whole
    *gradients: Ref,  # like the array of each load; with a leading axis of splits where stored
) -> None:
    position, split = lax.div(pl.program_id(0), work.splits), lax.rem(pl.program_id(0), work.splits)
    own_head, own_entry = pl.program_id(1), pl.program_id(2)
    spec, (first, length) = work.spec, _first_tile(work, position)
    heads, batch = (whole // kept for whole, kept in zip((spec.Hq, spec.B), work.kept, strict=True))

    program = _Program(work, derivative, arrays, rows)

    def step(i: Index, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        head = own_head if heads == 1 else lax.rem(i, heads)
        entry = own_entry if batch == 1 else lax.rem(lax.div(i, heads), batch)
        along = lax.div(i, heads * batch)
        at = (entry, head, first[0] + along, first[1] + along)
        if states is None or spec.block_size is None:
            return program.add(at, True, sums)
        block_q, block_kv = spec.block_size
        block = lax.div(at[2] * work.tile, block_q), lax.div(at[3] * work.tile, block_kv)
        state = states[(*block_walk.list_position(spec, entry, head), *block)]
        visit = lambda sums: program.add(at, state == block_walk.PARTIAL, sums)
        return lax.cond(state != block_walk.EMPTY, visit, lambda sums: sums, sums)

    total = length * heads * batch
    size = lax.div(total + work.splits - 1, work.splits)
    start = tuple(jnp.zeros((work.tile, work.tile), jnp.float32) for _ in work.loads)
    sums = lax.fori_loop(split * size, jnp.minimum((split + 1) * size, total), step, start)
    at = (own_entry, own_head, *first)
    for load, ref, x in zip(work.loads, gradients, sums, strict=True):
        program.write(ref, load, x, at, split)


def _first_tile(work: CapturedWork, position: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Index]:
    """Row and column of the first tile at a position (a tile or a diagonal), and how many tiles it has."""
    rows, columns = work.grid_of_tiles
    if not work.axes.diagonal:
        return (lax.div(position, columns), lax.rem(position, columns)), 1
    diagonal = position - (columns - 1)
    row, column = jnp.maximum(diagonal, 0), jnp.maximum(-diagonal, 0)
    return (row, column), jnp.minimum(rows - row, columns - column)


_Place: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # batch, query head, tiles of queries and of keys


class _Program(NamedTuple):
    """The state of a program."""

    work: CapturedWork
    derivative: Derivative
    arrays: Operands[Ref]
    rows: RowOperands[Ref]

    def add(self, at: _Place, is_partial: bool | jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Adds the cotangents of one tile."""
        spec, arrays, rows, tile = self.work.spec, self.arrays, self.rows, self.work.tile
        queries, key = self._queries(at), at[3] * tile
        of_keys = functools.partial(queries.load_keys, key=key, may_end=spec.S % tile != 0)
        q, d_out, vector = queries.load(arrays.query), queries.load(rows.d_out), queries.load_vector
        prepared = queries.prepare(self.derivative.nodes)
        outs = scores.compute(prepared, q, of_keys(arrays.key), key, is_partial)  # S = QK^T, [tile, tile]
        lse_log2 = log2_lse(vector(rows.lse, other=-jnp.inf))[:, None]
        p = scores.probabilities(prepared, outs, lse_log2)  # P = exp2(S - lse)
        d_p = weights_vjp(spec, outs, qk_dot(spec, d_out, of_keys(arrays.value)))  # dP = dO V^T
        d_p = scores.entropy_vjp(prepared, outs, d_p, lse_log2, rows.load_d_entropy(vector))
        d_s = scores.scores_vjp(prepared, outs, p, d_p, vector(rows.delta, other=0.0)[:, None])  # P * (dP - delta)
        _, of_load = score_mod_vjp(self.derivative, outs, d_s)
        cotangents = [of_load(load) for load in self.work.loads]
        if self.work.axes.diagonal and queries.may_end:  # padding of the last tile is no padding in the first
            exists = queries.first + lax.broadcasted_iota(jnp.int32, d_s.shape, 0) < spec.T
            cotangents = [jnp.where(exists, x, 0.0) for x in cotangents]
        return tuple(total + x for total, x in zip(sums, cotangents, strict=True))

    def write(self, ref: Ref, load: Node, total: jax.Array, at: _Place, split: Index) -> None:
        """Writes the sums of a position to the elements that its first tile loads."""
        spec, queries, key = self.work.spec, self._queries(at), at[3] * self.work.tile
        prepared = queries.prepare(())
        assert prepared.score is not None  # which loads
        score = prepared.score.child(scores.walked_index(prepared, self.derivative.program, key))
        stored, first = self.work.stores(load), (queries.first, key)
        write_cotangents(spec, ref, score, load, total, first, add=not stored, split=split if stored else None)

    def _queries(self, at: _Place) -> QueryTile:
        return QueryTile(self.work.spec, self.work.tiles, self.arrays, at[:3])
