"""Neighborhood attention on a grid (NATTEN, https://arxiv.org/abs/2204.07143)."""

from __future__ import annotations

import functools
import math
import operator

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32

from jflex.masks.grid_order import checked_grid, coordinates
from jflex.mods.array_sizes import ReadyMod, for_positions, ready
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


@ready
def neighborhood(
    canvas: tuple[int, ...], kernel: tuple[int, ...], *, order: Int[ArrayLike, " N"] | None = None
) -> MaskMod:
    """Shows the keys of a `kernel` around the query; near a border the kernel is moved inside, so it keeps its size.

    Position ``i`` of the sequence is row ``i // width`` and column ``i % width`` of the canvas. With an order it is
    cell ``order[i]``; the kernel then lies in fewer blocks, and less is computed.

    Args:
      canvas: Height and width of the grid, or more axes before them.
      kernel: Height and width of the neighbourhood, odd and at most those of the canvas.
      order: The order of the sequence, from `tile_order` or `morton_order`, for arrays that `reorder` brought into it;
        None for row-major order.

    Returns:
      A mask_mod, for ``height * width`` queries and keys, or fewer.

    Raises:
      TypeError: A side is not an integer, or the order is not of integers.
      ValueError: A side of the kernel is even or longer than that of the canvas, or the order is of another canvas.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> from jflex.masks.grid_order import morton_order
    >>> create = lambda mask_mod: create_block_mask(mask_mod, None, None, 64, 64, block_size=8)
    >>> print(create(neighborhood((4, 16), (3, 3))))
    BlockMask(shape=(1, 1, 64, 64), block_size=(8, 8), sparsity=25.00%)
    batch 0, head 0
    ░░░░░░░░░░░░    |
    ░░░░░░░░░░░░    |
    ░░░░░░░░░░░░    |
    ░░░░░░░░░░░░    |
        ░░░░░░░░░░░░|
        ░░░░░░░░░░░░|
        ░░░░░░░░░░░░|
        ░░░░░░░░░░░░|
    >>> print(create(neighborhood((4, 16), (3, 3), order=morton_order((4, 16)))))
    BlockMask(shape=(1, 1, 64, 64), block_size=(8, 8), sparsity=37.50%)
    batch 0, head 0
    ░░░░░░░░        |
    ░░░░░░░░        |
    ░░░░░░░░░░░░    |
    ░░░░░░░░░░░░    |
        ░░░░░░░░░░░░|
        ░░░░░░░░░░░░|
            ░░░░░░░░|
            ░░░░░░░░|
    """
    canvas, kernel = checked_grid("neighborhood", canvas=canvas, kernel=kernel)
    for side, around in zip(canvas, kernel, strict=True):
        if around % 2 == 0 or around > side:
            raise ValueError(f"`kernel` must be odd and fit in the canvas. Got {kernel} on a canvas of {canvas}.")
    # Of each token, so that a kernel loads them, and does not divide for each element.
    reordered = None if order is None else coordinates(_checked_cells(order, canvas), canvas)

    def mask(b, h, q_idx, kv_idx):
        at = (
            coordinates(index, canvas) if reordered is None else [of_axis[index] for of_axis in reordered]
            for index in (q_idx, kv_idx)
        )
        near = [
            jnp.abs(jnp.clip(query, around // 2, side - 1 - around // 2) - key) <= around // 2
            for query, key, side, around in zip(*at, canvas, kernel, strict=True)
        ]
        return functools.reduce(operator.and_, near)

    rule = "`canvas` of `neighborhood` must hold one position for each {}"
    remedy = "Pass a canvas of {} positions, height * width."
    return ReadyMod(mask, for_positions(math.prod(canvas), rule, remedy))


def _checked_cells(order: Int[ArrayLike, " N"], canvas: tuple[int, ...]) -> Int32[Array, " N"]:
    cells = checked_array(order, "`order` of `neighborhood`", "integers", "[N]")
    if cells.shape[0] != math.prod(canvas):
        raise ValueError(
            f"`order` of `neighborhood` must hold every cell of the canvas {canvas} once. Got {cells.shape[0]} cells. "
            "Pass `tile_order` or `morton_order` of this canvas."
        )
    return cells.astype(jnp.int32)
