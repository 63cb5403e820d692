"""Prefix language modelling: a prefix for all, then causal (T5, https://arxiv.org/abs/1910.10683, section 3.2)."""

from __future__ import annotations

from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


@ready
def prefix_lm(prefix_length: int | Int[ArrayLike, ""] | Int[ArrayLike, " B"]) -> MaskMod:
    """Shows the prefix to every query, and the keys up to the query itself.

    Args:
      prefix_length: Length of the prefix; an array of one axis holds one for every batch entry.

    Returns:
      A mask_mod.

    Raises:
      TypeError: `prefix_length` is not an integer.
      ValueError: `prefix_length` has more than one axis.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(prefix_lm(2), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    argument = "`prefix_length` of `prefix_lm`"
    lengths = prefix_length if isinstance(prefix_length, int) else checked_array(prefix_length, argument, "integers")
    if isinstance(lengths, int) or lengths.ndim == 0:
        return lambda b, h, q_idx, kv_idx: (kv_idx < prefix_length) | (q_idx >= kv_idx)
    if lengths.ndim > 1:
        raise ValueError(f"{argument} must be one length, or lengths [B]. Got shape {lengths.shape}.")
    rule = f"{argument} must be one length, or hold one for each batch entry"
    return ReadyMod(
        lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) | (q_idx >= kv_idx),
        (Requirement("b", lengths.shape[0], rule, "Pass lengths [{}]."),),
    )
