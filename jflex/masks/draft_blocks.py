"""Training mask of draft heads that propose blocks of tokens (JetSpec, https://arxiv.org/abs/2606.18394)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods.array_sizes import ready
from jflex.mods.arrays import checked_array, known_count
from jflex.mods.compose import MaskMod


@ready
def draft_blocks(prefix_length: int | Int[ArrayLike, ""], block: int) -> MaskMod:
    """Shows to each token of a drafted block the prefix, and its own block up to itself.

    Queries are the tokens of the blocks, one block after the other; keys are the prefix and then the same tokens. With
    trees in place of chains, see `tree`.

    Args:
      prefix_length: Keys before the first block.
      block: Tokens of a block.

    Returns:
      A mask_mod, for any number of blocks.

    Raises:
      TypeError: `prefix_length` is not an integer.
      ValueError: `block` is not positive, or `prefix_length` is negative.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> print(create_block_mask(draft_blocks(3, 2), None, None, 6, 9, block_size=1))
    BlockMask(shape=(1, 1, 6, 9), block_size=(1, 1), sparsity=50.00%)
    batch 0, head 0
    ████████          |
    ██████████        |
    ██████    ██      |
    ██████    ████    |
    ██████        ██  |
    ██████        ████|
    """
    known = known_count(prefix_length)
    argument = "`prefix_length` of `draft_blocks`"
    prefix = known if known is not None else checked_array(prefix_length, argument, "integers").astype(jnp.int32)
    if block < 1:
        raise ValueError(f"`block` of `draft_blocks` must be positive. Got {block}.")
    if known is not None and known < 0:
        raise ValueError(f"{argument} must not be negative. Got {known}.")

    def mask(b, h, q_idx, kv_idx):
        token = kv_idx - prefix
        own = (q_idx // block == token // block) & (q_idx >= token)
        return (kv_idx < prefix) | own

    return mask
