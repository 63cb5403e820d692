"""Forward kernel for Hopper.

A block of threads computes tiles of queries, each of one head (`schedule`). One warp group walks the listed blocks of
keys and has the copy engine bring queries, and keys and values into a ring; two others hold half of the queries each,
and their weights, output and running softmax, in registers (Shah et al. 2024, arXiv:2407.08608, algorithm 2). They take
turns at what is scarce: the tensor cores, or the exponentials (`forward_step`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk as blocks
from pallas_kernels.config import Tiles
from pallas_kernels.marks import may_hide
from pallas_kernels.mosaic_gpu import bias_tiles as planes
from pallas_kernels.mosaic_gpu import padding, scores
from pallas_kernels.mosaic_gpu import smem as memory
from pallas_kernels.mosaic_gpu.forward import scheduler as schedule
from pallas_kernels.mosaic_gpu.forward import step as forward_step
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flat_operands, launch
from pallas_kernels.mosaic_gpu.pipeline import COMPUTING, COPYING, Ring, Turns
from pallas_kernels.mosaic_gpu.tile_order import Grid
from pallas_kernels.spec import Arrays, AttentionSpec


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
      queries: [1 or 2, groups, rows, D]: of the tile at hand, and of the next.
      queries_filled: A barrier for each of them and each group.
      queries_emptied: Likewise.
      ring: A stage holds the keys of a tile and the values of the one before, which are multiplied in the same step,
        and tiles of `planes`.
      out: [groups, rows, Dv]; None if it takes the place of the queries.
      lse: [groups, rows].
      numbers: Of the tiles; None if there is but one.
    """

    queries: Any
    queries_filled: Any
    queries_emptied: Any
    ring: Ring
    out: Any
    lse: Any
    numbers: Any

    @property
    def brings(self) -> bool:
        """Whether the ring holds tiles of `planes`."""
        return len(self.ring.tiles) > 2

    def place(self, i: Any, group: Any) -> tuple[Any, Any]:
        """Where the queries of the ith tile are: in which part, and the number of their barriers."""
        groups, part = self.queries.shape[1], jnp.int32(0) if self.numbers is None else schedule.slot(i)
        return part, part * groups + group


def declare(spec: AttentionSpec, tiles: Tiles, dtype: Any) -> Scratch:
    """What a block of threads needs: with tiles of `planes` if they fit, and for many tiles if those fit then."""
    elements = planes.declare(spec, tiles, tiles.num_stages)
    most = (True, False) if _grid(spec, tiles).size > schedule.BLOCKS else (False,)
    for brought, many in itertools.product((elements, ()) if elements else ((),), most):
        declared = _declare(spec, tiles, dtype, brought, many=many)
        if memory.bytes_of(jax.tree.leaves(declared)) <= memory.LIMIT:
            return declared
    return _declare(spec, tiles, dtype, (), many=False)


def _declare(spec: AttentionSpec, tiles: Tiles, dtype: Any, elements: tuple[Any, ...], *, many: bool) -> Scratch:
    groups, ahead = tiles.num_warps // 4, schedule.AHEAD if many else 1
    rows = tiles.block_q // groups
    D, Dv = padding.head_sizes(spec, dtype)
    stages = [memory.tiled((tiles.num_stages, tiles.block_kv, size), dtype) for size in (D, Dv)]
    return Scratch(
        memory.tiled((ahead, groups, rows, D), dtype),
        plg.Barrier(num_barriers=ahead * groups),
        plg.Barrier(num_barriers=ahead * groups) if many else None,
        Ring.of((*stages, *elements), groups),
        None if Dv == D else memory.tiled((groups, rows, Dv), dtype),
        plg.SMEM((groups, rows), jnp.float32),
        schedule.numbers() if many else None,
    )


def _grid(spec: AttentionSpec, tiles: Tiles) -> Grid:
    return Grid(spec.B, spec.Hq, pl.cdiv(spec.T, tiles.block_q))


