"""dQ in the kernel for dK and dV: accumulated in global memory by TMA reductions (add), tile by tile.

The consumer warp groups of a CTA put dS^T of their keys into shared memory. Each then computes a part of dQ = dS K over
all keys of the CTA, for some of the queries or some of the columns, and adds it by TMA, in float32, to the sums of the
CTAs of other keys. The order of these additions is not fixed, so dQ may differ in its last bits between runs.

The dQ GEMM of a tile is issued when the dS of the next tile is known, so no group waits for the other as long as it is
less than a tile ahead, and the dK GEMM runs while dQ is stored. Before the first tile there is one whose dQ is dropped.

Where dK and dV have more than 256 columns, registers are tight (`is_tight`): S^T becomes P before dP^T is computed, dS
takes P in 16 bits, as the dV GEMM does, and the dK GEMM reads dS^T from shared memory. Threads add dQ themselves. So a
thread holds at most 208 numbers during a GEMM; with 16 more, ptxas serializes wgmma instructions. H200, jax 0.11.2,
bf16, B 2, H 16, S 16384, D 192, Dv 128, backward, us, in two kernels and so: causal 15640 and 12088, no mask 32630 and
24434; with softcap, which spills 332 bytes, 19495 and 15806.

The groups meet at named barriers. At mbarriers, where all threads arrive one by one, the kernel took 1.04 to 1.07 times
as long under masks (H200, jax 0.11.2, bf16, S 16384 and 8192, head sizes 64 and 128).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import inline_ptx, register_order, smem
from pallas_kernels.mosaic_gpu.score.tile import TILE, accumulator
from pallas_kernels.mosaic_gpu.smem import FIRST_FREE_BARRIER, WARP_GROUP_ROWS, WARP_GROUP_THREADS, Turns
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Accumulator, Index, Ref

PAST_THE_END = 2**30  # the first query of a tile whose dQ is not added
D_SCORES_STAGES = 2  # double buffer of dS: one tile is read while the next is written


class TileIndex(NamedTuple):
    """Index of a tile of queries: query head and first query."""

    h: Index
    first: Index


class DqAccumulator(NamedTuple):
    """Shared memory and barriers for dQ."""

    d_scores: Ref  # [groups, stages, keys of a group, queries]: dS^T
    # float32 [groups, parts, *register_order.shape]: the dQ of a group, for TMA; columns of both groups are one part.
    # None where registers are tight: threads add it themselves
    staged: Ref | None

    @classmethod
    def declare(cls, spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike) -> DqAccumulator:
        """Declares the scratch of dQ."""
        groups, columns, width = tiles.num_warps // 4, _columns(spec, tiles), _width(spec, tiles)
        swizzle, staged = key_swizzle(spec, tiles), (groups, columns // width, *register_order.shape(width))
        return cls(
            smem.tiled((groups, D_SCORES_STAGES, tiles.block_kv // groups, tiles.block_q), dtype, swizzle),
            None if is_tight(spec) else smem.declared(plg.SMEM(staged, jnp.float32)),
        )

    def begin(self, i: Index, group: jax.Array, *, is_first: bool | jax.Array) -> None:
        """Prologue before the ith tile, of first or later keys: the dS of the tile before it is never added to dQ."""
        self._written(group).arrive(i - 1 + D_SCORES_STAGES)
        pl.when(is_first)(lambda: self._read(group).arrive(0))

    def write(self, i: Index, group: jax.Array, d_s: jax.Array) -> None:
        """Writes the ith tile of dS^T of a group, once all groups have read the one in its stage."""
        self._read(group).wait(i)
        self.tile(i, group)[...] = plg.layout_cast(d_s, TILE)

    def commit(self, i: Index, group: jax.Array) -> None:
        """Makes the ith tile of dS, which this group has written, visible to all groups."""
        plg.commit_smem()
        self._written(group).arrive(i + D_SCORES_STAGES)

    def _written(self, group: jax.Array) -> Turns:
        """Turns of groups that have written a tile, numbered from -`D_SCORES_STAGES` on."""
        return Turns(FIRST_FREE_BARRIER, group if self.d_scores.shape[0] > 1 else None)

    def _read(self, group: jax.Array) -> Turns:
        """Turns of groups that have read the tile before the last, so that the next may take its place."""
        return Turns(FIRST_FREE_BARRIER + Turns.BARRIERS, group if self.d_scores.shape[0] > 1 else None)

    def tile(self, i: Index, group: Index, zero: Index = 0) -> Ref:
        """The ith tile of dS^T of a group; `zero` is added to the stage (`inline_ptx.unknown_zero`)."""
        return self.d_scores.at[group, smem.modulo(i, D_SCORES_STAGES) + zero]

    def gemm_accumulator(self, out: Ref) -> plg.WGMMAAccumulatorRef:
        """The accumulator of `start_gemm`, for `out` in global memory."""
        return accumulator(WARP_GROUP_ROWS, self._parts(out) * _part_width(out))

    def start_gemm(self, acc: Accumulator, i: Index, group: jax.Array, keys: Ref, zero: Index = 0) -> None:
        """Issues a group's part of the dQ GEMM of the ith tile; `keys` are the keys of all groups.

        `zero` is added to indices of shared memory; see `inline_ptx.unknown_zero`.
        """
        self._written(group).wait(i + D_SCORES_STAGES)
        part = pl.ds(group * WARP_GROUP_ROWS, WARP_GROUP_ROWS)
        for other in range(keys.shape[0]):
            d_s, k = self.tile(i, other, zero), keys.at[other + zero]
            if self._splits_queries:
                d_s = d_s.at[:, part]
            else:
                k = k.at[:, pl.ds(group * (k.shape[1] - acc.shape[1]), acc.shape[1])]
            plg.wgmma(acc, d_s.T, k)

    def add(
        self, out: Ref, group: jax.Array, b: Index, tile: TileIndex, i: Index, x: jax.Array, *, is_last: bool = False
    ) -> None:
        """Adds a group's part of the ith tile to dQ in global memory, of `sums_shape`, unless `tile` is past its end.

        The next tile of dS, if any, becomes visible too: two fences took 1.06 times as long (H200, D 128, causal).
        """
        if not is_last:
            self._read(group).arrive(i + D_SCORES_STAGES)
        parts, width = self._parts(out), _part_width(out)
        columns = [x[:, part * width : (part + 1) * width] for part in range(parts)]
        row, column = (group, 0) if self._splits_queries else (0, group * (out.shape[3] - parts))
        row += lax.div(tile.first, jnp.int32(WARP_GROUP_ROWS))
        if self.staged is not None:
            plg.wait_smem_to_gmem(0, wait_read_only=True)
            for part in range(parts):
                register_order.store(self.staged.at[group, part], columns[part])
            plg.commit_smem() if is_last else self.commit(i + 1, group)
        for part in range(parts):
            target = out.at[b, tile.h, jnp.minimum(row, out.shape[2] - 1), column + part]
            adds = row < out.shape[2]  # a block of a mask may have tiles past the end
            if part == 0 and self._column_groups * parts > out.shape[3]:  # the second group's first is the first's last
                adds = jnp.logical_and(adds, group == 0)
            if self.staged is None:
                register_order.add(target, columns[part], adds)
            else:
                plg.copy_smem_to_gmem(self.staged.at[group, part], target, adds, reduction_op="add")

    def join(self) -> None:
        """Waits until all groups have arrived here."""
        barrier = jnp.int32(FIRST_FREE_BARRIER + 2 * Turns.BARRIERS)
        inline_ptx.hardware_barrier("sync", barrier, self.d_scores.shape[0] * WARP_GROUP_THREADS)

    def _parts(self, out: Ref) -> int:
        """Parts of a group; `out` has the parts of all columns."""
        return pl.cdiv(out.shape[3], self._column_groups)

    @property
    def _column_groups(self) -> int:
        """Groups that split the columns."""
        return 1 if self._splits_queries else self.d_scores.shape[0]

    @property
    def _splits_queries(self) -> bool:
        return self.d_scores.shape[3] == self.d_scores.shape[0] * WARP_GROUP_ROWS


def _by_queries(tiles: Tiles) -> bool:
    """True if the groups split dQ by queries, 64 each; else by columns."""
    return tiles.block_q == tiles.num_warps // 4 * WARP_GROUP_ROWS


def _part_width(out: Ref) -> int:
    """Columns of a part of dQ in global memory."""
    return out.shape[4] * out.shape[5] // WARP_GROUP_ROWS


def is_tight(spec: AttentionSpec) -> bool:
    """True if beside dK and dV of 64 keys, registers do not hold S^T and dP^T at once."""
    return spec.D + spec.Dv > 256


def key_swizzle(spec: AttentionSpec, tiles: Tiles) -> int:
    """The swizzle of dS, keys and queries: a wgmma with both operands in shared memory needs both alike.

    If one divides the columns of each group, the widest such. H200, jax 0.11.2, bf16, B 2, H 16, S 16384, D 96, us, 64
    bytes, with which each group computes 64 columns, and 32: causal 7009 and 6706, no mask, two readings, 13870, 14605
    and 13126, 14373.
    """
    swizzles = (s for s in (128, 64, 32) if spec.D * 2 % (s * tiles.num_warps // 4) == 0)
    widest = smem.swizzle_of(spec.D, 2)
    return widest if _by_queries(tiles) or spec.D <= 64 else next(swizzles, widest)


def _columns(spec: AttentionSpec, tiles: Tiles) -> int:
    """Columns of dQ that a group computes: whole swizzled tiles, so that some may be computed twice."""
    groups, tile = tiles.num_warps // 4, key_swizzle(spec, tiles) // 2
    return spec.D if _by_queries(tiles) else -(-spec.D // (groups * tile)) * tile


def _width(spec: AttentionSpec, tiles: Tiles) -> int:
    """Columns of a part of dQ."""
    groups, columns, tile = tiles.num_warps // 4, _columns(spec, tiles), key_swizzle(spec, tiles) // 2
    return columns if groups * columns in (spec.D, groups * spec.D) else tile


def sums_shape(spec: AttentionSpec, tiles: Tiles) -> tuple[int, ...]:
    """The shape of dQ in global memory: batch, heads, tiles of 64 rows, parts, and a part (`register_order.shape`)."""
    width, rows = _width(spec, tiles), pl.cdiv(spec.T, tiles.block_q) * tiles.block_q
    return (spec.B, spec.Hq, rows // WARP_GROUP_ROWS, spec.D // width, *register_order.shape(width))


def fits(spec: AttentionSpec, tiles: Tiles) -> bool:
    """True if the consumers of a CTA can split dQ: by 64 queries, or by columns, of which no group has all."""
    return _by_queries(tiles) or (tiles.block_q == WARP_GROUP_ROWS and _columns(spec, tiles) < spec.D)
