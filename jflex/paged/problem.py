"""The static facts of one call of paged attention, and its arrays."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from jflex.config import Config
from jflex.mods.trace import TracedMod


@dataclasses.dataclass(frozen=True)
class PagedProblem:
    """All that is static: hashable, so that it keys caches.

    The mods are those of the user, made to take what a kernel knows: the request ``b``, the head ``h``, the number of a
    packed query ``n`` instead of its position, and the key's number within the request.

    Attributes:
      B: Requests.
      T: Packed queries.
      S: Keys that a request may have.
      Hq: Query heads.
      Hkv: Key heads.
      D: Head size of query and key.
      Dv: Head size of value.
      page_size: Keys in a page.
      num_pages: Pages that a table may name.
      dtype: Of query, key and value.
      out_dtype: Of the output: `dtype`, or float32 where it is to be merged.
      scale: Of the scores.
      score: The score mod.
      mask: The mask.
      platform: Of the device.
      device_kind: Of the device.
      precision: Of products of float32; None for JAX's default.
      config: Tiles.
    """

    B: int
    T: int
    S: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    page_size: int
    num_pages: int
    dtype: str
    out_dtype: str
    scale: float
    score: TracedMod | None
    mask: TracedMod | None
    platform: str
    device_kind: str
    precision: str | None
    config: Config

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.Hq // self.Hkv

    @property
    def exact(self) -> str:
        """The dtype of scores and sums."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def max_pages(self) -> int:
        """Pages that a request may have."""
        return self.S // self.page_size


class PagedInputs(NamedTuple):
    """The arrays of one call.

    Attributes:
      query: [N, Hq, D].
      key: [pages of all layers, page_size, Hkv, D].
      value: [pages of all layers, page_size, Hkv, Dv].
      indptr: int32 [R + 1].
      lengths: int32 [R].
      table: int32 [R, max_pages].
      first_page: int32 [1], the first page of the layer.
      score_operands: What the score mod captures.
      mask_operands: What the mask captures.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    indptr: jax.Array
    lengths: jax.Array
    table: jax.Array
    first_page: jax.Array
    score_operands: tuple[jax.Array, ...]
    mask_operands: tuple[jax.Array, ...]
