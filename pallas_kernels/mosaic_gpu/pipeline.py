"""Warp specialisation: rings of stages between producer and consumer warp groups, and ping-pong of two consumers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.types import Index, Ref, RegisterLayout

# Register budget of a thread, set by setmaxnreg: two consumer warp groups and one producer share 65536 registers.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
WARP_GROUP_THREADS = 128


class Ring(NamedTuple):
    """A ring of shared-memory stages: the producer fills them by TMA, the consumers read them in order."""

    tiles: tuple[Ref, ...]  # shared memory [stages, rows, size] of each array of which a stage holds a tile
    full: Ref  # an mbarrier for each stage: the TMA copies have arrived
    empty: Ref  # an mbarrier for each stage: all consumers are done

    @classmethod
    def declare(cls, stages: int, rows: int, sizes: tuple[int, ...], dtype: DTypeLike, readers: int) -> Ring:
        """Declares a ring for rows of these sizes; `readers` consumer warp groups release each stage."""
        return cls.from_tiles(tuple(smem.tiled((stages, rows, size), dtype) for size in sizes), readers)

    @classmethod
    def from_tiles(cls, tiles: tuple[Ref, ...], readers: int) -> Ring:
        """A ring of tiles that are already declared."""
        stages = tiles[0].shape[0]
        full = smem.declared(plg.Barrier(num_arrivals=len(tiles), num_barriers=stages))
        return cls(tiles, full, smem.declared(plg.Barrier(num_arrivals=readers, num_barriers=stages)))

    def slot(self, i: Index) -> jax.Array:
        """The slot of the ith tile in the ring."""
        return lax.rem(i, jnp.int32(self.tiles[0].shape[0]))

    def fill(self, i: Index, *sources: Ref | None) -> None:
        """Producer: waits until the slot of the ith tile is empty, and starts its TMA copies; None is not copied."""
        slot = self.slot(i)
        pl.when(i >= self.tiles[0].shape[0])(lambda: plg.barrier_wait(self.empty.at[slot]))
        for source, tiles in zip(sources, self.tiles, strict=True):
            if source is None:
                plg.barrier_arrive(self.full.at[slot])
            else:
                plg.copy_gmem_to_smem(source, tiles.at[slot], self.full.at[slot])

    def wait(self, i: Index) -> None:
        """Consumer: waits until the ith tile is there."""
        plg.barrier_wait(self.full.at[self.slot(i)])

    def stage(self, i: Index) -> tuple[Ref, ...]:
        """The arrays of the ith tile, which has been waited for."""
        slot = self.slot(i)
        return tuple(tiles.at[slot] for tiles in self.tiles)

    def release(self, i: Index) -> None:
        """Consumer: this warp group has read the ith tile."""
        plg.barrier_arrive(self.empty.at[self.slot(i)])


FIRST_FREE_BARRIER = 4  # named barrier; Mosaic GPU takes the lower ones


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
