"""How warp groups hand tiles to each other, by rings in shared memory, and take turns at what is scarce."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu import smem as memory

# Registers of a thread after the roles part: 65536 are shared by two groups that compute and one that copies.
COMPUTING, COPYING = 240, 24
WARP_GROUP_THREADS = 128


class Ring(NamedTuple):
    """Tiles that one warp group fills by the copy engine and others read, in order, again and again.

    Attributes:
      tiles: Shared memory [stages, rows, size] of each array of which a stage holds a tile.
      filled: A barrier a stage: the copies have arrived.
      emptied: A barrier a stage: all readers are done.
    """

    tiles: tuple[Any, ...]
    filled: Any
    emptied: Any

    @classmethod
    def declare(cls, stages: int, rows: int, sizes: tuple[int, ...], dtype: Any, readers: int) -> Ring:
        """What to allocate for rows of these sizes."""
        return cls.of(tuple(memory.tiled((stages, rows, size), dtype) for size in sizes), readers)

    @classmethod
    def of(cls, tiles: tuple[Any, ...], readers: int) -> Ring:
        """The same for tiles that are declared."""
        stages = tiles[0].shape[0]
        filled = plg.Barrier(num_arrivals=len(tiles), num_barriers=stages)
        return cls(tiles, filled, plg.Barrier(num_arrivals=readers, num_barriers=stages))

    def slot(self, nth: Any) -> Any:
        """Where the nth stage lies."""
        return lax.rem(nth, jnp.int32(self.tiles[0].shape[0]))

    def fill(self, nth: Any, *sources: Any) -> None:
        """Starts to copy the nth stage, once the one that lies there has been read; None is not copied."""
        slot = self.slot(nth)
        pl.when(nth >= self.tiles[0].shape[0])(lambda: plg.barrier_wait(self.emptied.at[slot]))
        for source, tiles in zip(sources, self.tiles, strict=True):
            if source is None:
                plg.barrier_arrive(self.filled.at[slot])
            else:
                plg.copy_gmem_to_smem(source, tiles.at[slot], self.filled.at[slot])

    def wait(self, nth: Any) -> None:
        """Waits for the nth stage."""
        plg.barrier_wait(self.filled.at[self.slot(nth)])

    def stage(self, nth: Any) -> tuple[Any, ...]:
        """The tiles of the nth stage, which has been waited for."""
        slot = self.slot(nth)
        return tuple(tiles.at[slot] for tiles in self.tiles)

    def release(self, nth: Any) -> None:
        """Says that this warp group has read the nth stage."""
        plg.barrier_arrive(self.emptied.at[self.slot(nth)])


FIRST_FREE_BARRIER = 4  # Mosaic GPU takes the lower ones


class Turns(NamedTuple):
    """Two warp groups take turns at what is scarce, so that one does something else meanwhile.

    Without it both tend to do the same at the same time (Shah et al. 2024, arXiv:2407.08608, section 3.1). Each group
    waits at a barrier of its own, at which the other arrives. One group alone needs none.

    Attributes:
      group: Of this warp group; None if there is but one.
    """

    group: Any

    def take(self) -> None:
        """Waits for the other group to end its turn."""
        if self.group is not None:
            inline_ptx.hardware_barrier("sync", FIRST_FREE_BARRIER + self.group, 2 * WARP_GROUP_THREADS)

    def end(self) -> None:
        """Lets the other group begin."""
        if self.group is not None:
            inline_ptx.hardware_barrier("arrive", FIRST_FREE_BARRIER + 1 - self.group, 2 * WARP_GROUP_THREADS)

    def take_before(self, layout: Any, x: Any) -> Any:
        """As `take`, before all arithmetic on what it returns, which is `x`."""
        if self.group is None:
            return x
        return inline_ptx.after_barrier(FIRST_FREE_BARRIER + self.group, 2 * WARP_GROUP_THREADS, layout, x)

    def end_after(self, layout: Any, x: Any) -> Any:
        """As `end`, after the arithmetic that led to `x`, which is not negative; returns `x`."""
        if self.group is None:
            return x
        return inline_ptx.before_barrier(FIRST_FREE_BARRIER + 1 - self.group, 2 * WARP_GROUP_THREADS, layout, x)
