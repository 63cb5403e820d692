"""Scores S^T that one of two consumer warp groups computes and hands to the other through shared memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, register_order, smem
from pallas_kernels.types import Ref

_WRITTEN, _READ, _DONE = (smem.FIRST_FREE_BARRIER + i for i in range(3))  # named barriers


class SharedScores(NamedTuple):
    """A tile of scores. The writer is less than a tile of queries ahead of the reader."""

    tile: Ref  # float32, `register_order.shape`: a thread reads what the same thread of the writer has written

    @classmethod
    def declare(cls, block_q: int) -> SharedScores:
        """Declares shared memory for a tile of 64 keys by `block_q` queries."""
        return cls(smem.declared(plg.SMEM(register_order.shape(block_q), jnp.float32)))

    def write(self, s: jax.Array) -> None:
        """Hands a tile to the reader."""
        _barrier("sync", _READ)
        register_order.store(self.tile, s)
        _barrier("arrive", _WRITTEN)

    def begin_reads(self) -> None:
        """Reader: the first tile may be written."""
        _barrier("arrive", _READ)

    def read(self) -> jax.Array:
        """Takes the next tile, in the layout of wgmma accumulators."""
        _barrier("sync", _WRITTEN)
        s = register_order.load(self.tile)
        _barrier("arrive", _READ)
        return s

    def join(self) -> None:
        """Waits until both groups have arrived here."""
        _barrier("sync", _DONE)


def _barrier(operation: Literal["sync", "arrive"], number: int) -> None:
    inline_ptx.hardware_barrier(operation, jnp.int32(number), 2 * smem.WARP_GROUP_THREADS)
