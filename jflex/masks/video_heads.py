"""Spatial and temporal heads of video models (Sparse VideoGen, https://arxiv.org/abs/2502.01776)."""

from __future__ import annotations

import jax.numpy as jnp

from jflex.mods.array_sizes import ready
from jflex.mods.compose import MaskMod


@ready
def spatial_head(frame: int, window: int, *, prompt: int = 0, first_frame: bool = False) -> MaskMod:
    """Shows the keys near the query in the sequence: those of its own frame and of the frames beside it.

    The sequence is a prompt, which all attend to and which attends to all, and then the frames.

    Args:
      frame: Tokens of a frame.
      window: A key is visible if it is fewer positions than this before or after the query. For the paper's width of
        ``w`` frames ``w * frame``; a multiple of the block size makes fewer partial blocks.
      prompt: Tokens of the prompt.
      first_frame: Whether all attend to the first frame too.

    Returns:
      A mask_mod.

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
      frame: Tokens of a frame.
      window: A key is visible if its place in its frame is fewer positions than this before or after the query's. For
        the paper's width of ``w`` frames out of ``F``, ``w * frame // F``.
      prompt: Tokens of the prompt.
      first_frame: Whether all attend to the first frame too.

    Returns:
      A mask_mod.

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
        place, kv_place = (jnp.maximum(index - prompt, 0) % frame for index in (q_idx, kv_idx))
        return (jnp.abs(place - kv_place) < window) | (kv_idx < sink) | (q_idx < prompt)

    return mask


def _check(caller: str, frame: int, window: int, prompt: int) -> None:
    if frame < 1 or window < 1 or prompt < 0:
        raise ValueError(
            f"`frame` and `window` of `{caller}` must be positive, and `prompt` not negative. "
            f"Got {frame}, {window} and {prompt}."
        )
