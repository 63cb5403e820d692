"""Backward kernel for captured arrays that are read by element, but in the same way along some axes.

A pair bias ``bias[h, q, k]`` is the same in the whole batch, a table ``t[h, q - k]`` along diagonals. One program owns
a tile of scores, or a diagonal of tiles, computes the scores and their cotangents along those axes once more, and sums
them in registers; so each element is written once and not at each place that reads it. Two further products for each
tile are little against additions to global memory by element.

The grid is (tiles or diagonals times parts, heads, batch), the last two of length 1 where they are summed over.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.ref import addupdate

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Rows, shift_of, through_mod
from pallas_kernels.program.broadcast_axes import Invariance
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import covers, reads_once
from pallas_kernels.program.ir import Node
from pallas_kernels.spec import Arrays, AttentionSpec
from pallas_kernels.triton import scores
from pallas_kernels.triton.head_chunks import inner, load_keys, load_queries, load_vector
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.tile import weights

LARGEST_TILE = 64
ENOUGH_PROGRAMS = 1024  # of a GPU with about a hundred multiprocessors; fewer are divided into parts


class Work(NamedTuple):
    """What one launch computes.

    Attributes:
      axes: Along which the loads are the same.
      loads: The loads.
      tile: Queries of a tile, and keys.
      parts: Programs that share a tile or diagonal.
    """

    axes: Invariance
    loads: tuple[Node, ...]
    tile: int
    parts: int


def captured(
    spec: AttentionSpec,
    tiles: Tiles,
    arrays: Arrays,
    rows: Rows,
    derivative: Derivative,
    group: tuple[Invariance, tuple[Node, ...]],
) -> list[jax.Array]:
    """Computes the gradients, of the shape of the array, that each load of a group contributes."""
    work = _plan(spec, tiles, group)
    shapes = [_result(spec, arrays, work, load) for load in work.loads]
    kinds = None if spec.block_size is None else block_walk.kinds(spec, arrays.lists)
    zeros = [jnp.zeros(s.shape, s.dtype) for s, load in zip(shapes, work.loads, strict=True)
             if not _writes_all(spec, arrays, work, load)]  # fmt: skip
    inputs = (arrays, kinds, rows, zeros)
    before = len(jax.tree.leaves(inputs[:3]))
    zeroed = [i for i, load in enumerate(work.loads) if not _writes_all(spec, arrays, work, load)]
    found = launch(
        functools.partial(_kernel, spec, work, derivative),
        inputs,
        shapes,
        name="jflex_backward_captured",
        grid=(_places(spec, work) * work.parts, *_kept(spec, work)),
        tiles=_tiles(spec, tiles, work),
        interpret=spec.config.interpret,
        aliases={before + nth: i for nth, i in enumerate(zeroed)},
    )
    return [x.sum(axis=0) if _stores(spec, work, load) else x for x, load in zip(found, work.loads, strict=True)]


def _plan(spec: AttentionSpec, tiles: Tiles, group: tuple[Invariance, tuple[Node, ...]]) -> Work:
    axes, loads = group
    whole = Work(axes, loads, min(tiles.block_q, tiles.block_kv, LARGEST_TILE), 1)
    kept_heads, kept_batch = _kept(spec, whole)
    summed = spec.B * spec.Hq // (kept_heads * kept_batch)
    programs = _places(spec, whole) * kept_heads * kept_batch
    return whole._replace(parts=max(1, min(summed, ENOUGH_PROGRAMS // programs)))


def _tiles(spec: AttentionSpec, tiles: Tiles, work: Work) -> Tiles:
    """H200, pair bias at S 384, head size 32: 188 us with 64 x 64 and 3 stages, 280 with 2, 534 with 32 x 32."""
    deep = max(spec.D, spec.Dv) <= 64 and tiles.num_stages > 1
    return Tiles(work.tile, work.tile, tiles.num_warps, 3 if deep else tiles.num_stages)


def _grid_of_tiles(spec: AttentionSpec, work: Work) -> tuple[int, int]:
    return pl.cdiv(spec.T, work.tile), pl.cdiv(spec.S, work.tile)


def _places(spec: AttentionSpec, work: Work) -> int:
    rows, columns = _grid_of_tiles(spec, work)
    return rows + columns - 1 if work.axes.diagonal else rows * columns


def _kept(spec: AttentionSpec, work: Work) -> tuple[int, int]:
    return (1 if work.axes.heads else spec.Hq), (1 if work.axes.batch else spec.B)


def _stores(spec: AttentionSpec, work: Work, load: Node) -> bool:
    """Whether a load's cotangents are stored, each part in an array of its own, and not added."""
    alone = sum(other.value == load.value for other in work.loads) == 1
    return alone and reads_once(spec, load, work.axes)


def _writes_all(spec: AttentionSpec, arrays: Arrays, work: Work, load: Node) -> bool:
    shape = arrays.score_operands[load.value].shape
    return _stores(spec, work, load) and covers(spec, load, shape) and not spec.config.interpret


def _result(spec: AttentionSpec, arrays: Arrays, work: Work, load: Node) -> jax.ShapeDtypeStruct:
    operand = arrays.score_operands[load.value]
    if not _stores(spec, work, load):
        return jax.ShapeDtypeStruct(operand.shape, jnp.float32)
    return jax.ShapeDtypeStruct((work.parts, *operand.shape), operand.dtype if work.parts == 1 else jnp.float32)


