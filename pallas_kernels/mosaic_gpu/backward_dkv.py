"""Backward kernel for dK and dV on Hopper, and for the captured arrays that are read by key.

A block of threads owns a tile of keys of one key head. One warp group has the copy engine bring queries, cotangents of
the output, and the statistics of their rows, over the tiles of queries of all query heads that share the keys; two
others hold 64 keys each, and sums for dK and dV in registers. Scores are held transposed, (keys, queries): then P^T and
dS^T are operands of the products as they lie in registers.
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
from pallas_kernels.cotangents import LoadGroups
from pallas_kernels.gradients import Rows, through_mod
from pallas_kernels.mods import Derivative
from pallas_kernels.mosaic_gpu import inline, memory, scores
from pallas_kernels.mosaic_gpu.backward_stream import DELTA, SHIFT, Given, Static, Stream, give, load_vector, store_sums
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flat_operands, launch
from pallas_kernels.mosaic_gpu.pipeline import COMPUTING, COPYING
from pallas_kernels.mosaic_gpu.tile import COLUMN, ROW, TILE
from pallas_kernels.setting import Arrays, Setting, Tiles


class FoundByColumns(NamedTuple):
    """dK and dV for each batch entry; cotangents [B, Hq, S] of ``groups.columns``."""

    key: jax.Array
    value: jax.Array
    columns: list[jax.Array]


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
      keys: [groups, rows, D].
      values: [groups, rows, Dv].
      sums: float32 [groups, rows], to store cotangents of loads by key.
      filled: A barrier a group, for keys and values.
      stream: What is walked.
    """

    keys: Any
    values: Any
    sums: Any
    filled: Any
    stream: Stream


def declare(setting: Setting, tiles: Tiles, dtype: Any) -> Scratch:
    """What a block of threads needs."""
    groups = tiles.num_warps // 4
    rows = tiles.block_kv // groups
    return Scratch(
        memory.tiled((groups, rows, setting.D), dtype),
        memory.tiled((groups, rows, setting.Dv), dtype),
        plg.SMEM((groups, rows), jnp.float32),
        plg.Barrier(num_arrivals=2, num_barriers=groups),
        Stream.declare(setting, tiles.block_q, tiles.num_stages, dtype, groups),
    )


def dkv(
    setting: Setting, tiles: Tiles, arrays: Arrays, rows: Rows, derivative: Derivative | None, groups: LoadGroups
) -> FoundByColumns:
    """Computes dK and dV in the layout of the key; of each batch entry, where the batch shares them."""
    static = Static.of(setting, tiles, arrays, derivative, groups)
    columns = pl.cdiv(setting.S, tiles.block_kv)
    per_column = jax.ShapeDtypeStruct((setting.B, setting.Hq, columns * tiles.block_kv), jnp.float32)
    d_key, d_value, *sums = launch(
        functools.partial(_kernel, static),
        (flat_operands(arrays), blocks.column_order(setting, tiles, arrays), give(rows, tiles.block_q)),
        [
            *(jax.ShapeDtypeStruct((setting.B, *x.shape[1:]), x.dtype) for x in (arrays.key, arrays.value)),
            *(per_column for _ in groups.columns),
        ],
        declare(setting, tiles, arrays.key.dtype),
        name="jflex_backward_dkv_sm90",
        grid=(setting.B, setting.Hkv, columns),
        warp_groups=static.warp_groups + 1,
    )
    return FoundByColumns(d_key, d_value, [x[..., : setting.S] for x in sums])


def _kernel(static: Static, place: Any, inputs: Any, outputs: Any, scratch: Scratch) -> None:
    arrays, order, given = inputs
    b, kv_h, nth = place
    here = (b, kv_h, blocks.column_at(static.setting, order, b, kv_h, nth))
    group = lax.axis_index(WARP_GROUP)
    compute = functools.partial(_compute, static, arrays, here, outputs, scratch, group)
    pl.when(group == static.warp_groups)(lambda: _copy(static, arrays, given, here, scratch))
    pl.when(group < static.warp_groups)(compute)


def _copy(static: Static, arrays: Arrays, given: Given, here: Any, scratch: Scratch) -> None:
    """The warp group that brings tiles of queries."""
    plg.set_max_registers(COPYING, action="decrease")
    b = here[0]

    def one_head(h: Any, count: Any) -> Any:
        def step(count: Any, first: Any, _: bool) -> Any:
            scratch.stream.fill(static.setting, count, arrays, given, (b, h, first))
            return count + 1

        return blocks.over_queries(static.setting, static.tiles, arrays, (b, h, here[2]), count, step)

    _over_heads(static.setting, here[1], jnp.int32(0), one_head)


def _over_heads(setting: Setting, kv_h: Any, state: Any, one_head: Any) -> Any:
    """Folds over the query heads that share a key head."""
    if setting.group == 1:
        return one_head(kv_h, state)
    return lax.fori_loop(0, setting.group, lambda i, state: one_head(kv_h * setting.group + i, state), state)


