"""Global tokens: attended to by all, and attend to all (Longformer, https://arxiv.org/abs/2004.05150, section 3.1)."""

from __future__ import annotations

from jax.typing import ArrayLike
from jaxtyping import Bool

from jflex.mods.array_sizes import ReadyMod, for_positions, ready
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


@ready
def global_tokens(is_global: Bool[ArrayLike, " S"]) -> MaskMod:
    """Shows every key to the global queries, and the global keys to every query. Add them to a window with `or_masks`.

    Args:
      is_global: Which positions are global, for queries and keys alike: booleans; may be longer than a call.

    Returns:
      A mask_mod.

    Raises:
      TypeError: `is_global` is not boolean.
      ValueError: `is_global` does not have one axis.

    >>> import jax.numpy as jnp
    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(global_tokens(jnp.array([True, False, False])), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]

    With a window, as in Longformer:

    >>> import jflex
    >>> mask_mod = jflex.or_masks(jflex.masks.sliding_window(1, 1), global_tokens(jnp.arange(8) == 3))
    >>> print(jflex.create_block_mask(mask_mod, None, None, 8, 8, block_size=1))
    BlockMask(shape=(1, 1, 8, 8), block_size=(1, 1), sparsity=50.00%)
    batch 0, head 0
    ████  ██        |
    ████████        |
      ██████        |
    ████████████████|
          ██████    |
          ████████  |
          ██  ██████|
          ██    ████|
    """
    flags = checked_array(is_global, "`is_global` of `global_tokens`", "booleans", "[S]")
    rule = "`is_global` of `global_tokens` must hold one flag for each {}"
    return ReadyMod(
        lambda b, h, q_idx, kv_idx: flags[q_idx] | flags[kv_idx],
        for_positions(flags.shape[0], rule, "Pass flags [{}]."),
    )
