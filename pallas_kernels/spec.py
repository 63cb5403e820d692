"""What a kernel is told about the attention that it computes: static facts, and the arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from pallas_kernels.program.build import Program

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Static facts.

    Attributes:
      B: Batch.
      T: Queries.
      S: Keys.
      Hq: Query heads.
      Hkv: Key heads.
      Bkv: Batch of key and value: B, or 1 if it is shared.
      D: Head size of query and key.
      Dv: Head size of value.
      layout: ``"BTNH"`` or ``"BNTH"``.
      scale: Of the scores.
      score: The tile program of the score mod.
      mask: The tile program of the mask.
      blocks: Queries and keys in a block of the mask's lists, or None without lists.
      list_batch: Batch of the lists: 1 or B.
      list_heads: Heads of the lists: 1 or Hq.
      precision: Of products of float32; None for the hardware's default.
      interpret: Run by Pallas' interpreter on the CPU.
      score_shapes: Of what the score mod captures; only the Hopper kernels ask for them.
      contains_nan: Whether NaN that the mask hides is kept out of all sums (`pallas_kernels.marks`).
    """

    B: int
    T: int
    S: int
    Hq: int
    Hkv: int
    Bkv: int
    D: int
    Dv: int
    layout: str
    scale: float
    score: Program | None
    mask: Program | None
    blocks: tuple[int, int] | None
    list_batch: int
    list_heads: int
    precision: str | None
    interpret: bool
    score_shapes: tuple[tuple[int, ...], ...] = ()
    contains_nan: bool = True

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.Hq // self.Hkv

    def walk_passes_end(self, axis: str, tile: int) -> bool:
        """Whether a walk over queries (``"q"``) or keys (``"k"``) may have tiles that reach past the end, or lie there.

        Lists are walked by whole blocks: a last block that is cut short holds tiles of which nothing exists.
        """
        length, which = (self.T, 0) if axis == "q" else (self.S, 1)
        return length % (tile if self.blocks is None else self.blocks[which]) != 0

    def rows_shape(self, size: int) -> tuple[int, int, int, int]:
        """Shape of an array over queries, as `query`."""
        return (self.B, self.T, self.Hq, size) if self.layout == "BTNH" else (self.B, self.Hq, self.T, size)

    def keys_shape(self, size: int) -> tuple[int, int, int, int]:
        """Shape of an array over keys of the whole batch, as `key`."""
        return (self.B, self.S, self.Hkv, size) if self.layout == "BTNH" else (self.B, self.Hkv, self.S, size)


class Tiles(NamedTuple):
    """Tile of one kernel: queries, keys, warps, depth of the software pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


class Arrays(NamedTuple):
    """The inputs of all kernels (in a kernel: the refs to them).

    Attributes:
      query: In the layout of the setting.
      key: Likewise.
      value: Likewise.
      lists: The eight index arrays of a block mask, or None.
      score_operands: What the score mod captures; booleans as int8.
      mask_operands: What the mask captures; booleans as int8.
    """

    query: Any
    key: Any
    value: Any
    lists: Any
    score_operands: tuple[Any, ...]
    mask_operands: tuple[Any, ...]


def as_int8(x: jax.Array) -> jax.Array:
    """GPU memory has no booleans."""
    return x.astype("int8") if x.dtype == bool else x
