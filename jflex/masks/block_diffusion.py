"""Training mask of block diffusion language models (BD3-LM, https://arxiv.org/abs/2503.09573, section 3.3)."""

from __future__ import annotations

import jax.numpy as jnp

from jflex.mods.array_sizes import ReadyMod, for_positions, ready
from jflex.mods.compose import MaskMod


@ready
def block_diffusion(length: int, block: int) -> MaskMod:
    """A noised copy of a sequence, at positions 0 to ``length - 1``, followed by the clean one.

    A noised or clean block attends to itself and to the clean blocks before it.

    Args:
      length: Tokens of the sequence; the mask is for ``2 * length`` queries and keys, or fewer.
      block: Tokens of a diffusion block.

    Returns:
      A mask_mod.

    Raises:
      ValueError: A size is not positive.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(block_diffusion(2, 1), None, None, 4, 4)[0, 0].astype(int).tolist()
    [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    if length < 1 or block < 1:
        raise ValueError(f"`length` and `block` must be positive. Got {length} and {block}.")

    def mask(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block = jnp.where(q_clean, q_idx - length, q_idx) // block
        kv_block = jnp.where(kv_clean, kv_idx - length, kv_idx) // block
        own = (q_clean == kv_clean) & (q_block == kv_block)
        return own | (kv_clean & (q_block > kv_block))

    rule = "`length` of `block_diffusion` must give 2 * length positions, one for each {}"
    remedy = "Pass the length of one copy, and pad each copy by itself."
    return ReadyMod(mask, for_positions(2 * length, rule, remedy))
