"""A tile of queries of one head in a Triton kernel: its rows in memory, and the tiles of keys that it visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.program.ir import Node
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton import scores
from pallas_kernels.triton.head_chunks import Columns, load_rows, load_vector, store_rows, store_vector
from pallas_kernels.types import Index, Location, Ref, S, Step


class QueryTile(NamedTuple):
    """A tile of queries of a head."""

    spec: AttentionSpec
    tiles: Tiles
    arrays: Operands[Ref]
    at: Location  # batch, query head, and index of the tile

    @classmethod
    def of_program(cls, spec: AttentionSpec, tiles: Tiles, arrays: Operands[Ref], order: Ref | None) -> QueryTile:
        """The tile of a program of the grid (tiles of queries, query heads, batch), by the order of tiles."""
        i, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        return cls(spec, tiles, arrays, (b, h, block_walk.row_at(spec, order, b, h, i, pl.num_programs(0))))

    @property
    def first(self) -> Index:
        """The first query."""
        return self.at[2] * self.tiles.block_q

    @property
    def may_end(self) -> bool:
        """True if a tile may have padding queries."""
        return self.spec.T % self.tiles.block_q != 0

    @property
    def keys_end(self) -> bool:
        """True if a partial tile of keys may have padding."""
        return self.spec.walk_passes_end("k", self.tiles.block_kv)

    def load(self, ref: Ref) -> Columns:
        """Rows of an array like query or output."""
        (b, h, _), rows = self.at, self.tiles.block_q
        return load_rows(self.spec, ref, b, h, self.first, rows, self.spec.T, may_end=self.may_end)

    def store(self, ref: Ref, x: Columns) -> None:
        """Stores what `load` would load."""
        b, h, _ = self.at
        store_rows(self.spec, ref, b, h, self.first, x, self.spec.T, may_end=self.may_end)

    def load_vector(self, ref: Ref, other: float) -> jax.Array:
        """A number of each query, [Bq]; `other` for padding."""
        rows, length = self.tiles.block_q, self.spec.T
        return load_vector(self.spec, ref, self.at[:2], self.first, rows, length, other, may_end=self.may_end)

    def store_vector(self, ref: Ref, x: jax.Array) -> None:
        """Stores what `load_vector` would load."""
        store_vector(self.spec, ref, self.at[:2], self.first, x, self.spec.T, may_end=self.may_end)

    def load_keys(self, ref: Ref, key: Index, *, may_end: bool) -> Columns:
        """A tile of key or value from a key on: of the key head that a group shares; their batch may be shared too."""
        spec, (b, h, _) = self.spec, self.at
        b, kv_h = (b if spec.Bkv > 1 else 0), lax.div(h, spec.group)
        return load_rows(spec, ref, b, kv_h, key, self.tiles.block_kv, spec.S, may_end=may_end)

    def prepare(self, nodes: Sequence[Node] | None = None) -> scores.Scores:
        """Prologue of the mods; `nodes` of the score mod, if more than those of its program."""
        b, h, _ = self.at
        return scores.prepare(self.spec, self.arrays, self.tiles.shape, b, h, q_first=self.first, nodes=nodes)

    def walk(self, state: S, step: Step[S]) -> S:
        """Folds a step over the tiles of keys that the queries visit."""
        return block_walk.over_keys(self.spec, self.tiles, self.arrays, self.at, state, step)
