"""The schedule of persistent CTAs: which tiles a CTA computes, in a static order or drawn from an atomic counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.mosaic_gpu.launch import NUM_SMS
from pallas_kernels.mosaic_gpu.smem import FIRST_FREE_BARRIER, WARP_GROUP_THREADS
from pallas_kernels.types import Index, Ref

Tile = TypeVar("Tile", covariant=True)  # the index of a tile
NUM_CTAS = NUM_SMS  # one persistent CTA for each SM; on GPUs with fewer SMs the CTAs that start last find no tile left
_DRAWN_BARRIER = FIRST_FREE_BARRIER + 9  # after the barriers of the ping-pong, and of the backward
# Tiles of a head up to which a CTA's tiles follow from its id, in order and in reverse by turns: no counter is filled.
# H100, jax 0.11.2, causal, us, static and dynamic: 75 and 80 at S 512, 207 and 207 at S 1024, 4444 and 3039 at S 16384.
MAX_STATIC_TILES = 4
QUERY_STAGES = 2  # tiles whose queries are in shared memory at once


class Schedule(Protocol[Tile]):
    """All tiles, by tile id."""

    @property
    def size(self) -> Index:
        """The number of tiles."""
        ...

    def unravel(self, tile_id: Index) -> Tile:
        """The index of a tile: of a `Grid`, (batch, head, number in the tile order)."""
        ...


class PersistentScheduler(NamedTuple, Generic[Tile]):
    """The tiles of a CTA."""

    grid: Schedule[Tile]
    cta_id: Index  # the id of the CTA, and of its first tile
    counter: Ref | None  # int32 [1] in global memory: the next tile id to draw; None if the schedule is static
    # int32 [QUERY_STAGES] in shared memory: ids of the current tile and of the next; None for one tile for each CTA
    tile_ids: Ref | None

    def over_tiles(
        self, tile: Callable[[Index, Tile, jax.Array], jax.Array], next_tile: Callable[[Index], jax.Array]
    ) -> jax.Array:
        """Runs ``stage = tile(i, index, stage)`` for the ith tile of this CTA, and returns how many there were.

        `index` is the index in the grid, `stage` the first free ring stage. `next_tile` returns the id of the ith tile.
        """
        if self.tile_ids is None:
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
        assert self.tile_ids is not None  # it is persistent
        if self.counter is None:
            return self.tile_id(i)
        inline_ptx.atomic_increment(self.counter, self.tile_ids, tile_slot(i))
        inline_ptx.hardware_barrier("sync", jnp.int32(_DRAWN_BARRIER), WARP_GROUP_THREADS)
        return self.tile_id(i)

    def tile_id(self, i: Index) -> jax.Array:
        """The id of the ith tile, once it was drawn."""
        assert self.tile_ids is not None  # it is persistent
        if self.counter is None:
            return i * NUM_CTAS + jnp.where(lax.rem(i, jnp.int32(2)) == 0, self.cta_id, NUM_CTAS - 1 - self.cta_id)
        return self.tile_ids[tile_slot(i)]


def tile_slot(i: Index) -> jax.Array:
    """The stage of the ith tile."""
    return smem.modulo(i, QUERY_STAGES)


def tile_counter() -> jax.Ref:
    """The atomic counter of tile ids, in global memory; it starts after the first tiles, whose ids are CTA ids."""
    return jax.new_ref(jnp.full((1,), NUM_CTAS, jnp.int32))


def tile_id_scratch() -> Ref:
    """Shared memory for tile ids."""
    return smem.declared(plg.SMEM((QUERY_STAGES,), jnp.int32))
