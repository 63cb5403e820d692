"""Scores of the distance of query and key: ALiBi, learned relative biases, sinusoidal embeddings."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jflex.mods.array_sizes import ReadyMod, Requirement, for_positions, ready
from jflex.mods.arrays import at_compile_time, checked_array
from jflex.mods.types import ScoreMod


@ready
def alibi(slopes: Float[ArrayLike, " Hq"]) -> ScoreMod:
    """Adds ``slopes[h] * (kv_idx - q_idx)`` to the scores: a penalty for keys before the query, linear in distance.

    Source: ALiBi, https://arxiv.org/abs/2108.12409.

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


@ready
def relative_bias(table: Float[ArrayLike, "Hq N"]) -> ScoreMod:
    """Adds ``table[h, clip(kv_idx - q_idx, -m, m) + m]`` to the scores, where ``N = 2 m + 1``.

    Source: Shaw et al., https://arxiv.org/abs/1803.02155.

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


@ready
def t5_bias(table: Float[ArrayLike, "Hq N"], *, bidirectional: bool, max_distance: int = 128) -> ScoreMod:
    """Adds ``table[h, bucket(kv_idx - q_idx)]`` to the scores: small distances have their own buckets, others share.

    Source: T5, https://arxiv.org/abs/1910.10683, section 2.1.

    Args:
      table: One number for each query head and bucket.
      bidirectional: True as in T5's encoder: half of the buckets are for keys after the query. False as in its decoder:
        keys after the query share the bucket of distance 0; use a causal mask.
      max_distance: Distances from here on share the last bucket.

    Raises:
      TypeError: `table` is not floating-point.
      ValueError: `table` does not have two axes, or has too few buckets for the distances.

    >>> score_mod = t5_bias(jnp.arange(32.0)[None], bidirectional=False)
    >>> [int(score_mod(0.0, 0, 0, 500, 500 - distance)) for distance in (0, 15, 16, 64, 127, 400)]
    [0, 15, 16, 26, 31, 31]
    """
    table = checked_array(table, "`table` of `t5_bias`", "floating-point")
    if table.ndim != 2:
        raise ValueError(f"`table` must be [Hq, buckets]. Got shape {table.shape}.")
    buckets = table.shape[1] // 2 if bidirectional else table.shape[1]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(f"`table` of {table.shape[1]} buckets does not fit `max_distance` {max_distance}.")

    def add_bias(score, b, h, q_idx, kv_idx):
        ahead = kv_idx - q_idx
        distance = jnp.abs(ahead) if bidirectional else jnp.maximum(-ahead, 0)
        ratio = jnp.maximum(distance, 1).astype(jnp.float32) / exact
        far = exact + (jnp.log(ratio) / math.log(max_distance / exact) * (buckets - exact)).astype(jnp.int32)
        bucket = jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
        if bidirectional:
            bucket += jnp.where(ahead > 0, buckets, 0)
        return score + table[h, bucket].astype(jnp.float32)

    rule = "`table` of `t5_bias` must hold one row for each query head"
    return ReadyMod(add_bias, (Requirement("h", table.shape[0], rule, "Pass a table of {} rows."),))


@ready
def sandwich(heads: int, length: int, *, dimension: int = 128) -> ScoreMod:
    """Adds ``heads / (8 (h + 1)) * sum_n cos((q_idx - kv_idx) / 10000 ** (2 n / dimension))`` to the scores.

    Source: Sandwich, https://arxiv.org/abs/2212.10356.

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
