"""Forward kernel for Hopper.

A block of threads computes a tile of queries of one head. One warp group walks the listed blocks of keys and has the
copy engine bring keys and values into rings; two others hold half of the queries each, and their weights, output and
running softmax, in registers (Shah et al. 2024, arXiv:2407.08608, algorithm 2). They take turns: while the products of
one run, the other computes exponentials.

In a step a group starts the products of queries and keys, and behind them those of the weights and values of the step
before. On an H200 (jax 0.11.2, bf16, S 16384, B 2, H 16, head size 128) that reaches 705 TFLOP/s causal and 724 without
a mask; the values of the same tile, whose products begin when the weights are there, 672 and 654; the values of the
step before, awaited only after the softmax, 685 and 696. At head size 64 (B 4) the three reach 438 and 448, 448 and
459, 422 and 459. There the exponentials take as long as the products (one for each score at 16 a cycle and
multiprocessor), and what is reached is about what both would take one after the other; why they do not overlap more is
not known.
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
from pallas_kernels.mosaic_gpu import inline, memory, padding, scores
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flat_operands, launch
from pallas_kernels.mosaic_gpu.pipeline import COMPUTING, COPYING, Ring, Turns
from pallas_kernels.mosaic_gpu.tile import ROW, TILE
from pallas_kernels.setting import LN_2, Arrays, Setting, Tiles


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
      queries: [groups, rows, D].
      out: [groups, rows, Dv].
      lse: [groups, rows].
      queries_filled: A barrier a group.
      keys: Ring of keys.
      values: Ring of values.
    """

    queries: Any
    out: Any
    lse: Any
    queries_filled: Any
    keys: Ring
    values: Ring


