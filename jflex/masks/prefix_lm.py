"""Prefix language modelling: a prefix that all see, then causal (T5, https://arxiv.org/abs/1910.10683, section 3.2)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods import MaskMod


def prefix_lm(prefix_length: int | Int[ArrayLike, ""] | Int[ArrayLike, " B"]) -> MaskMod:
    """Shows the prefix to every query, and the keys up to the query itself.

    Args:
      prefix_length: Length of the prefix; an array of one axis holds one for every batch entry.

    Returns:
      A mask_mod.

    >>> from jflex.dense_mask import create_mask
    >>> create_mask(prefix_lm(2), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    if jnp.ndim(prefix_length) == 0:
        return lambda b, h, q_idx, kv_idx: (kv_idx < prefix_length) | (q_idx >= kv_idx)
    lengths = jnp.asarray(prefix_length)
    return lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) | (q_idx >= kv_idx)
