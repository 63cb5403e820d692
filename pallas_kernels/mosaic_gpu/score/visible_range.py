"""Limits of the rows of a tile (`pallas_kernels.row_limits`), as a consumer warp group holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu.score.tile import ROW
from pallas_kernels.program import ranges
from pallas_kernels.program.intervals import Span
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Index, Ref

INDEX_CLAUSES = True


class VisibleRange(NamedTuple):
    """Begin and end of the visible indices along the loop axis, int32; see `pallas_kernels.row_limits.RowLimits`."""

    rows: tuple[jax.Array, jax.Array]  # of each row of a tile, [rows]
    tile: tuple[jax.Array, jax.Array]  # of all of its rows, scalars; -1 is where no limits are the mask
    is_mask: bool = False  # whether limits are surely the mask, as they are where it compares indices alone

    def hides(self, first: Index, count: int) -> jax.Array:
        """True if the rows hide all of a tile of so many from `first` on along the loop axis."""
        begin, end = self.tile
        return (first + count <= begin) | (first >= end)


def visible_range(
    spec: AttentionSpec,
    refs: Sequence[Ref],
    shapes: Sequence[tuple[int, ...]],
    fixed: dict[str, jax.Array],
    first: jax.Array,
    *,
    transposed: bool,
) -> VisibleRange | None:
    """The limits of the rows of a tile, the first of which is given; None if the mask has none."""
    axis = "k" if transposed else "q"
    rows = fixed[axis]
    if spec.mask_mod is None or spec.mask_mod.limits is None:
        program, walked, length = spec.programs.mask, *(("q", spec.T) if transposed else ("k", spec.S))
        if not INDEX_CLAUSES or program is None or fixed["h"].ndim or not ranges.is_range(program, walked):
            return None
        spans = {name: Span(fixed[name], fixed[name]) for name in "bh"}
        within = lambda *ends: ranges.visible_range(program, walked, length, {**spans, axis: Span(*ends)})[:2]
        begin, end = (rows * 0 + x for x in within(rows, rows))  # some are the ends of the axis
        return VisibleRange((begin, end), within(first, first + (rows.shape[0] - 1)), is_mask=True)
    number = spec.mask_mod.limits + transposed
    batch, _, length = shapes[number]
    entry = fixed["b"] if batch > 1 else jnp.int32(0)
    ref, begins, ends = refs[number], 2 * entry * length, (2 * entry + 1) * length
    of_rows = lambda at: inline_ptx.load_elements(ref, rows + at, ROW, np.dtype(np.int32))
    at = lambda row: jnp.minimum(row, length - 1)
    of_tile = ref[begins + at(first)], ref[ends + at(first + (rows.shape[0] - 1))]
    return VisibleRange((of_rows(begins), of_rows(ends)), of_tile)
