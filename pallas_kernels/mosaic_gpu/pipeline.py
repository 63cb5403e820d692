"""How warp groups hand tiles to each other: rings of tiles in shared memory, and turns at the tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import memory

# Registers of a thread after the roles part: 65536 are shared by two groups that compute and one that copies.
COMPUTING, COPYING = 232, 40


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

    def wait(self, nth: Any) -> Any:
        """Waits for the nth tile, and returns it."""
        slot = self.slot(nth)
        plg.barrier_wait(self.filled.at[slot])
        return self.tiles.at[slot]

    def release(self, nth: Any) -> None:
        """Says that this warp group has read the nth tile."""
        plg.barrier_arrive(self.emptied.at[self.slot(nth)])


class Turns(NamedTuple):
    """Two warp groups at the tensor cores by turns: while one computes weights, the products of the other run.

    Without it both tend to do the same at the same time (Shah et al. 2024, arXiv:2407.08608, section 3.1).
    """

    barrier: Any

    @classmethod
    def declare(cls) -> Turns:
        """What to allocate for it."""
        return cls(plg.Barrier(num_arrivals=2))

    def switch(self) -> None:
        """Lets the other group go on, and waits until it does the same."""
        plg.barrier_arrive(self.barrier)
        plg.barrier_wait(self.barrier)

    def offer(self) -> None:
        """Lets the other group go on."""
        plg.barrier_arrive(self.barrier)

    def take(self) -> None:
        """Waits for the other group."""
        plg.barrier_wait(self.barrier)
