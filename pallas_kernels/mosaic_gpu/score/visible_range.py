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


class TileLimits(NamedTuple):
    """Begin and end of the indices along the loop axis that rows of a tile see; -1 where no limits are the mask."""

    begin: Index
    end: Index

    def hide(self, first: Index, count: int) -> jax.Array:
        """True if no row sees any of so many indices from `first` on."""
        return jnp.logical_or(first + count <= self.begin, first >= self.end)


class VisibleRange(NamedTuple):
    """Begin and end of the visible indices along the loop axis, int32; see `pallas_kernels.row_limits.RowLimits`."""

    rows: tuple[jax.Array, jax.Array]  # of each row of a tile, [rows]
    tile: TileLimits
    is_mask: bool  # whether limits are surely the mask


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
    of_rows = lambda at: inline_ptx.load_elements(refs[number], rows + at, ROW, np.dtype(np.int32))
    begins, ends = _offsets(shapes[number], fixed["b"])
    tile = tile_limits(refs[number], shapes[number], fixed["b"], first, rows.shape[0])
    return VisibleRange((of_rows(begins), of_rows(ends)), tile, is_mask=False)


def tile_limits(ref: Ref, shape: tuple[int, ...], b: jax.Array, first: jax.Array, count: int) -> TileLimits:
    """Limits of so many rows from `first` on, of an array of limits in memory, flattened."""
    (begins, ends), at = _offsets(shape, b), lambda row: jnp.minimum(row, shape[2] - 1)
    return TileLimits(ref[begins + at(first)], ref[ends + at(first + (count - 1))])


def _offsets(shape: tuple[int, ...], b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Offsets of the begins and the ends of a batch entry."""
    entry = b if shape[0] > 1 else jnp.int32(0)
    return 2 * entry * shape[2], (2 * entry + 1) * shape[2]


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
    return VisibleRange((begin, end), TileLimits(*within(first, first + (rows.shape[0] - 1))), is_mask=True)
