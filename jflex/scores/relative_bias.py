"""Relative position bias: a learned number for each head and distance (Shaw et al., https://arxiv.org/abs/1803.02155)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.types import ScoreMod


@ready
def relative_bias(table: Float[ArrayLike, "Hq N"]) -> ScoreMod:
    """Adds ``table[h, clip(kv_idx - q_idx, -m, m) + m]`` to the scores, where ``N = 2 m + 1``.

    Args:
      table: One number for each query head and distance from ``-m`` (the key comes first) to ``m``; larger distances
        are clipped.

    Raises:
      TypeError: `table` is not floating-point.
      ValueError: `table` does not have two axes, the second of odd size.

    >>> score_mod = relative_bias(jnp.array([[10.0, 0.0, 20.0]]))
    >>> [float(score_mod(1.0, 0, 0, 5, key)) for key in (0, 5, 6)]
    [11.0, 1.0, 21.0]
    """
    table = checked_array(table, "`table` of `relative_bias`", "floating-point")
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise ValueError(f"`table` must be [Hq, 2 * m + 1] for distances from -m to m. Got shape {table.shape}.")
    farthest = table.shape[1] // 2

    def add_bias(score, b, h, q_idx, kv_idx):
        distance = jnp.clip(kv_idx - q_idx, -farthest, farthest)
        return score + table[h, distance + farthest].astype(jnp.float32)

    rule = "`table` of `relative_bias` must hold one row for each query head"
    return ReadyMod(add_bias, (Requirement("h", table.shape[0], rule, "Pass a table of {} rows."),))
