"""A dense bias: one number for every query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float


def bias(values: Float[ArrayLike, "B H T S"]) -> Callable[..., Any]:
    """Adds ``values[b, h, q_idx, kv_idx]`` to the scores.

    Args:
      values: The bias. Batch and heads may be 1, shared by all.

    Returns:
      A score_mod.

    Raises:
      ValueError: `values` does not have four axes.

    >>> float(bias(jnp.ones((1, 1, 2, 2)))(1.0, 0, 3, 1, 1))
    2.0
    """
    values = jnp.asarray(values)
    if values.ndim != 4:
        raise ValueError(f"`values` must have four axes [B, H, T, S]. Got shape {values.shape}.")
    many_batches, many_heads = values.shape[0] > 1, values.shape[1] > 1

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + values[b if many_batches else 0, h if many_heads else 0, q_idx, kv_idx].astype(jnp.float32)

    return add_bias
