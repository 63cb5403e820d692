"""How warp groups hand tiles to each other: rings of tiles in shared memory, and turns at the tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline, memory

# Registers of a thread after the roles part: 65536 are shared by two groups that compute and one that copies.
COMPUTING, COPYING = 240, 24
WARP_GROUP_THREADS = 128


class Ring(NamedTuple):
    """Tiles that one warp group fills by the copy engine and others read, in order, again and again.

    Attributes:
      tiles: Shared memory [stages, rows, size].
      filled: A barrier a stage: the copy has arrived.
      emptied: A barrier a stage: all readers are done.
    """

    tiles: Any
    filled: Any
    emptied: Any

    @classmethod
    def declare(cls, stages: int, rows: int, size: int, dtype: Any, readers: int) -> Ring:
        """What to allocate for it."""
        return cls(
            memory.tiled((stages, rows, size), dtype),
            plg.Barrier(num_barriers=stages),
            plg.Barrier(num_arrivals=readers, num_barriers=stages),
        )

    def slot(self, nth: Any) -> Any:
        """Where the nth tile lies."""
        return lax.rem(nth, jnp.int32(self.tiles.shape[0]))

    def fill(self, nth: Any, source: Any) -> None:
        """Starts to copy the nth tile, once the one that lies there has been read."""
        slot = self.slot(nth)
        pl.when(nth >= self.tiles.shape[0])(lambda: plg.barrier_wait(self.emptied.at[slot]))
        plg.copy_gmem_to_smem(source, self.tiles.at[slot], self.filled.at[slot])

    def wait(self, nth: Any) -> None:
        """Waits for the nth tile."""
        plg.barrier_wait(self.filled.at[self.slot(nth)])

    def tile(self, nth: Any) -> Any:
        """The nth tile, which has been waited for."""
        return self.tiles.at[self.slot(nth)]

    def release(self, nth: Any) -> None:
        """Says that this warp group has read the nth tile."""
        plg.barrier_arrive(self.emptied.at[self.slot(nth)])


class KeyValueRing(NamedTuple):
    """As `Ring`, for keys and values that are multiplied in the same step: keys of a tile, values of the one before.

    Attributes:
      keys: Shared memory [stages, rows, D].
      values: Shared memory [stages, rows, Dv].
      filled: A barrier a stage: both copies have arrived.
      emptied: A barrier a stage: all readers are done.
    """

    keys: Any
    values: Any
    filled: Any
    emptied: Any

    @classmethod
    def declare(cls, stages: int, rows: int, sizes: tuple[int, int], dtype: Any, readers: int) -> KeyValueRing:
        """What to allocate for rows of D and of Dv numbers."""
        return cls(
            memory.tiled((stages, rows, sizes[0]), dtype),
            memory.tiled((stages, rows, sizes[1]), dtype),
            plg.Barrier(num_arrivals=2, num_barriers=stages),
            plg.Barrier(num_arrivals=readers, num_barriers=stages),
        )

    def slot(self, nth: Any) -> Any:
        """Where the nth stage lies."""
        return lax.rem(nth, jnp.int32(self.keys.shape[0]))

    def fill(self, nth: Any, keys: Any, values: Any) -> None:
        """Starts to copy the nth stage; there may be no keys."""
        slot = self.slot(nth)
        pl.when(nth >= self.keys.shape[0])(lambda: plg.barrier_wait(self.emptied.at[slot]))
        if keys is None:
            plg.barrier_arrive(self.filled.at[slot])
        else:
            plg.copy_gmem_to_smem(keys, self.keys.at[slot], self.filled.at[slot])
        plg.copy_gmem_to_smem(values, self.values.at[slot], self.filled.at[slot])

    def wait(self, nth: Any) -> None:
        """Waits for the nth stage."""
        plg.barrier_wait(self.filled.at[self.slot(nth)])

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
            inline.hardware_barrier("sync", FIRST_FREE_BARRIER + self.group, 2 * WARP_GROUP_THREADS)

    def end(self) -> None:
        """Lets the other group begin."""
        if self.group is not None:
            inline.hardware_barrier("arrive", FIRST_FREE_BARRIER + 1 - self.group, 2 * WARP_GROUP_THREADS)

    def take_before(self, layout: Any, x: Any) -> Any:
        """As `take`, before all arithmetic on what it returns, which is `x`."""
        if self.group is None:
            return x
        return inline.after_barrier(FIRST_FREE_BARRIER + self.group, 2 * WARP_GROUP_THREADS, layout, x)

    def end_after(self, layout: Any, x: Any) -> Any:
        """As `end`, after the arithmetic that led to `x`, which is not negative; returns `x`."""
        if self.group is None:
            return x
        return inline.before_barrier(FIRST_FREE_BARRIER + 1 - self.group, 2 * WARP_GROUP_THREADS, layout, x)
