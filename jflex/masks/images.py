"""Masks of images and videos: sliding tiles, spatial and temporal heads, cross-attention of text to images."""

from __future__ import annotations

import functools
import math
import operator

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32

from jflex.masks.grids import checked_grid, coordinates
from jflex.mods.array_sizes import ReadyMod, Requirement, for_positions, ready
from jflex.mods.arrays import checked_array, known_count
from jflex.mods.compose import MaskMod


@ready
def sliding_tile(
    canvas: tuple[int, ...],
    kernel: tuple[int, ...],
    tile: tuple[int, ...],
    *,
    text_length: int | Int[ArrayLike, ""] = 0,
) -> MaskMod:
    """Shows the tiles of a `kernel` around the query's tile; near a border the kernel is moved inside.

    Source: STA, https://arxiv.org/abs/2502.04507.

    All queries of a tile attend to the same keys. If a block of the BlockMask is as long as a tile has cells, every
    block of the canvas is full or empty. The tokens of the canvas are in the order of `tile_order`; after them comes
    text, which all attend to and which attends to all.

    Args:
      canvas: Height and width of an image, or time, height and width of a video; multiples of those of the tile.
      kernel: Sides of the window in cells, multiples of those of the tile and at most those of the canvas.
      tile: Sides of a tile.
      text_length: Tokens of text; if it is an array, keys after the text are masked.

    Returns:
      A mask_mod, for the cells of the canvas and the text, or fewer positions.

    Raises:
      TypeError: A side is not an integer, or `text_length` is none.
      ValueError: A side of the canvas or the kernel is not a multiple of that of the tile, or the kernel is larger than
        the canvas; or `text_length` is negative.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> mask_mod = sliding_tile((4, 8), (4, 6), (2, 2), text_length=4)
    >>> print(create_block_mask(mask_mod, None, None, 36, 36, block_size=4))
    BlockMask(shape=(1, 1, 36, 36), block_size=(4, 4), sparsity=19.75%)
    batch 0, head 0
    ██████  ██████  ██|
    ██████  ██████  ██|
      ██████  ████████|
      ██████  ████████|
    ██████  ██████  ██|
    ██████  ██████  ██|
      ██████  ████████|
      ██████  ████████|
    ██████████████████|
    """
    canvas, kernel, tile = checked_grid("sliding_tile", canvas=canvas, kernel=kernel, tile=tile)
    for whole, around, part in zip(canvas, kernel, tile, strict=True):
        if whole % part or around % part or around > whole:
            raise ValueError(
                "`canvas` and `kernel` of `sliding_tile` must be multiples of `tile`, and the kernel must fit in the "
                f"canvas. Got {canvas}, {kernel} and {tile}. Pad the canvas."
            )
    cells, tile_cells, text = math.prod(canvas), math.prod(tile), _checked_text(text_length)
    tiles = tuple(whole // part for whole, part in zip(canvas, tile, strict=True))
    window = tuple(around // part for around, part in zip(kernel, tile, strict=True))

    def mask(b, h, q_idx, kv_idx):
        at = (coordinates(index // tile_cells, tiles) for index in (q_idx, kv_idx))
        near = []
        for query, key, count, width in zip(*at, tiles, window, strict=True):
            first = jnp.clip(query - width // 2, 0, count - width)
            near.append((key >= first) & (key < first + width))
        from_text, to_text = q_idx >= cells, kv_idx >= cells
        return (functools.reduce(operator.and_, near) | from_text | to_text) & (kv_idx < cells + text)

    known = known_count(text)
    if known is None:
        return mask
    rule = "`canvas` and `text_length` of `sliding_tile` must hold one position for each {}"
    remedy = "Pass a canvas and text of {} positions together."
    return ReadyMod(mask, for_positions(cells + known, rule, remedy))


def _checked_text(text_length: int | Int[ArrayLike, ""]) -> int | Int32[Array, ""]:
    known = known_count(text_length)
    if known is None:
        return checked_array(text_length, "`text_length` of `sliding_tile`", "integers").astype(jnp.int32)
    if known < 0:
        raise ValueError(f"`text_length` of `sliding_tile` must not be negative. Got {known}.")
    return known


@ready
def spatial_head(frame: int, window: int, *, prompt: int = 0, first_frame: bool = False) -> MaskMod:
    """Shows the keys near the query in the sequence: those of its own frame and of the frames beside it.

    Source: Sparse VideoGen, https://arxiv.org/abs/2502.01776.

    The sequence is a prompt, which all attend to and which attends to all, and then the frames.

    Args:
      frame: Tokens of a frame.
      window: A key is visible if it is fewer positions than this before or after the query. For the paper's width of
        ``w`` frames ``w * frame``; a multiple of the block size makes fewer partial blocks.
      prompt: Tokens of the prompt.
      first_frame: Whether all attend to the first frame too.

    Raises:
      ValueError: A number is not positive, or `prompt` is negative.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> print(create_block_mask(spatial_head(4, 4, prompt=2), None, None, 14, 14, block_size=1))
    BlockMask(shape=(1, 1, 14, 14), block_size=(1, 1), sparsity=36.73%)
    batch 0, head 0
    ████████████████████████████|
    ████████████████████████████|
    ████████████                |
    ██████████████              |
    ████████████████            |
    ██████████████████          |
    ████  ██████████████        |
    ████    ██████████████      |
    ████      ██████████████    |
    ████        ██████████████  |
    ████          ██████████████|
    ████            ████████████|
    ████              ██████████|
    ████                ████████|
    """
    _check("spatial_head", frame, window, prompt)
    sink = prompt + (frame if first_frame else 0)

    def mask(b, h, q_idx, kv_idx):
        return (jnp.abs(q_idx - kv_idx) < window) | (kv_idx < sink) | (q_idx < prompt)

    return mask


@ready
def temporal_head(frame: int, window: int, *, prompt: int = 0, first_frame: bool = False) -> MaskMod:
    """Shows the keys at the query's place in every frame, and near it.

    The sequence is a prompt, which all attend to and which attends to all, and then the frames.

    Args:
      frame: As in `spatial_head`, and so `prompt` and `first_frame`.
      window: A key is visible if its place in its frame is fewer positions than this before or after the query's. For
        the paper's width of ``w`` frames out of ``F``, ``w * frame // F``.

    Raises:
      ValueError: A number is not positive, or `prompt` is negative.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> print(create_block_mask(temporal_head(4, 1, prompt=2), None, None, 14, 14, block_size=1))
    BlockMask(shape=(1, 1, 14, 14), block_size=(1, 1), sparsity=55.10%)
    batch 0, head 0
    ████████████████████████████|
    ████████████████████████████|
    ██████      ██      ██      |
    ████  ██      ██      ██    |
    ████    ██      ██      ██  |
    ████      ██      ██      ██|
    ██████      ██      ██      |
    ████  ██      ██      ██    |
    ████    ██      ██      ██  |
    ████      ██      ██      ██|
    ██████      ██      ██      |
    ████  ██      ██      ██    |
    ████    ██      ██      ██  |
    ████      ██      ██      ██|
    """
    _check("temporal_head", frame, window, prompt)
    sink = prompt + (frame if first_frame else 0)

    def mask(b, h, q_idx, kv_idx):
        q_offset, kv_offset = (jnp.maximum(index - prompt, 0) % frame for index in (q_idx, kv_idx))
        return (jnp.abs(q_offset - kv_offset) < window) | (kv_idx < sink) | (q_idx < prompt)

    return mask


def _check(caller: str, frame: int, window: int, prompt: int) -> None:
    if frame < 1 or window < 1 or prompt < 0:
        raise ValueError(
            f"`frame` and `window` of `{caller}` must be positive, and `prompt` not negative. "
            f"Got {frame}, {window} and {prompt}."
        )


@ready
def vision_cross_attention(intervals: Int[ArrayLike, "*B N 2"], image: int) -> MaskMod:
    """Shows each image to an interval of the text: queries are text, keys are images of as many tokens, in a row.

    In Flamingo the interval of an image begins where the image stands in the text, and ends at the next one.

    Args:
      intervals: For each image its first query, and the one after its last: integers [N, 2], or [B, N, 2].
      image: Tokens of an image.

    Returns:
      A mask_mod, for ``N * image`` keys, or fewer; it uses ``b`` if the intervals have a batch axis.

    Raises:
      TypeError: The intervals are not integers.
      ValueError: They have another shape, or `image` is not positive.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> mask_mod = vision_cross_attention(jnp.array([[0, 4], [1, 4], [4, 6]]), 2)
    >>> print(create_block_mask(mask_mod, None, None, 6, 6, block_size=1))
    BlockMask(shape=(1, 1, 6, 6), block_size=(1, 1), sparsity=50.00%)
    batch 0, head 0
    ████        |
    ████████    |
    ████████    |
    ████████    |
            ████|
            ████|
    """
    intervals = checked_array(intervals, "`intervals` of `vision_cross_attention`", "integers").astype(jnp.int32)
    if intervals.ndim not in (2, 3) or intervals.shape[-1] != 2:
        raise ValueError(
            "`intervals` of `vision_cross_attention` must be [N, 2] or [B, N, 2]: the first query of each image, and "
            f"the one after its last. Got shape {intervals.shape}."
        )
    if image < 1:
        raise ValueError(f"`image` of `vision_cross_attention` must be positive. Got {image}.")
    starts, ends = intervals[..., 0], intervals[..., 1]

    def mask(b, h, q_idx, kv_idx):
        at = kv_idx // image if intervals.ndim == 2 else (b, kv_idx // image)
        return (q_idx >= starts[at]) & (q_idx < ends[at])

    rule = "`intervals` and `image` of `vision_cross_attention` must make up all keys, images of one length"
    remedy = "Pass an interval for each image; an empty one for padding."
    required = [Requirement("kv_idx", starts.shape[-1] * image, rule, remedy)]
    if intervals.ndim == 3:
        rule = "`intervals` of `vision_cross_attention` must hold those of each batch entry"
        remedy = "Pass intervals [{}, N, 2], or [N, 2] for those that all batch entries share."
        required.append(Requirement("b", starts.shape[0], rule, remedy))
    return ReadyMod(mask, tuple(required))
