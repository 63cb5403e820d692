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


class VisibleRange(NamedTuple):
    """Begin and end of the visible indices along the loop axis, int32; see `pallas_kernels.row_limits.RowLimits`."""

    rows: tuple[jax.Array, jax.Array]  # of each row of a tile, [rows]
    tile: tuple[Index, Index]  # of all of its rows, scalars; -1 is where no limits are the mask
    is_mask: bool  # whether limits are surely the mask

    def hides(self, first: Index, count: int) -> jax.Array:
        """True if the rows hide all of a tile of so many from `first` on along the loop axis."""
        begin, end = self.tile
        return jnp.logical_or(first + count <= begin, first >= end)


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
    if spec.mask_mod is None or spec.mask_mod.limits is None:
        return _of_indices(spec, fixed, first, transposed=transposed)
    rows, number = fixed["k" if transposed else "q"], spec.mask_mod.limits + transposed
    batch, _, length = shapes[number]
    entry = fixed["b"] if batch > 1 else jnp.int32(0)
    ref, begins, ends = refs[number], 2 * entry * length, (2 * entry + 1) * length
    of_rows = lambda at: inline_ptx.load_elements(ref, rows + at, ROW, np.dtype(np.int32))
    at = lambda row: jnp.minimum(row, length - 1)
    of_tile = ref[begins + at(first)], ref[ends + at(first + (rows.shape[0] - 1))]
    return VisibleRange((of_rows(begins), of_rows(ends)), of_tile, is_mask=False)


def _of_indices(
    spec: AttentionSpec, fixed: dict[str, jax.Array], first: jax.Array, *, transposed: bool
) -> VisibleRange | None:
    """The limits of a mask that compares sums of indices, such as a window; None for others, or rows of several heads.

    H200, jax 0.11.2, bf16, a window of 1024 in S 16384, 16 heads, us with clauses and with limits: backward 1500 and
    1462 (1486 if no half tile is passed over), forward 755 and 748; at head size 64 forward 948 and 934.
    """
    program, (axis, walked, length) = spec.programs.mask, ("k", "q", spec.T) if transposed else ("q", "k", spec.S)
    if program is None or fixed["h"].ndim or not ranges.is_range(program, walked):
        return None
    rows, spans = fixed[axis], {name: Span(fixed[name], fixed[name]) for name in "bh"}
    within = lambda *ends: ranges.visible_range(program, walked, length, {**spans, axis: Span(*ends)})[:2]
    begin, end = (rows * 0 + x for x in within(rows, rows))  # some are the ends of the axis
    return VisibleRange((begin, end), within(first, first + (rows.shape[0] - 1)), is_mask=True)
