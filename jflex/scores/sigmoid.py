"""Sigmoid attention: each score becomes a weight by itself (https://arxiv.org/abs/2409.04431)."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike
from jaxtyping import Float

from jflex.mods.array_sizes import ready
from jflex.mods.types import ScoreMod


@ready
def sigmoid(bias: float | Float[ArrayLike, ""]) -> ScoreMod:
    """Maps a score to ``sigmoid(score + bias)``, for calls with ``normalize="none"``.

    Args:
      bias: Added to each score. Ramapuram et al. start from ``-log(S)`` for S keys: then the weights of a
        row sum to about 1.

    References:
      Ramapuram et al. 2024, Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv:2409.04431.

    >>> import jax.numpy as jnp, jflex
    >>> q, k, v = jnp.zeros((1, 1, 1, 16)), jnp.ones((1, 4, 1, 16)), jnp.ones((1, 4, 1, 2))
    >>> jflex.flex_attention(q, k, v, jflex.scores.sigmoid(0.0), normalize="none").tolist()  # four keys of weight 1/2
    [[[[2.0, 2.0]]]]
    """
    return lambda score, b, h, q_idx, kv_idx: jax.nn.sigmoid(score + bias)
