"""Prefix language modelling: a prefix that all see, then causal (T5, https://arxiv.org/abs/1910.10683, section 3.2)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jflex.mods import MaskMod


def prefix_lm(prefix_length: int | Int[Array, ""] | Int[Array, " B"]) -> MaskMod:
    """Shows the prefix to every query, and the keys up to the query itself.

    Args:
      prefix_length: Length of the prefix; an array of one axis holds one for every batch entry.

    Returns:
      A mask_mod.

    >>> from jflex.dense_mask import create_mask
    >>> create_mask(prefix_lm(2), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    by_batch = jnp.ndim(prefix_length) == 1
    lengths = jnp.asarray(prefix_length) if by_batch else prefix_length

    def prefix_or_causal(b, h, q_idx, kv_idx):
        length = lengths[b] if by_batch else lengths
        return (kv_idx < length) | (q_idx >= kv_idx)

    return prefix_or_causal