def _kernel(
    spec: AttentionSpec,
    work: Work,
    derivative: Derivative,
    arrays: Arrays,
    kinds: Any,
    rows: Rows,
    zeros: Any,
    *gradients: Any,
) -> None:
    place, part = lax.div(pl.program_id(0), work.parts), lax.rem(pl.program_id(0), work.parts)
    own_head, own_entry = pl.program_id(1), pl.program_id(2)
    first, length = _first_tile(spec, work, place)
    heads, batch = (whole // kept for whole, kept in zip((spec.Hq, spec.B), _kept(spec, work), strict=True))

    here = _Here(spec, work, derivative, arrays, rows)

    def step(nth: Any, sums: Any) -> Any:
        head = own_head if heads == 1 else lax.rem(nth, heads)
        entry = own_entry if batch == 1 else lax.rem(lax.div(nth, heads), batch)
        along = lax.div(nth, heads * batch)
        at = (entry, head, (first[0] + along) * work.tile, (first[1] + along) * work.tile)
        if kinds is None or spec.block_size is None:
            return here.add(at, True, sums)
        block_q, block_kv = spec.block_size
        kind = kinds[(*block_walk.list_position(spec, entry, head), lax.div(at[2], block_q), lax.div(at[3], block_kv))]
        visit = lambda sums: here.add(at, kind == block_walk.PARTIAL, sums)
        return lax.cond(kind != block_walk.EMPTY, visit, lambda sums: sums, sums)

    total = length * heads * batch
    share = lax.div(total + work.parts - 1, work.parts)
    start = tuple(jnp.zeros((work.tile, work.tile), jnp.float32) for _ in work.loads)
    sums = lax.fori_loop(part * share, jnp.minimum((part + 1) * share, total), step, start)
    at = (own_entry, own_head, first[0] * work.tile, first[1] * work.tile)
    for load, ref, x in zip(work.loads, gradients, sums, strict=True):
        here.write(ref, load, x, at, part)


def _first_tile(spec: AttentionSpec, work: Work, place: Any) -> tuple[tuple[Any, Any], Any]:
    """Row and column of the first tile of a place, and how many tiles it has."""
    rows, columns = _grid_of_tiles(spec, work)
    if not work.axes.diagonal:
        return (lax.div(place, columns), lax.rem(place, columns)), 1
    diagonal = place - (columns - 1)
    row, column = jnp.maximum(diagonal, 0), jnp.maximum(-diagonal, 0)
    return (row, column), jnp.minimum(rows - row, columns - column)


class _Here(NamedTuple):
    """What a program knows; places are (batch, query head, first query, first key)."""

    spec: AttentionSpec
    work: Work
    derivative: Derivative
    arrays: Arrays
    rows: Rows

    def add(self, at: tuple[Any, Any, Any, Any], is_partial: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Adds the cotangents of one tile."""
        spec, arrays, rows, tile = self.spec, self.arrays, self.rows, self.work.tile
        b, h, query, key = at
        rows_end, keys_end = spec.T % tile != 0, spec.S % tile != 0
        of_rows = functools.partial(load_queries, spec, b=b, h=h, first=query, rows=tile, may_end=rows_end)
        of_keys = functools.partial(load_keys, spec, b=b, h=h, first=key, rows=tile, may_end=keys_end)
        vector = functools.partial(load_vector, at=(b, h), first=query, rows=tile, length=spec.T, may_end=rows_end)
        q, d_out = of_rows(arrays.query), of_rows(rows.d_out)
        known = self._scores(at, self.derivative.nodes)
        found = scores.compute(known, q, of_keys(arrays.key), key, is_partial)
        p = weights(spec, found.s, known.unit, shift_of(vector(rows.lse, other=-jnp.inf))[:, None])
        d_s = p * (inner(spec, d_out, of_keys(arrays.value)) - vector(rows.delta, other=0.0)[:, None])
        _, of_load = through_mod(self.derivative, found, d_s)
        cotangents = [of_load(load) for load in self.work.loads]
        if self.work.axes.diagonal and rows_end:  # what the last tile lacks, the first one has: there NaN would count
            exists = query + lax.broadcasted_iota(jnp.int32, d_s.shape, 0) < spec.T
            cotangents = [jnp.where(exists, x, 0.0) for x in cotangents]
        return tuple(total + x for total, x in zip(sums, cotangents, strict=True))

    def write(self, ref: Any, load: Node, total: jax.Array, at: tuple[Any, Any, Any, Any], part: Any) -> None:
        """Writes the sums of a place to the elements that its first tile reads."""
        spec = self.spec
        known = self._scores(at, ())
        assert known.score is not None  # which loads
        evaluation = known.score.child(scores.walked_index(known, self.derivative.program, at[3]))
        index = tuple(evaluation.space.spread(evaluation(i), i.kind, "qk") for i in load.inputs)
        exists = (at[2] + lax.broadcasted_iota(jnp.int32, total.shape, 0) < spec.T) & (
            at[3] + lax.broadcasted_iota(jnp.int32, total.shape, 1) < spec.S
        )
        if not _stores(spec, self.work, load):
            addupdate(ref, index, jnp.where(exists, total, 0.0))
            return
        index = (jnp.full(total.shape, part, jnp.int32), *index)
        if spec.config.interpret:  # it stores masked places too, as they were before
            addupdate(ref, index, jnp.where(exists, total, 0.0).astype(ref.dtype))
        else:
            plgpu.store(ref.at[index], total.astype(ref.dtype), mask=exists)

    def _scores(self, at: tuple[Any, Any, Any, Any], nodes: Any) -> scores.Scores:
        b, h, query, _ = at
        tile = (self.work.tile, self.work.tile)
        return scores.prepare(self.spec, self.arrays, tile, b, h, q_first=query, programs={"score": nodes})
