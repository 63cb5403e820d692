"""Neighborhood attention on a grid (NATTEN, https://arxiv.org/abs/2204.07143)."""

from __future__ import annotations

import jax.numpy as jnp

from jflex.mods.array_sizes import ReadyMod, for_positions
from jflex.mods.compose import MaskMod


def neighborhood(canvas: tuple[int, int], kernel: tuple[int, int]) -> MaskMod:
    """Shows the keys of a `kernel` around the query; near a border the kernel is moved inside, so it keeps its size.

    Position ``i`` of the sequence is row ``i // width`` and column ``i % width`` of the canvas.

    Args:
      canvas: Height and width of the grid.
      kernel: Height and width of the neighbourhood, odd and at most those of the canvas.

    Returns:
      A mask_mod, for ``height * width`` queries and keys, or fewer.

    Raises:
      ValueError: A side of the kernel is even or longer than that of the canvas.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(neighborhood((3, 4), (1, 3)), None, None, 12, 12)[0, 0, 4].astype(int).reshape(3, 4).tolist()
    [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    """
    for side, around in zip(canvas, kernel, strict=True):
        if around % 2 == 0 or not 0 < around <= side:
            raise ValueError(f"`kernel` must be odd and fit in the canvas. Got {kernel} on a canvas of {canvas}.")
    height, width = canvas

    def near(query, key, side, around):
        centre = jnp.clip(query, around // 2, side - 1 - around // 2)
        return jnp.abs(centre - key) <= around // 2

    def mask(b, h, q_idx, kv_idx):
        rows = near(q_idx // width, kv_idx // width, height, kernel[0])
        return rows & near(q_idx % width, kv_idx % width, width, kernel[1])

    rule = "`canvas` of `neighborhood` must hold one position for each {}"
    remedy = "Pass a canvas of {} positions, height * width."
    return ReadyMod(mask, for_positions(height * width, rule, remedy))
