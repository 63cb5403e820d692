"""The logarithm of a sum of exponentials: from and to other libraries, and the weight that it gives a score."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_OF_ZERO = -1000.0  # its exponential is 0 in float64, too


def log_weight(score: jax.Array, lse: jax.Array) -> jax.Array:
    """``score - lse``, but a large negative number for a weight of 0, so that weight times logarithm is 0."""
    return jnp.where((score == -jnp.inf) | (lse == -jnp.inf), LOG_OF_ZERO, score - lse)


def lse_to_base2(lse: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """From the natural logarithm, which jflex uses, to base 2, which FlashInfer uses.

    >>> lse_to_base2(jnp.log(jnp.array([8.0, 0.0]))).tolist()
    [3.0, -inf]
    """
    return lse * math.log2(math.e)


def lse_from_base2(lse: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """From base 2, which FlashInfer uses, to the natural logarithm, which jflex uses.

    >>> jnp.exp(lse_from_base2(jnp.array([3.0, -jnp.inf]))).round(4).tolist()
    [8.0, 0.0]
    """
    return lse * math.log(2)


def lse_from_flash(lse: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """From FlashAttention and FlashMLA, whose lse is ``+inf`` where no key is visible, to ``-inf`` there.

    >>> lse_from_flash(jnp.array([2.0, jnp.inf])).tolist()
    [2.0, -inf]
    """
    return jnp.where(lse == jnp.inf, -jnp.inf, lse)
