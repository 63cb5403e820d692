"""Padding: rows of different lengths in one batch."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods import MaskMod


def padding(kv_lengths: Int[ArrayLike, " B"]) -> MaskMod:
    """Shows the first ``kv_lengths[b]`` keys of every batch entry.

    Padded queries still see keys: what they give is for the caller to drop.

    Args:
      kv_lengths: How many keys of each batch entry are real.

    Returns:
      A mask_mod; it uses ``b``.

    >>> from jflex.dense_mask import create_mask
    >>> create_mask(padding(jnp.array([1, 3])), 2, None, 1, 3)[:, 0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    lengths = jnp.asarray(kv_lengths)
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]
