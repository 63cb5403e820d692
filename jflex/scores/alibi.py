"""ALiBi: a penalty that grows with distance (https://arxiv.org/abs/2108.12409)."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import at_compile_time, checked_array
from jflex.mods.types import ScoreMod


@ready
def alibi(slopes: Float[ArrayLike, " Hq"]) -> ScoreMod:
    """Adds ``slopes[h] * (kv_idx - q_idx)`` to the scores: a penalty for keys before the query, linear in distance.

    Combine it with a causal mask: the scores of keys after the query increase.

    Args:
      slopes: One slope for each query head; `alibi_slopes` gives those of the paper.

    Returns:
      A score_mod, which uses ``h``.

    Raises:
      TypeError: The slopes are not floating-point.
      ValueError: The slopes do not have one axis.

    >>> float(alibi(jnp.array([0.5]))(1.0, 0, 0, 4, 2))
    0.0
    """
    slopes = checked_array(slopes, "`slopes` of `alibi`", "floating-point", "[Hq]").astype(jnp.float32)
    rule = "`slopes` of `alibi` must hold one slope for each query head"
    return ReadyMod(
        lambda score, b, h, q_idx, kv_idx: score + slopes[h] * jnp.asarray(kv_idx - q_idx, jnp.float32),
        (Requirement("h", slopes.shape[0], rule, "Pass `alibi_slopes({})`."),),
    )


@at_compile_time
def alibi_slopes(heads: int) -> Float32[Array, " {heads}"]:
    """The slopes of the paper: ``2 ** (-8 (h + 1) / heads)`` for a power of two.

    For other numbers of heads, these are the slopes of the power of two below, then every second one of the power
    above, as in the authors' code.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    below = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    slopes += [2.0 ** (-4 * (h + 1) / below) for h in range(0, 2 * (heads - below), 2)]
    return jnp.asarray(slopes, jnp.float32)
