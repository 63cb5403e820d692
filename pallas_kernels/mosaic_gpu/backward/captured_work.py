"""Work of the Hopper kernel for shared captured arrays: its CTAs, tiles and shared memory; see `captured`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.launch import NUM_SMS
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import is_heavy
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.program.broadcast_axes import BroadcastAxes
from pallas_kernels.program.cotangents import covers, stores
from pallas_kernels.program.ir import Node, reachable
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Ref

MAX_STAGES = 4  # of the stream; as many as fit
MAX_SPLITS = 16  # of a sum: each has an array of its own
STEPS_OF_A_CTA = 3  # which take as long as its start and its end: an estimate
MIN_SUMMED = 4  # tiles of scores that a sum has at least: with fewer a CTA would mostly start and end (an estimate)


class CapturedWork(NamedTuple):
    """The work of a launch."""

    axes: BroadcastAxes  # the axes of the sum: the batch, the heads, or both
    loads: tuple[Node, ...]  # the loads, which are constant along these axes
    tiles: Tiles
    splits: int  # CTAs that share a tile of scores

    @classmethod
    def from_group(
        cls, spec: AttentionSpec, tiles: Tiles, group: tuple[BroadcastAxes, tuple[Node, ...]]
    ) -> CapturedWork:
        """The work of a group of `LoadGroups.repeated`, with as many splits as make it shortest."""
        unsplit = cls(*group, tiles, 1)
        ctas, summed = math.prod(unsplit.grid(spec)), unsplit.summed(spec)
        steps = lambda n: -(-ctas * n // NUM_SMS) * (-(-summed // n) + STEPS_OF_A_CTA)
        return unsplit._replace(splits=min(range(1, min(summed, MAX_SPLITS) + 1), key=steps))

    def grid(self, spec: AttentionSpec) -> tuple[int, int, int, int, int]:
        """Splits, batch entries and heads that have a sum of their own, tiles of queries, tiles of keys."""
        return (
            self.splits,
            1 if self.axes.batch else spec.B,
            1 if self.axes.heads else spec.Hq,
            pl.cdiv(spec.T, self.tiles.block_q),
            pl.cdiv(spec.S, self.tiles.block_kv),
        )

    def summed(self, spec: AttentionSpec) -> int:
        """Tiles of scores in a sum."""
        return (spec.B if self.axes.batch else 1) * (spec.Hq if self.axes.heads else 1)

    def is_resident(self, bias: Sequence[bias_tiles.BiasLoad]) -> bool:
        """True if all terms of the sum have the same bias tiles."""
        walked = {name for name, is_walked in (("b", self.axes.batch), ("h", self.axes.heads)) if is_walked}
        return not any(n.op == "input" and n.value in walked for x in bias for n in reachable([x.load]))


class CapturedScratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    # ring of queries [block_q, D], dO [block_q, Dv], keys [block_kv, D], values [block_kv, Dv] and row statistics,
    # float32 [2, block_q]
    stream: Ring
    bias: Ring | None  # ring of bias tiles [block_q, block_kv], of one stage if they stay; None without
    d_query: Ref | None  # float32 [groups, rows, D], to stage dQ; None without


def supports(spec: AttentionSpec, group: tuple[BroadcastAxes, tuple[Node, ...]]) -> bool:
    """True if the kernel computes a group of `LoadGroups.repeated`: each term of the sum reads each element once.

    Not a table of distances, which is constant along diagonals, nor sums of few, nor an array that is read in part: no
    CTA would store zeros in the rest.
    """
    axes, loads = group
    summed = (spec.B if axes.batch else 1) * (spec.Hq if axes.heads else 1)
    if summed < MIN_SUMMED:
        return False

    def covers_array(load: Node) -> bool:
        is_pair_bias = bias_gradients.bias_load(spec, load) is not None and stores(spec, loads, load, axes)
        return is_pair_bias and covers(spec, load, spec.score_shapes[load.value])

    return not axes.diagonal and all(map(covers_array, loads))


def declare(spec: AttentionSpec, work: CapturedWork, dtype: DTypeLike, *, with_query: bool) -> CapturedScratch | None:
    """The scratch of a CTA; None if it does not fit."""
    tiles, groups = work.tiles, work.tiles.num_warps // 4
    rows = tiles.block_q // groups
    bias = bias_tiles.bias_loads(spec)

    def make(stages: int, bias_refs: tuple[Ref, ...]) -> CapturedScratch:
        stream = (
            smem.tiled((stages, tiles.block_q, spec.D), dtype),
            smem.tiled((stages, tiles.block_q, spec.Dv), dtype),
            smem.tiled((stages, tiles.block_kv, spec.D), dtype),
            smem.tiled((stages, tiles.block_kv, spec.Dv), dtype),
            smem.declared(plg.SMEM((stages, 2, tiles.block_q), jnp.float32)),
        )
        return CapturedScratch(
            Ring.from_tiles(stream, groups),
            Ring.from_tiles(bias_refs, groups) if bias_refs else None,
            smem.tiled((groups, rows, spec.D), jnp.float32) if with_query else None,
        )

    for with_bias in (True, False) if bias else (False,):
        for stages in range(tiles.num_stages, 1, -1):
            bias_stages = 1 if work.is_resident(bias) else stages
            scratch = make(stages, bias_tiles.declare(spec, tiles, bias_stages) if with_bias else ())
            if smem.bytes_of(jax.tree.leaves(scratch)) <= smem.LIMIT:
                return scratch
    return None


def tiles_for(spec: AttentionSpec) -> Tiles | None:
    """Tiles that divide the blocks of the mask; None if none does.

    A thread holds half a tile's columns of scores, of dP, and of each sum.
    """
    blocks = spec.block_size or (128, 128)
    if any(size % 64 for size in blocks):
        return None
    groups = 2 if blocks[0] % 128 == 0 else 1
    light = not is_heavy(spec.programs.score) and spec.dropout is None
    narrow = max(spec.D, spec.Dv) <= 64 and light and blocks[1] % 128 == 0
    return Tiles(64 * groups, 128 if narrow else 64, 4 * groups, MAX_STAGES)
