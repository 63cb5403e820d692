"""Forward kernel for Hopper.

A block of threads computes a tile of queries of one head. One warp group walks the listed blocks of keys and has the
copy engine bring keys and values into a ring; two others hold half of the queries each, and their weights, output and
running softmax, in registers (Shah et al. 2024, arXiv:2407.08608, algorithm 2). They take turns at what is scarce: the
tensor cores, or the exponentials (`forward_step`).

Several tiles for a block of threads, one after the other, lost: the loads of the next tile hide behind the end of one,
but the longest tiles of a causal mask last too long. H200, jax 0.11.2, bf16, S 16384, one and up to four tiles: causal
714 and 671 TFLOP/s at head size 128, 519 and 501 at 64; a window of 1024 keys 556 and 557, 368 and 388.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import blocks
from pallas_kernels.mosaic_gpu import forward_step, memory, padding, scores
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flat_operands, launch
from pallas_kernels.mosaic_gpu.pipeline import COMPUTING, COPYING, Ring, Turns
from pallas_kernels.setting import Arrays, Setting, Tiles


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
      queries: [groups, rows, D].
      queries_filled: A barrier a group.
      ring: A stage holds the keys of a tile and the values of the one before, which are multiplied in the same step.
      out: [groups, rows, Dv]; None if it takes the place of the queries.
      lse: [groups, rows].
    """

    queries: Any
    queries_filled: Any
    ring: Ring
    out: Any
    lse: Any


def declare(setting: Setting, tiles: Tiles, dtype: Any) -> Scratch:
    """What a block of threads needs."""
    groups = tiles.num_warps // 4
    rows = tiles.block_q // groups
    D, Dv = padding.head_sizes(setting, dtype)
    return Scratch(
        memory.tiled((groups, rows, D), dtype),
        plg.Barrier(num_barriers=groups),
        Ring.declare(tiles.num_stages, tiles.block_kv, (D, Dv), dtype, groups),
        None if Dv == D else memory.tiled((groups, rows, Dv), dtype),
        plg.SMEM((groups, rows), jnp.float32),
    )


def forward(setting: Setting, tiles: Tiles, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Computes out, in the layout and dtype of the query, and lse, float32 [B, Hq, T]."""
    order, (T, Dv) = blocks.row_order(setting, tiles, arrays), (setting.T, setting.Dv)
    setting, arrays = padding.padded(setting, arrays)
    rows = pl.cdiv(T, tiles.block_q)
    captured = scores.Captured(*(tuple(x.shape for x in group) for group in arrays[4:6]))
    out, lse = launch(
        functools.partial(_kernel, setting, tiles, captured),
        (flat_operands(arrays), order),
        [
            padding.like_rows(arrays.query, setting.Dv),
            jax.ShapeDtypeStruct((setting.B, setting.Hq, rows * tiles.block_q), jnp.float32),
        ],
        declare(setting, tiles, arrays.query.dtype),
        name="jflex_forward_sm90",
        grid=(setting.B, setting.Hq, rows),
        warp_groups=tiles.num_warps // 4 + 1,
    )
    return padding.cut_rows(setting, out, T, Dv), lse[..., :T]


def _kernel(
    setting: Setting, tiles: Tiles, captured: scores.Captured, place: Any, inputs: Any, outputs: Any, scratch: Scratch
) -> None:
    arrays, order = inputs
    b, h, nth = place
    here = (b, h, blocks.row_at(setting, order, b, h, nth, pl.cdiv(setting.T, tiles.block_q)))
    group, groups = lax.axis_index(WARP_GROUP), tiles.num_warps // 4
    pl.when(group == groups)(lambda: _copy(setting, tiles, arrays, here, scratch.ring))
    pl.when(group < groups)(lambda: _compute(setting, tiles, captured, arrays, here, outputs, scratch, group))


def _copy(setting: Setting, tiles: Tiles, arrays: Arrays, here: Any, ring: Ring) -> None:
    """The warp group that brings keys and values."""
    plg.set_max_registers(COPYING, action="decrease")
    b, h = (here[0] if setting.Bkv > 1 else 0), lax.div(here[1], jnp.int32(setting.group))
    at = lambda first: memory.rows_at(setting, b, h, first, tiles.block_kv)

    def step(state: Any, first: Any, _: bool) -> Any:
        stage, before = state
        before = jnp.where(stage == 0, first, before)
        ring.fill(stage, arrays.key.at[at(first)], arrays.value.at[at(before)])
        return stage + 1, first

    end, last = blocks.over_keys(setting, tiles, arrays, here, (jnp.int32(0), jnp.int32(0)), step)
    pl.when(end > 0)(lambda: ring.fill(end, None, arrays.value.at[at(last)]))


def _compute(
    setting: Setting,
    tiles: Tiles,
    captured: scores.Captured,
    arrays: Arrays,
    here: Any,
    outputs: Any,
    scratch: Scratch,
    group: Any,
) -> None:
    """A warp group that computes."""
    plg.set_max_registers(COMPUTING, action="increase")
    (b, h, row), rows = here, scratch.queries.shape[1]
    first = row * tiles.block_q + group * rows
    queries = scratch.queries.at[group]
    at = memory.rows_at(setting, b, h, first, rows)
    plg.copy_gmem_to_smem(arrays.query.at[at], queries, scratch.queries_filled.at[group])
    known = scores.prepare(
        setting,
        arrays,
        captured,
        (rows, tiles.block_kv),
        b,
        h,
        q_first=first,
        may_end=setting.T % tiles.block_q != 0,
    )
    turns = Turns(group if tiles.num_warps == 8 else None)
    plg.barrier_wait(scratch.queries_filled.at[group])
    pl.when(blocks.count_keys(setting, tiles, arrays, here) > 0)(lambda: scratch.ring.wait(jnp.int32(0)))
    pl.when(group == 1)(turns.end)  # the first turn is the other group's
    start = forward_step.start(rows, tiles.block_kv, setting.Dv, arrays.query.dtype)
    step = forward_step.Step(known, queries, scratch.ring, turns)
    state = blocks.over_keys(setting, tiles, arrays, here, start, step)
    pl.when(group == 0)(turns.take)
    _store(scratch, group, forward_step.finish(scratch.ring, state), outputs, (b, h, first), at)


def _store(scratch: Scratch, group: Any, found: Any, outputs: Any, place: Any, at: Any) -> None:
    """Writes a group's rows: the copy engine drops what lies past the end."""
    out_ref, lse_ref = outputs
    (out, lse), (b, h, first) = found, place
    staged = (scratch.queries if scratch.out is None else scratch.out).at[group]  # its queries have been read
    staged[...] = out.astype(staged.dtype)
    scratch.lse.at[group][...] = lse
    plg.commit_smem()
    plg.copy_smem_to_gmem(staged, out_ref.at[at])
    plg.copy_smem_to_gmem(scratch.lse.at[group], lse_ref.at[b, h, pl.ds(first, lse.shape[0])])
    plg.wait_smem_to_gmem(0, wait_read_only=True)
