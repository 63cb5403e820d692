"""Shared memory of a CTA: swizzled layouts, declarations, and the barriers of warp specialisation.

Rings of stages pass tiles from producer to consumer warp groups; a ping-pong alternates two consumers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Axis, Index, Ref, RegisterLayout

LIMIT = 232448  # bytes that a CTA may have on Hopper: 227 KiB
BARRIER_BYTES = 8  # bytes
WARP_GROUP_ROWS = 64  # M of a wgmma


def swizzle_of(size: int, itemsize: int) -> int:
    """The widest swizzle, in bytes, that divides rows of this size.

    Rows are cut into tiles of 8 rows and so many bytes, and their 16-byte pieces are permuted, so that neither wgmma
    nor TMA has bank conflicts.

    >>> swizzle_of(128, 2), swizzle_of(96, 2), swizzle_of(80, 2)
    (128, 64, 32)
    """
    return next(s for s in (128, 64, 32) if size * itemsize % s == 0)


def rows_padded(size: int, itemsize: int) -> int:
    """The next head size that a swizzle divides.

    >>> rows_padded(80, 2), rows_padded(100, 2)
    (80, 112)
    """
    step = 32 // itemsize
    return -(-size // step) * step


def tiled(shape: tuple[int, ...], dtype: DTypeLike, swizzle: int | None = None) -> Ref:
    """Declares rows in the layout that TMA writes and wgmma reads, with the given swizzle or the widest."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle or swizzle_of(shape[-1], itemsize)
    return declared(plg.SMEM(shape, dtype, transforms=transforms(swizzle, itemsize)))


