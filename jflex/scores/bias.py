"""A dense bias: one number for every query and key."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from jflex.mods.array_sizes import Axis, ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.types import ScoreMod


@ready
def bias(values: Float[ArrayLike, "B H T S"]) -> ScoreMod:
    """Adds ``values[b, h, q_idx, kv_idx]`` to the scores.

    Args:
      values: The bias. Batch and heads may be 1, shared by all; T and S may exceed those of a call.

    Raises:
      TypeError: `values` is not floating-point.
      ValueError: `values` does not have four axes.

    >>> float(bias(jnp.ones((1, 1, 2, 2)))(1.0, 0, 3, 1, 1))
    2.0
    """
    values = checked_array(values, "`values` of `bias`", "floating-point")
    if values.ndim != 4:
        raise ValueError(f"`values` must have four axes [B, H, T, S]. Got shape {values.shape}.")
    many_batches, many_heads = values.shape[0] > 1, values.shape[1] > 1

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + values[b if many_batches else 0, h if many_heads else 0, q_idx, kv_idx].astype(jnp.float32)

    axes: tuple[tuple[Axis, str, str], ...] = (
        ("b", "have the batch size of the call, or 1", "Pass values [{}, H, T, S]."),
        ("h", "have the query heads of the call, or 1", "Pass values [B, {}, T, S]."),
        ("q_idx", "hold one row for each query", "Pass values [B, H, {}, S]."),
        ("kv_idx", "hold one number for each key", "Pass values [B, H, T, {}]."),
    )
    shared = [axis for axis, many in (("b", many_batches), ("h", many_heads)) if not many]
    required = (
        Requirement(axis, size, f"`values` of `bias` must {rule}", remedy)
        for size, (axis, rule, remedy) in zip(values.shape, axes, strict=True)
        if axis not in shared
    )
    return ReadyMod(add_bias, tuple(required))