def forward(spec: AttentionSpec, tiles: Tiles, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Computes out, in the layout and dtype of the query, and lse, float32 [B, Hq, T].

    With a mask, the lse is NaN where the output must be repaired (`pallas_kernels.marks`).
    """
    order, (T, Dv) = blocks.row_order(spec, tiles, arrays), (spec.T, spec.Dv)
    spec, arrays = padding.padded(spec, arrays)
    grid, scratch = _grid(spec, tiles), declare(spec, tiles, arrays.query.dtype)
    many = scratch.numbers is not None
    captured = scores.Captured(*(tuple(x.shape for x in group) for group in arrays[4:6]))
    brought = [plane.of(arrays.score_operands) for plane in planes.planes_of(spec)] if scratch.brings else []
    out, lse = launch(
        functools.partial(_kernel, spec, tiles, captured),
        (flat_operands(arrays), order, schedule.counter() if many else None, brought),
        [
            padding.like_rows(arrays.query, spec.Dv),
            jax.ShapeDtypeStruct((spec.B, spec.Hq, grid.tiles * tiles.block_q), jnp.float32),
        ],
        scratch,
        name="jflex_forward_sm90",
        blocks=schedule.BLOCKS if many else grid.size,
        warp_groups=tiles.num_warps // 4 + 1,
    )
    return padding.cut_rows(spec, out, T, Dv), lse[..., :T]


def _kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    captured: scores.Captured,
    number: Any,
    inputs: Any,
    outputs: Any,
    scratch: Scratch,
) -> None:
    arrays, order, counter, brought = inputs
    plan = schedule.Schedule(_grid(spec, tiles), number, counter, scratch.numbers)
    row_at = lambda b, h, nth: (b, h, blocks.row_at(spec, order, b, h, nth, plan.grid.tiles))
    group, groups = lax.axis_index(WARP_GROUP), tiles.num_warps // 4
    found = planes.planes_of(spec) if brought else ()
    elements = planes.Brought(spec, tiles, arrays.score_operands, found, brought)
    static = Static(spec, tiles, captured, arrays, elements, outputs, scratch, row_at)
    pl.when(group == groups)(lambda: _copy(static, plan))
    pl.when(group < groups)(lambda: _compute(static, plan, group))


class Static(NamedTuple):
    """What all warp groups know.

    Attributes:
      spec: The spec.
      tiles: The tiles.
      captured: Shapes of what the mods capture.
      arrays: The inputs.
      brought: What the copy engine brings beside keys and values.
      outputs: Out and lse.
      scratch: Shared memory and barriers.
      row_at: Batch, head and tile of queries, of a place in the order of work.
    """

    spec: AttentionSpec
    tiles: Tiles
    captured: scores.Captured
    arrays: Arrays
    brought: planes.Brought
    outputs: Any
    scratch: Scratch
    row_at: Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def _copy(static: Static, plan: schedule.Schedule) -> None:
    """The warp group that brings queries, keys and values, and takes tiles."""
    plg.set_max_registers(COPYING, action="decrease")
    scratch, spec, tiles = static.scratch, static.spec, static.tiles
    groups, rows = scratch.queries.shape[1:3]

    def tile(i: Any, place: Any, stage: Any) -> Any:
        b, h, row = here = static.row_at(*place)
        for group in range(groups):
            part, barrier = scratch.place(i, group)
            at = memory.rows_at(spec, b, h, row * tiles.block_q + group * rows, rows)
            filled = scratch.queries_filled.at[barrier]
            plg.copy_gmem_to_smem(static.arrays.query.at[at], scratch.queries.at[part, group], filled)
        return _copy_keys(static, here, stage)

    def following(i: Any) -> Any:
        for group in range(groups):
            barrier = scratch.queries_emptied.at[scratch.place(i, group)[1]]
            pl.when(i >= schedule.AHEAD)(functools.partial(plg.barrier_wait, barrier))
        return plan.take(i)

    count = plan.over_tiles(tile, following)
    if scratch.numbers is not None:
        for group in range(groups):  # which read that none is left
            plg.barrier_arrive(scratch.queries_filled.at[scratch.place(count, group)[1]])


def _copy_keys(static: Static, here: Any, stage: Any) -> Any:
    """Brings the keys and values that a tile of queries visits, and elements; returns the next free stage."""
    spec, arrays, ring = static.spec, static.arrays, static.scratch.ring
    b, h = (here[0] if spec.Bkv > 1 else 0), lax.div(here[1], jnp.int32(spec.group))
    at = lambda first: memory.rows_at(spec, b, h, first, static.tiles.block_kv)
    elements_at, q_first = static.brought.of_head(*here[:2]), here[2] * static.tiles.block_q

    def step(state: Any, first: Any, _: bool) -> Any:
        nth, before = state
        before = jnp.where(nth == stage, first, before)
        ring.fill(nth, arrays.key.at[at(first)], arrays.value.at[at(before)], *elements_at(q_first, first))
        return nth + 1, first

    end, last = blocks.over_keys(spec, static.tiles, arrays, here, (stage, jnp.int32(0)), step)
    pl.when(end > stage)(
        lambda: ring.fill(end, None, arrays.value.at[at(last)], *(None for _ in static.brought.planes))
    )
    return _after(stage, end)


def _after(stage: Any, end: Any) -> Any:
    """The stage after those of a tile of queries: one more than it visits tiles of keys, if any."""
    return jnp.where(end > stage, end + 1, stage)


def _compute(static: Static, plan: schedule.Schedule, group: Any) -> None:
    """A warp group that computes."""
    plg.set_max_registers(COMPUTING, action="increase")
    scratch = static.scratch
    has_turns = static.tiles.num_warps == 8 and forward_step.scarce(static.spec) is not forward_step.Scarce.NEITHER
    turns = Turns(group if has_turns else None)

    def following(i: Any) -> Any:
        plg.barrier_wait(scratch.queries_filled.at[scratch.place(i, group)[1]])
        return plan.number(i)

    pl.when(group == 1)(turns.end)  # the first turn is the other group's
    if scratch.numbers is not None:
        plg.barrier_wait(scratch.queries_filled.at[group])
    plan.over_tiles(functools.partial(_compute_tile, static, turns, group), following)
    plg.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(group == 0)(turns.take)


def _compute_tile(static: Static, turns: Turns, group: Any, i: Any, place: Any, stage: Any) -> Any:
    """The rows of a warp group of a tile of queries."""
    spec, tiles, scratch = static.spec, static.tiles, static.scratch
    (part, barrier), rows = scratch.place(i, group), scratch.queries.shape[2]
    b, h, row = here = static.row_at(*place)
    first, queries = row * tiles.block_q + group * rows, scratch.queries.at[part, group]
    known = scores.prepare(
        spec,
        static.arrays,
        static.captured,
        (rows, tiles.block_kv),
        b,
        h,
        q_first=first,
        may_end=spec.T % tiles.block_q != 0,
    )
    visits = blocks.count_keys(spec, tiles, static.arrays, here) > 0
    if scratch.numbers is None:
        plg.barrier_wait(scratch.queries_filled.at[barrier])
    else:
        pl.when(i > 0)(functools.partial(_free_last, scratch, i, group))
    pl.when(visits)(lambda: scratch.ring.wait(stage))
    start = forward_step.start(spec, rows, tiles.block_kv, static.arrays.query.dtype, stage)
    step = forward_step.Step(known, queries, scratch.ring, turns, pl.ds(group * rows, rows))
    state = blocks.over_keys(spec, tiles, static.arrays, here, start, step)
    found = forward_step.finish(scratch.ring, state, marks=may_hide(spec))
    pl.when(visits)(lambda: scratch.ring.release(state.stage))
    staged = (queries if scratch.out is None else scratch.out.at[group], scratch.lse.at[group])
    _store(spec, staged, found, static.outputs, (b, h, first))
    return _after(stage, state.stage)


def _free_last(scratch: Scratch, i: Any, group: Any) -> None:
    """Gives back the queries of the tile before, in whose place its output was, which the copy engine has read."""
    plg.wait_smem_to_gmem(0, wait_read_only=True)
    plg.barrier_arrive(scratch.queries_emptied.at[scratch.place(i - 1, group)[1]])


def _store(spec: AttentionSpec, staged: Any, found: Any, outputs: Any, place: Any) -> None:
    """Starts to write a group's rows: the copy engine drops what lies past the end."""
    (out_ref, lse_ref), (out, lse), (b, h, first) = outputs, found, place
    for ref, x in zip(staged, (out, lse), strict=True):
        ref[...] = x.astype(ref.dtype)
    plg.commit_smem()
    plg.copy_smem_to_gmem(staged[0], out_ref.at[memory.rows_at(spec, b, h, first, lse.shape[0])])
    plg.copy_smem_to_gmem(staged[1], lse_ref.at[b, h, pl.ds(first, lse.shape[0])])