class State(NamedTuple):
    """Of the rows of a warp group, after some of the keys.

    Attributes:
      out: Sums of weights times values, but for the last tile's.
      top: The largest score so far, in base 2.
      total: Sum of the weights.
      p: Weights of the last tile, in the dtype of the values.
      count: Tiles so far.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array
    p: jax.Array
    count: jax.Array


def declare(setting: Setting, tiles: Tiles, dtype: Any) -> Scratch:
    """What a block of threads needs."""
    groups = tiles.num_warps // 4
    rows = tiles.block_q // groups
    D, Dv = padding.head_sizes(setting, dtype)
    return Scratch(
        memory.tiled((groups, rows, D), dtype),
        None if Dv == D else memory.tiled((groups, rows, Dv), dtype),
        plg.SMEM((groups, rows), jnp.float32),
        plg.Barrier(num_barriers=groups),
        Ring.declare(tiles.num_stages, tiles.block_kv, D, dtype, groups),
        Ring.declare(tiles.num_stages, tiles.block_kv, Dv, dtype, groups),
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
    pl.when(group == groups)(lambda: _copy(setting, tiles, arrays, here, scratch))
    pl.when(group < groups)(lambda: _compute(setting, tiles, captured, arrays, here, outputs, scratch, group))


def _copy(setting: Setting, tiles: Tiles, arrays: Arrays, here: Any, scratch: Scratch) -> None:
    """The warp group that brings keys and values."""
    plg.set_max_registers(COPYING, action="decrease")
    b, h = (here[0] if setting.Bkv > 1 else 0), lax.div(here[1], jnp.int32(setting.group))

    def step(count: Any, first: Any, _: bool) -> Any:
        at = memory.rows_at(setting, b, h, first, tiles.block_kv)
        scratch.keys.fill(count, arrays.key.at[at])
        scratch.values.fill(count, arrays.value.at[at])
        return count + 1

    blocks.over_keys(setting, tiles, arrays, here, jnp.int32(0), step)


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
    b, h, row = here
    rows = tiles.block_q // (tiles.num_warps // 4)
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
    turns, count = Turns(group if tiles.num_warps == 8 else None), blocks.count_keys(setting, tiles, arrays, here)
    step = functools.partial(_step, setting, known, scratch, queries, turns)
    plg.barrier_wait(scratch.queries_filled.at[group])
    pl.when(group == 1)(turns.end)  # the first turn is the other group's
    start = _start(rows, tiles.block_kv, setting.Dv, arrays.query.dtype)
    state = blocks.over_keys(setting, tiles, arrays, here, start, step)
    pl.when(group == 0)(turns.take)
    found = _finish(_last_values(scratch, state, count), state)
    _store(scratch, group, found, outputs, (b, h, first), at)


def _start(rows: int, keys: int, size: int, dtype: Any) -> State:
    row = lambda value: plg.layout_cast(jnp.full((rows,), value, jnp.float32), ROW)
    tile = lambda width, dtype: plg.layout_cast(jnp.zeros((rows, width), dtype), TILE)
    return State(tile(size, jnp.float32), row(-jnp.inf), row(0.0), tile(keys, dtype), jnp.int32(0))


def _step(
    setting: Setting,
    known: scores.Scores,
    scratch: Scratch,
    queries: Any,
    turns: Turns,
    state: State,
    first: Any,
    is_partial: bool,
) -> State:
    """Takes in a tile of keys, and the values of the one before.

    Both products are started together: the tensor cores go from one to the other without a pause. Of the first tile,
    nothing came before: its own values are multiplied by weights of zero.
    """
    nth, last = state.count, jnp.maximum(state.count - 1, 0)
    scratch.keys.wait(nth)
    turns.take()

    def products(sums: Any, raw: Any) -> jax.Array:
        plg.wgmma(raw, queries, scratch.keys.tile(nth).T)
        pl.when(nth != 1)(lambda: scratch.values.wait(last))
        plg.wgmma(sums, state.p, scratch.values.tile(last))
        turns.end()
        found = plg.wgmma_accumulator_load(raw, wait_n=1)
        scratch.keys.release(nth)
        return found

    def start(refs: Any) -> None:
        refs[1][...] = pl.run_scoped(
            functools.partial(products, refs[0]), plg.WGMMAAccumulatorRef(known.tile, jnp.float32)
        )

    nothing = plg.layout_cast(jnp.zeros(known.tile, jnp.float32), TILE)
    out: Any
    out, raw = pl.run_state(start)((plg.WGMMAAccumulatorRef.init(state.out), nothing))
    pl.when(nth > 0)(lambda: scratch.values.release(last))
    tile = scores.modify(known, raw, first, is_partial)
    p, keep, top = _weights(known, tile.s, state.top, setting.mask is not None or setting.score is not None)
    total = state.total * keep + jnp.sum(p, axis=1)
    return State(out * _over_columns(keep, out.shape), top, total, p.astype(state.p.dtype), nth + 1)


def _last_values(scratch: Scratch, state: State, count: Any) -> jax.Array:
    """The output with the values of the last of `count` tiles."""
    last = jnp.maximum(count - 1, 0)
    pl.when(count > 1)(lambda: scratch.values.wait(last))
    add: Any = pl.run_state(lambda ref: plg.wgmma(ref, state.p, scratch.values.tile(last)))
    return add(plg.WGMMAAccumulatorRef.init(state.out))


def _weights(known: scores.Scores, s: jax.Array, top: jax.Array, may_hide: bool) -> tuple[jax.Array, ...]:
    """The weights of a tile, what to keep of those before, and the largest score so far."""
    new = jnp.maximum(top, jnp.max(s, axis=1) * known.unit)
    shift = jnp.where(new == -jnp.inf, 0.0, new) if may_hide else new
    p = inline.exp2(TILE, s * known.unit - _over_columns(shift, s.shape))
    return p, inline.exp2(ROW, top - shift), new


def _over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def _finish(out: jax.Array, state: State) -> tuple[jax.Array, jax.Array]:
    """Output and lse (natural log); zeros and -inf for rows that have seen nothing."""
    empty = state.total == 0.0
    total = jnp.where(empty, 1.0, state.total)
    lse = jnp.where(empty, -jnp.inf, state.top * LN_2 + jnp.log(total))
    out = jnp.where(_over_columns(empty, out.shape), 0.0, out)  # where no tile is visited, values were never filled
    return out * _over_columns(1.0 / total, out.shape), lse


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
