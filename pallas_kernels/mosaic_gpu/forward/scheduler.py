"""Tile scheduler of persistent CTAs: each takes its CTA id as its first tile id, then draws ids from an atomic counter.

A persistent CTA loads the queries of its next tile while it computes, where a new CTA would first have to start. The
schedule is dynamic because tiles of a causal mask differ by far in work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.launch import NUM_SMS, Grid
from pallas_kernels.mosaic_gpu.pipeline import FIRST_FREE_BARRIER, WARP_GROUP_THREADS
from pallas_kernels.types import Index, Location, Ref

NUM_CTAS = NUM_SMS  # one persistent CTA for each SM; on GPUs with fewer SMs the CTAs that start last find no tile left
_DRAWN_BARRIER = FIRST_FREE_BARRIER + 2  # after the barriers of the ping-pong
QUERY_STAGES = 2  # tiles whose queries are in shared memory at once


class PersistentScheduler(NamedTuple):
    """The tiles of a CTA."""

    grid: Grid
    cta_id: Index  # the id of the CTA, and of its first tile
    # int32 [1] in global memory: the next tile id to draw; None if the kernel is not persistent (one tile for each CTA)
    counter: Ref | None
    tile_ids: Ref | None  # int32 [QUERY_STAGES] in shared memory: ids of the current tile and of the next

    def over_tiles(
        self, tile: Callable[[Index, Location, jax.Array], jax.Array], next_tile: Callable[[Index], jax.Array]
    ) -> jax.Array:
        """Runs ``stage = tile(i, index, stage)`` for the ith tile of this CTA, and returns how many there were.

        Args:
          tile: Computes the tile at index (batch, head, number in the tile order); `stage` is the first free ring
            stage.
          next_tile: Returns the id of the ith tile.
        """
        if self.counter is None:
            tile(jnp.int32(0), self.grid.unravel(self.cta_id), jnp.int32(0))
            return jnp.int32(1)

        def body(state: tuple[jax.Array, Index, jax.Array]) -> tuple[jax.Array, Index, jax.Array]:
            i, tile_id, stage = state
            stage = tile(i, self.grid.unravel(tile_id), stage)
            return i + 1, next_tile(i + 1), stage

        more = lambda state: state[1] < self.grid.size
        return lax.while_loop(more, body, (jnp.int32(0), self.cta_id, jnp.int32(0)))[0]

    def draw(self, i: Index) -> jax.Array:
        """Draws the id of the ith tile from the atomic counter; only the producer warp group does so."""
        assert self.counter is not None  # it is persistent
        assert self.tile_ids is not None
        inline_ptx.atomic_increment(self.counter, self.tile_ids, slot(i))
        inline_ptx.hardware_barrier("sync", jnp.int32(_DRAWN_BARRIER), WARP_GROUP_THREADS)
        return self.tile_id(i)

    def tile_id(self, i: Index) -> jax.Array:
        """The id of the ith tile, once it was drawn."""
        assert self.tile_ids is not None  # it is persistent
        return self.tile_ids[slot(i)]


def slot(i: Index) -> jax.Array:
    """The query stage of the ith tile."""
    return lax.rem(i, jnp.int32(QUERY_STAGES))


def counter() -> jax.Ref:
    """The atomic counter of tile ids, in global memory; it starts after the first tiles, whose ids are CTA ids."""
    return jax.new_ref(jnp.full((1,), NUM_CTAS, jnp.int32))


def tile_ids() -> Ref:
    """Shared memory for tile ids."""
    return smem.declared(plg.SMEM((QUERY_STAGES,), jnp.int32))
