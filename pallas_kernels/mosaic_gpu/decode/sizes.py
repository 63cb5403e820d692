"""Tile sizes of the decoding kernel, and how queries and the query heads of a key head fill the rows of a tile."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.score.tile import ROW
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, Item, num_queries
from pallas_kernels.spec import AttentionSpec

ITEMSIZE = 2  # bytes of an element
RING_BYTES = 1 << 17  # keys and values of a CTA that are loaded or wait: 4 us of its part of the bandwidth of an H200
MAX_STAGES = 8
MAX_MERGED_COLUMNS = 128  # of an output that goes from one consumer warp group to the other at once
MIN_ROWS = 16


def stages_of(spec: AttentionSpec) -> int:
    """Stages of the ring; even, so that each has one consumer warp group that reads it.

    >>> from pallas_kernels.spec import AttentionSpec, Device, Numerics, Sizes
    >>> parts = {"numerics": Numerics(dtype="bfloat16", scale=1.0), "device": Device("gpu", "")}
    >>> sizes = {"B": 1, "T": 1, "S": 64, "Hq": 1, "Hkv": 1, "Bkv": 1}
    >>> [stages_of(AttentionSpec(sizes=Sizes(D=D, Dv=D, **sizes), **parts)) for D in (64, 128, 256)]
    [8, 4, 2]
    """
    fit = RING_BYTES // (TILE_KEYS * (spec.D + spec.Dv) * ITEMSIZE)
    return max(2, min(MAX_STAGES, fit // 2 * 2))


def merged_columns(spec: AttentionSpec) -> int:
    """Columns of the output that go from one consumer warp group to the other at once; they divide all of them."""
    return spec.Dv if spec.Dv <= MAX_MERGED_COLUMNS else spec.Dv // 2


class DecodeRows(NamedTuple):
    """The rows of a tile of queries, [64] each; padding repeats others."""

    line: jax.Array  # the row of the query and its head, in a partial result
    n: jax.Array
    q: jax.Array  # its index in mods
    h: jax.Array
    exists: jax.Array  # False for padding


class Packing(NamedTuple):
    """Packing of queries into tiles: `group` heads of each, side by side; `queries` fill a tile."""

    group: int
    queries: int

    @classmethod
    def from_spec(cls, spec: AttentionSpec) -> Packing:
        """Packs the queries of a batch entry, or of a request in the mean, but no more than fill a tile.

        The fewer rows, the smaller are partial results, and the fewer keys a split may have.
        """
        mean = spec.T if spec.paging is None else -(-spec.T // max(1, spec.B))
        return cls(spec.group, max(1, min(mean, smem.WARP_GROUP_ROWS // spec.group)))

    @property
    def rows(self) -> int:
        """Rows of a partial result, a power of two.

        >>> Packing(4, 1).rows, Packing(5, 4).rows
        (16, 32)
        """
        return max(MIN_ROWS, 1 << (self.group * self.queries - 1).bit_length())

    def rows_of(self, spec: AttentionSpec, item: Item) -> DecodeRows:
        """The rows of a work item."""
        row = plg.broadcasted_iota(jnp.int32, (smem.WARP_GROUP_ROWS,), 0, layout=ROW)
        t, head = lax.div(row, self.group), lax.rem(row, self.group)
        exists = t < jnp.minimum(item.queries, self.queries)
        n = jnp.minimum(item.first + t, num_queries(spec) - 1)
        q = n if spec.paging is not None else jnp.minimum(first_query(spec, item) + t, spec.T - 1)
        return DecodeRows(row, n, q, item.group * self.group + head, exists)


def first_query(spec: AttentionSpec, item: Item) -> jax.Array:
    """The index in mods of the first query of a work item: of a dense call, within its batch entry."""
    return item.first if spec.paging is not None else item.first - item.request * spec.T
