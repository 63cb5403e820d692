"""Which tiles a block of threads computes: one, and then whichever is next until none is left.

A block that computes many tiles loads the queries of the next one while it computes, where a new block would first have
to begin. Who takes which is decided as they go: tiles of a causal mask differ by far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu.pipeline import FIRST_FREE_BARRIER, WARP_GROUP_THREADS
from pallas_kernels.mosaic_gpu.tile_order import MULTIPROCESSORS, Grid

BLOCKS = MULTIPROCESSORS  # where there are fewer, blocks that begin last find nothing left
_ANNOUNCED = FIRST_FREE_BARRIER + 2  # after those of the turns
AHEAD = 2  # tiles whose queries are in shared memory at once


class Schedule(NamedTuple):
    """The tiles of a block of threads.

    Attributes:
      grid: All tiles.
      own: The number of the block, and of its first tile.
      counter: The next tile that nobody has, in global memory; None if each block has one alone.
      numbers: Shared memory: of the tile at hand and of the next.
    """

    grid: Grid
    own: Any
    counter: Any
    numbers: Any

    def over_tiles(self, tile: Callable[..., Any], following: Callable[[Any], Any]) -> Any:
        """Runs ``stage = tile(i, place, stage)`` for the ith of its tiles, and returns how many there were.

        Args:
          tile: Computes a tile at batch, head and place in the order of work; `stage` is the first free one of a ring.
          following: Gives the number of the ith tile.
        """
        if self.counter is None:
            tile(jnp.int32(0), self.grid.place(self.own), jnp.int32(0))
            return jnp.int32(1)

        def body(state: Any) -> Any:
            i, number, stage = state
            stage = tile(i, self.grid.place(number), stage)
            return i + 1, following(i + 1), stage

        more = lambda state: state[1] < self.grid.size
        return lax.while_loop(more, body, (jnp.int32(0), self.own, jnp.int32(0)))[0]

    def take(self, i: Any) -> Any:
        """Takes the number of the ith tile: by the warp group that copies, alone."""
        inline_ptx.count_up(self.counter, self.numbers, slot(i))
        inline_ptx.hardware_barrier("sync", jnp.int32(_ANNOUNCED), WARP_GROUP_THREADS)
        return self.number(i)

    def number(self, i: Any) -> Any:
        """The number of the ith tile, once it was taken."""
        return self.numbers[slot(i)]


def slot(i: Any) -> Any:
    """Which of two places belongs to the ith tile."""
    return lax.rem(i, jnp.int32(AHEAD))


def counter() -> Any:
    """A counter in global memory; the first tiles are taken by number."""
    return jax.new_ref(jnp.full((1,), BLOCKS, jnp.int32))


def numbers() -> Any:
    """What to allocate for the numbers of tiles."""
    return plg.SMEM((AHEAD,), jnp.int32)
