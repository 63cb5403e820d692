"""Sliding-window attention: a query attends to its neighbours (Longformer, https://arxiv.org/abs/2004.05150)."""

from __future__ import annotations

from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods.array_sizes import ready
from jflex.mods.compose import MaskMod


@ready
def sliding_window(left: int | Int[ArrayLike, ""], right: int | Int[ArrayLike, ""] = 0) -> MaskMod:
    """Shows the keys from `left` positions before the query to `right` positions after it.

    With ``right=0`` the window is causal and holds ``left + 1`` keys, the query's own included: for a model with a
    window of 4096 that counts the query's own key, pass ``left=4095``.

    Args:
      left: Keys before the query.
      right: Keys after the query.

    Returns:
      A mask_mod.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(sliding_window(1), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    def window(b, h, q_idx, kv_idx):
        return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

    return window
