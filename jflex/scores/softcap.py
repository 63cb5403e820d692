"""Soft capping: bounds the scores (Gemma 2, https://arxiv.org/abs/2408.00118, section 2)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from jflex.mods.array_sizes import ready
from jflex.mods.types import ScoreMod


@ready
def softcap(cap: float | Float[ArrayLike, ""]) -> ScoreMod:
    """Maps a score to ``cap * tanh(score / cap)``.

    Args:
      cap: The bound, positive; 50.0 in Gemma 2.

    Raises:
      ValueError: `cap` is a number that is not positive.

    >>> round(float(softcap(2.0)(1.0, 0, 0, 0, 0)), 4)
    0.9242
    """
    if isinstance(cap, (int, float)) and not cap > 0:
        raise ValueError(f"`cap` must be positive. Got {cap}.")
    return lambda score, b, h, q_idx, kv_idx: cap * jnp.tanh(score / cap)
