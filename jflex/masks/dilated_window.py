"""Dilated sliding window: every n-th neighbour (Longformer, https://arxiv.org/abs/2004.05150, section 3.1)."""

from __future__ import annotations

from jflex.mods.array_sizes import ready
from jflex.mods.compose import MaskMod


@ready
def dilated_window(left: int, right: int = 0, *, dilation: int) -> MaskMod:
    """Shows every `dilation`-th key from `left` positions before the query to `right` positions after it.

    Args:
      left: How far the window reaches back, in positions.
      right: How far it reaches forward, in positions.
      dilation: Distance between visible keys; the query's own key is one of them.

    Returns:
      A mask_mod.

    Raises:
      ValueError: `dilation` is not positive.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(dilated_window(4, dilation=2), None, None, 5, 5)[0, 0, 4].astype(int).tolist()
    [1, 0, 1, 0, 1]
    """
    if dilation < 1:
        raise ValueError(f"`dilation` must be at least 1. Got {dilation}.")

    def window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance <= left) & (distance >= -right) & (distance % dilation == 0)

    return window
