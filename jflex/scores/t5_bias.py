"""The bucketed relative bias of T5 (https://arxiv.org/abs/1910.10683, section 2.1)."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.types import ScoreMod


@ready
def t5_bias(table: Float[ArrayLike, "Hq N"], *, bidirectional: bool, max_distance: int = 128) -> ScoreMod:
    """Adds ``table[h, bucket(kv_idx - q_idx)]`` to the scores: small distances have their own buckets, others share.

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
