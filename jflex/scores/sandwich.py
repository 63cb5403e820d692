"""Sandwich: what sinusoidal embeddings say of distances, as a bias (https://arxiv.org/abs/2212.10356)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jflex.mods.array_sizes import ReadyMod, Requirement, for_positions, ready
from jflex.mods.types import ScoreMod


@ready
def sandwich(heads: int, length: int, *, dimension: int = 128) -> ScoreMod:
    """Adds ``heads / (8 (h + 1)) * sum_n cos((q_idx - kv_idx) / 10000 ** (2 n / dimension))`` to the scores.

    The sum, over ``n < dimension / 2``, is the product of the sinusoidal embeddings of the two positions; it falls with
    the distance, faster in the first heads. Nothing is learned.

    Args:
      heads: Number of query heads.
      length: Number of positions; for each distance the sum is computed once.
      dimension: Size of the embeddings, even.

    Returns:
      A score_mod, which uses ``h``.

    Raises:
      ValueError: A size is not positive, or `dimension` is odd.

    >>> score_mod = sandwich(8, 100)
    >>> [round(float(score_mod(0.0, 0, 0, 99, 99 - distance)), 2) for distance in (0, 1, 10, 99)]
    [64.0, 62.09, 42.82, 27.69]
    """
    if heads < 1 or length < 1 or dimension < 2 or dimension % 2:
        raise ValueError(
            "`heads` and `length` of `sandwich` must be positive, and `dimension` positive and even. "
            f"Got {heads}, {length} and {dimension}."
        )
    frequencies = 10000.0 ** (-2 * np.arange(dimension // 2) / dimension)
    sums = jnp.asarray(np.cos(np.arange(length)[:, None] * frequencies).sum(-1), jnp.float32)
    factors = jnp.asarray(heads / (8 * np.arange(1, heads + 1)), jnp.float32)

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + factors[h] * sums[jnp.abs(q_idx - kv_idx)]

    of_heads = Requirement("h", heads, "`heads` of `sandwich` must be the number of query heads", "Pass `heads={}`.")
    rule = "`length` of `sandwich` must count the positions of each {}"
    return ReadyMod(add_bias, (of_heads, *for_positions(length, rule, "Pass `length={}`.")))
