"""Tile sizes of the latent kernel, and how query heads and queries fill the rows of a tile."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.score.tile import ROW
from pallas_kernels.mosaic_gpu.work_items import TILED_ROWS
from pallas_kernels.spec import AttentionSpec

BUFFERS = 2  # of tiles of keys in shared memory, one for each consumer warp group


class LatentRows(NamedTuple):
    """The rows of a tile of queries, [64] each."""

    t: jax.Array  # which query of the tile
    head: jax.Array  # which head of the group
    n: jax.Array  # the query, packed; padding repeats another
    h: jax.Array  # the query head; padding repeats another
    exists: jax.Array  # False for padding


class Heads(NamedTuple):
    """Division of heads: `groups` of `count` heads, each padded to `padded_count` rows; `queries` fill a tile."""

    groups: int
    count: int

    @classmethod
    def from_count(cls, heads: int) -> Heads:
        """The fewest groups that are equal.

        >>> Heads.from_count(128), Heads.from_count(9).queries, Heads.from_count(126).padded_count
        (Heads(groups=2, count=64), 4, 64)
        """
        count = max(n for n in range(1, smem.WARP_GROUP_ROWS + 1) if heads % n == 0)
        return cls(heads // count, count)

    @property
    def padded_count(self) -> int:
        """Rows of a query in a tile."""
        return -(-self.count // TILED_ROWS) * TILED_ROWS

    @property
    def rows(self) -> int:
        """Rows of a partial result."""
        return smem.WARP_GROUP_ROWS

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return smem.WARP_GROUP_ROWS // self.padded_count

    def read_keys_once(self, spec: AttentionSpec) -> bool:
        """True if requests of the mean number of queries have one tile: loading keys then takes longer than MMAs."""
        return self.groups == 1 and self.queries * spec.B >= spec.T

    def padded(self, query: jax.Array) -> jax.Array:
        """Queries [N, Hq, D] with each group of heads padded: [N, groups * padded_count, D]."""
        if self.padded_count == self.count:
            return query
        N, _, D = query.shape
        grouped = query.reshape(N, self.groups, self.count, D)
        wide = jnp.pad(grouped, ((0, 0), (0, 0), (0, self.padded_count - self.count), (0, 0)))
        return wide.reshape(N, self.groups * self.padded_count, D)

    def rows_of(self, group: jax.Array, first: jax.Array, queries: jax.Array, spec: AttentionSpec) -> LatentRows:
        """The rows of the tile from a packed query on, of a request that has so many from there."""
        row = plg.broadcasted_iota(jnp.int32, (smem.WARP_GROUP_ROWS,), 0, layout=ROW)
        t, head = lax.div(row, self.padded_count), lax.rem(row, self.padded_count)
        exists = (t < jnp.minimum(queries, self.queries)) & (head < self.count)
        n = jnp.minimum(first + t, spec.T - 1)
        return LatentRows(t, head, n, group * self.count + jnp.minimum(head, self.count - 1), exists)
