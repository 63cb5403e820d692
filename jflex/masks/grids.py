"""Orders of the cells of a grid in which neighbors stay close: tiles, and the Z-order of Morton.

As in FlexAttention (Dong et al. 2024, https://arxiv.org/abs/2412.05496, appendix A.1).

A sequence in row-major order spreads the neighborhood of a cell over many blocks of a BlockMask; in these orders it
lies in few. Attention then runs on reordered arrays: `reorder` queries, keys and values, `restore` the output.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32, Shaped

from jflex.mods.array_sizes import ReadyMod, for_positions, ready
from jflex.mods.arrays import checked_array, known_count
from jflex.mods.compose import MaskMod

Index = TypeVar("Index", jax.Array, np.ndarray)


def tile_order(canvas: tuple[int, ...], tile: tuple[int, ...]) -> Int32[np.ndarray, " N"]:
    """The cells of a grid tile by tile.

    Tiles, and the cells of a tile, are in row-major order. Tiles at the far borders are smaller if the sides of the
    canvas are not multiples of those of the tile.

    Args:
      canvas: Sides of the grid: height and width, or more axes before them.
      tile: Sides of a tile. With as many cells as a block of the BlockMask has positions, a block is a tile.

    Returns:
      At each position of the reordered sequence, the cell: its position in row-major order.

    Raises:
      TypeError: A side is not an integer.
      ValueError: A side is not positive, or the tile has another number of axes.

    >>> tile_order((2, 4), (2, 2)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    canvas, tile = checked_grid("tile_order", canvas=canvas, tile=tile)
    axes = np.indices(canvas).reshape(len(canvas), -1)
    sides = np.array(tile)[:, None]
    return np.lexsort([*(axes % sides)[::-1], *(axes // sides)[::-1]]).astype(np.int32)


def morton_order(canvas: tuple[int, ...]) -> Int32[np.ndarray, " N"]:
    """The cells of a grid along the Z-order curve: by the interleaved bits of row and column.

    The sides need not be powers of two, nor alike: the curve skips what is outside of the canvas.

    Args:
      canvas: Sides of the grid: height and width, or more axes before them.

    Returns:
      At each position of the reordered sequence, the cell: its position in row-major order.

    Raises:
      TypeError: A side is not an integer.
      ValueError: A side is not positive.

    >>> position_of = np.argsort(morton_order((3, 4)))  # where each cell is on the curve
    >>> position_of.reshape(3, 4).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 10, 11]]
    """
    (canvas,) = checked_grid("morton_order", canvas=canvas)
    axes = np.indices(canvas).reshape(len(canvas), -1)
    bits = range(max(canvas).bit_length())
    # From the least significant bit, of the last axis, to the most significant one, of the first.
    return np.lexsort([(axis >> bit) & 1 for bit in bits for axis in axes[::-1]]).astype(np.int32)


def reorder(x: Shaped[ArrayLike, "*axes"], order: Int[ArrayLike, " N"], axis: int = 1) -> Shaped[Array, "*axes"]:
    """Brings the tokens of an array from row-major order into another one.

    Args:
      x: An array with a token for each cell of the grid, as queries [B, T, Hq, D].
      order: From `tile_order` or `morton_order`.

    Returns:
      An array of the same shape; token ``i`` is that of cell ``order[i]``.

    Raises:
      TypeError: The order is not of integers.
      ValueError: The order does not have one axis, or not one cell for each token.

    >>> reorder(jnp.array([[10, 11, 12, 13]]), tile_order((2, 2), (2, 1))).tolist()
    [[10, 12, 11, 13]]
    """
    return jnp.take(jnp.asarray(x), _checked_order("reorder", x, order, axis), axis=axis)


def restore(x: Shaped[ArrayLike, "*axes"], order: Int[ArrayLike, " N"], axis: int = 1) -> Shaped[Array, "*axes"]:
    """Brings the tokens of an array back into row-major order: the inverse of `reorder`.

    Returns:
      An array of the same shape; token ``order[i]`` is token ``i`` of `x`.

    Raises:
      TypeError: The order is not of integers.
      ValueError: The order does not have one axis, or not one cell for each token.

    >>> order = morton_order((4, 2))
    >>> restore(reorder(jnp.arange(8)[None], order), order).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    return jnp.take(jnp.asarray(x), jnp.argsort(_checked_order("restore", x, order, axis)), axis=axis)


def coordinates(cell: Index, canvas: tuple[int, ...]) -> tuple[Index, ...]:
    """The coordinates of a cell, one for each axis of the canvas, from its position in row-major order.

    >>> coordinates(np.array([5, 11]), (3, 4))
    (array([1, 2]), array([1, 3]))
    """
    inner = []
    for side in reversed(canvas[1:]):
        inner.append(cell % side)
        cell = cell // side
    return (cell, *reversed(inner))


def checked_grid(caller: str, **sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sides of a canvas, and of what lies in it, as Python numbers.

    >>> checked_grid("neighborhood", canvas=(3, np.int64(4)), kernel=(1, 3))
    [(3, 4), (1, 3)]
    """
    checked = []
    for name, lengths in sides.items():
        rule = f"`{name}` of `{caller}` must be a tuple of positive integers, one for each axis of the canvas"
        known = [known_count(side) for side in lengths] if isinstance(lengths, tuple | list) else [None]
        numbers = tuple(side for side in known if side is not None)
        if len(numbers) < len(known):
            raise TypeError(f"{rule}. Got {lengths!r}.")
        if min(numbers, default=0) < 1 or len(numbers) != len(checked[0] if checked else numbers):
            raise ValueError(f"{rule}. Got {lengths!r}{f' on a canvas of {checked[0]}' if checked else ''}.")
        checked.append(numbers)
    return checked


def _checked_order(caller: str, x: Shaped[ArrayLike, "*axes"], order: Int[ArrayLike, " N"], axis: int) -> jax.Array:
    argument = f"`order` of `{caller}`"
    cells, tokens = checked_array(order, argument, "integers", "[N]"), np.shape(x)[axis]
    if cells.shape[0] != tokens:
        raise ValueError(
            f"{argument} must hold one cell for each token. Got {cells.shape[0]} cells for axis {axis} of shape "
            f"{np.shape(x)}. Pass the axis of the tokens, and the order of a canvas with as many cells."
        )
    return cells


@ready
def neighborhood(
    canvas: tuple[int, ...], kernel: tuple[int, ...], *, order: Int[ArrayLike, " N"] | None = None
) -> MaskMod:
    """Shows the keys of a `kernel` around the query; near a border the kernel is moved inside, so it keeps its size.

    Source: NATTEN, https://arxiv.org/abs/2204.07143.

    Position ``i`` of the sequence is row ``i // width`` and column ``i % width`` of the canvas. With an order it is
    cell ``order[i]``; the kernel then lies in fewer blocks, and less is computed.

    Args:
      canvas: Height and width of the grid, or more axes before them.
      kernel: Height and width of the neighborhood, odd and at most those of the canvas.
      order: The order of the sequence, from `tile_order` or `morton_order`, for arrays that `reorder` brought into it;
        None for row-major order.

    Returns:
      A mask_mod, for ``height * width`` queries and keys, or fewer.

    Raises:
      TypeError: A side is not an integer, or the order is not of integers.
      ValueError: A side of the kernel is even or longer than that of the canvas, or the order is of another canvas.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> from jflex.masks.grids import morton_order
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