def _compute(static: Static, arrays: Arrays, here: Any, outputs: Any, scratch: Scratch, group: Any) -> None:
    """A warp group that computes."""
    plg.set_max_registers(COMPUTING, action="increase")
    setting, rows = static.setting, static.tiles.block_kv // static.warp_groups
    b, kv_h, column = here
    first = column * static.tiles.block_kv + group * rows
    own = (scratch.keys.at[group], scratch.values.at[group])
    at = memory.rows_at(setting, b if setting.Bkv > 1 else 0, kv_h, first, rows)
    for source, ref in zip((arrays.key, arrays.value), own, strict=True):
        plg.copy_gmem_to_smem(source.at[at], ref, scratch.filled.at[group])
    plg.barrier_wait(scratch.filled.at[group])

    def walk(d_key: Any, d_value: Any) -> tuple[jax.Array, jax.Array]:
        def one_head(h: Any, count: Any) -> Any:
            head = _Head(static, scratch.stream, own, (d_key, d_value))
            sums = tuple(plg.layout_cast(jnp.zeros((rows,), jnp.float32), ROW) for _ in static.groups.columns)
            step = head.step(arrays, b, h, first)
            count, sums = blocks.over_queries(setting, static.tiles, arrays, (b, h, column), (count, sums), step)
            for ref, x in zip(outputs[2:], sums, strict=True):
                store_sums(scratch.sums.at[group], ref.at[b, h, pl.ds(first, rows)], x)
            return count

        _over_heads(setting, kv_h, jnp.int32(0), one_head)
        return d_key[...] * setting.scale, d_value[...]

    found = pl.run_scoped(walk, *(plg.ACC((rows, size), jnp.float32) for size in (setting.D, setting.Dv)))
    at = memory.rows_at(setting, b, kv_h, first, rows)
    for ref, x in zip(own, found, strict=True):
        ref[...] = x.astype(ref.dtype)
    plg.commit_smem()
    for ref, out in zip(own, outputs[:2], strict=True):
        plg.copy_smem_to_gmem(ref, out.at[at])
    plg.wait_smem_to_gmem(0, wait_read_only=True)


class _Head(NamedTuple):
    """What a warp group needs on the way over the queries of one head.

    Attributes:
      static: Statics.
      stream: What is walked.
      own: Its keys and values.
      sums: Accumulators of dK and dV.
    """

    static: Static
    stream: Stream
    own: tuple[Any, Any]
    sums: tuple[Any, Any]

    def step(self, arrays: Arrays, b: Any, h: Any, first: Any) -> Any:
        """The step over a tile of queries; the state is how many came before, and cotangents of loads by key."""
        static, setting = self.static, self.static.setting
        known = scores.prepare(
            setting,
            arrays,
            static.captured,
            (static.tiles.block_q, self.own[0].shape[0]),
            b,
            h,
            k_first=first,
            may_end=setting.S % static.tiles.block_kv != 0,
            nodes=static.nodes,
        )

        def step(state: Any, query: Any, is_partial: bool) -> Any:
            count, sums = state
            acc = plg.ACC(known.tile[::-1], jnp.float32)
            d_s, more = pl.run_scoped(functools.partial(self._tile, known, count, query, is_partial), acc, acc)
            sums = tuple(x + y for x, y in zip(sums, more, strict=True))
            plg.wgmma(self.sums[0], d_s.astype(self.own[0].dtype), self._at(self.stream.queries, count))
            plg.wgmma_wait(1)  # that for dV is done
            self.stream.d_out.release(count)
            plg.wgmma_wait(0)
            self.stream.queries.release(count)
            return count + 1, sums

        return step

    def _at(self, ring: Any, count: Any) -> Any:
        return ring.tiles.at[ring.slot(count)]

    def _tile(
        self, known: scores.Scores, count: Any, query: Any, is_partial: bool, raw: Any, d_weights: Any
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Cotangents of the scores of a tile, and those of loads by key; on the way, starts to add to dV."""
        keys, values = self.own
        plg.wgmma(raw, keys, self.stream.queries.wait(count).T)
        d_out = self.stream.d_out.wait(count)
        plg.wgmma(d_weights, values, d_out.T)
        statistics = self.stream.statistics.wait(count)
        over_rows = lambda which: lax.broadcast_in_dim(
            load_vector(statistics.at[which], COLUMN), known.tile[::-1], (1,)
        )
        tile = scores.modify(known, plg.wgmma_accumulator_load(raw, wait_n=1), query, is_partial)
        p = inline.weights(TILE, tile.s, known.unit, over_rows(SHIFT))
        d_p = plg.wgmma_accumulator_load(d_weights, wait_n=0)
        plg.wgmma(self.sums[1], p.astype(d_out.dtype), d_out)
        d_s = p * (d_p - over_rows(DELTA))
        self.stream.statistics.release(count)
        d_s, of_load = through_mod(self.static.derivative, tile, d_s)
        return d_s, tuple(jnp.sum(of_load(load), axis=1) for load in self.static.groups.columns)