def transforms(swizzle: int, itemsize: int) -> tuple[plg.TilingTransform, plg.SwizzleTransform]:
    """Transforms of rows in swizzled tiles of 8."""
    return plg.TilingTransform((8, swizzle // itemsize)), plg.SwizzleTransform(swizzle)


def declared(x: pl.MemoryRef | plg.Barrier) -> Ref:
    """A declaration of scratch, with the type of the ref that a kernel gets."""
    return cast("Ref", x)


def load(ref: Ref, layout: RegisterLayout) -> jax.Array:
    """Loads an array of shared memory into registers."""
    load_: Any = plg.load  # jax < 0.11: wants an index
    return load_(ref, layout=layout)


def bytes_of(declared: Iterable[Ref]) -> int:
    """Bytes of declarations: arrays, aligned as Mosaic GPU aligns them, and barriers, which are packed.

    >>> bytes_of([tiled((2, 64, 128), jnp.bfloat16), plg.Barrier(num_barriers=3)])
    32792
    """
    total = 0
    for x in declared:
        if isinstance(x, plg.Barrier):
            count = x.num_barriers if isinstance(x.num_barriers, int) else math.prod(x.num_barriers)
            total += count * BARRIER_BYTES
        else:
            total += -(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) * 1024
    return total


def rows_at(spec: AttentionSpec, b: Index, h: Index, first: Index, count: int) -> tuple[Axis, ...]:
    """The index of rows of a head, in the layout of the spec."""
    rows = pl.ds(first, count)
    return (b, rows, h) if spec.layout == "BTNH" else (b, h, rows)


# Register budget of a thread, set by setmaxnreg: two consumer warp groups and one producer share 65536 registers.
REGISTERS = CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
WARP_GROUP_THREADS = 128


def modulo(i: Index, size: int) -> jax.Array:
    """The stage ``i % size``: for a power of two the low bits, without the repair of a sign."""
    return jnp.bitwise_and(i, jnp.int32(size - 1)) if size & (size - 1) == 0 else lax.rem(i, jnp.int32(size))


class Ring(NamedTuple):
    """A ring of shared-memory stages: the producer fills them by TMA, the consumers read them in order."""

    tiles: tuple[Ref, ...]  # shared memory [stages, rows, size] of each array of which a stage holds a tile
    full: Ref  # an mbarrier for each stage: the TMA copies have arrived
    empty: Ref  # an mbarrier for each stage: all consumers are done

    @classmethod
    def declare(cls, stages: int, rows: int, sizes: tuple[int, ...], dtype: DTypeLike, readers: int) -> Ring:
        """Declares a ring for rows of these sizes; `readers` consumer warp groups release each stage."""
        return cls.from_tiles(tuple(tiled((stages, rows, size), dtype) for size in sizes), readers)

    @classmethod
    def from_tiles(cls, tiles: tuple[Ref, ...], readers: int, copies: int = 1) -> Ring:
        """A ring of tiles that are already declared, each loaded by so many TMA copies."""
        stages = tiles[0].shape[0]
        full = declared(plg.Barrier(num_arrivals=len(tiles) * copies, num_barriers=stages))
        return cls(tiles, full, declared(plg.Barrier(num_arrivals=readers, num_barriers=stages)))

    def slot(self, i: Index) -> jax.Array:
        """The slot of the ith tile in the ring."""
        return lax.rem(i, jnp.int32(self.tiles[0].shape[0]))

    def fill(self, i: Index, *sources: Ref | None) -> None:
        """Producer: waits until the slot of the ith tile is empty, and starts its TMA copies; None is not copied."""
        slot = self.wait_until_empty(i)
        for source, tiles in zip(sources, self.tiles, strict=True):
            if source is None:
                plg.barrier_arrive(self.full.at[slot])
            else:
                plg.copy_gmem_to_smem(source, tiles.at[slot], self.full.at[slot])

    def wait_until_empty(self, i: Index) -> jax.Array:
        """Producer: waits until the slot of the ith tile is empty, and returns it."""
        slot = self.slot(i)
        pl.when(i >= self.tiles[0].shape[0])(lambda: plg.barrier_wait(self.empty.at[slot]))
        return slot

    def wait(self, i: Index) -> None:
        """Consumer: waits until the ith tile is there."""
        plg.barrier_wait(self.full.at[self.slot(i)])

    def pass_over(self, first: Index, end: Index) -> None:
        """Consumer: releases tiles that it does not read."""

        @pl.loop(first, end)
        def _(i: Index) -> None:
            self.wait(i)
            self.release(i)

    def stage(self, i: Index) -> tuple[Ref, ...]:
        """The arrays of the ith tile, which has been waited for."""
        slot = self.slot(i)
        return tuple(tiles.at[slot] for tiles in self.tiles)

    def release(self, i: Index) -> None:
        """Consumer: this warp group has read the ith tile."""
        plg.barrier_arrive(self.empty.at[self.slot(i)])


class BitRing(Ring):
    """A ring whose slots are low bits of the number of a tile, if the stages are a power of two.

    Causal texts of 128 tokens, B 32, 16 heads of 64, forward kernel, us, H200: 11.7 and so 11.2. Decoding spills 188
    bytes so, for 60 (D 256).
    """

    def slot(self, i: Index) -> jax.Array:
        """The slot of the ith tile in the ring."""
        return modulo(i, self.tiles[0].shape[0])


FIRST_FREE_BARRIER = 4  # named barrier; Mosaic GPU takes one for each warp group, from 1: three where two ping-pong


class PingPong(NamedTuple):
    """Ping-pong scheduling: two consumer warp groups alternate at the bottleneck.

    So the softmax of one overlaps the GEMMs of the other. Without it both tend to do the same at the same time (Shah et
    al. 2024, arXiv:2407.08608, section 3.1). Each group waits at a named barrier of its own, at which the other
    arrives. A single group needs none.
    """

    group: jax.Array | None  # index of this warp group; None if there is but one, or no ping-pong

    def acquire(self) -> None:
        """Waits until the other group releases the bottleneck."""
        if self.group is not None:
            inline_ptx.hardware_barrier("sync", FIRST_FREE_BARRIER + self.group, 2 * WARP_GROUP_THREADS)

    def release(self) -> None:
        """Lets the other group acquire the bottleneck."""
        if self.group is not None:
            inline_ptx.hardware_barrier("arrive", FIRST_FREE_BARRIER + 1 - self.group, 2 * WARP_GROUP_THREADS)

    def acquire_before(self, layout: RegisterLayout, x: jax.Array) -> jax.Array:
        """Acquires before all arithmetic on the returned array, which is `x`."""
        if self.group is None:
            return x
        return inline_ptx.after_barrier(FIRST_FREE_BARRIER + self.group, 2 * WARP_GROUP_THREADS, layout, x)

    def release_after(self, layout: RegisterLayout, x: jax.Array) -> jax.Array:
        """Releases after the arithmetic that led to `x`, which must not be negative; returns `x`."""
        if self.group is None:
            return x
        return inline_ptx.before_barrier(FIRST_FREE_BARRIER + 1 - self.group, 2 * WARP_GROUP_THREADS, layout, x)


class Turns(NamedTuple):
    """Turns of two consumer warp groups, each of which waits for the other to be done with the ith tile.

    A group may be one tile ahead, so each has a named barrier for even tiles and one for odd ones. A group without
    another waits for nothing.
    """

    first: int  # named barrier, the first of `BARRIERS`
    group: jax.Array | None  # index of this warp group; None if there is but one

    BARRIERS = 4

    def arrive(self, i: Index) -> None:
        """This group is done with the ith tile."""
        if self.group is not None:
            inline_ptx.hardware_barrier("arrive", self._barrier(self.group, i), 2 * WARP_GROUP_THREADS)

    def wait(self, i: Index) -> None:
        """Waits until the other group is done with the ith tile."""
        if self.group is not None:
            inline_ptx.hardware_barrier("sync", self._barrier(1 - self.group, i), 2 * WARP_GROUP_THREADS)

    def _barrier(self, group: jax.Array, i: Index) -> jax.Array:
        return self.first + 2 * group + modulo(i, 2)
