"""Keeps masked NaN out of sums, in plain JAX: a weight of 0 times NaN is NaN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_batching.custom_vmap
def all_finite(x: jax.Array) -> jax.Array:
    """Whether an array is finite; under `jax.vmap`, whether the whole batch is.

    So a `lax.cond` on it stays a branch: with a predicate for each entry, both branches would run.
    """
    return jnp.all(jnp.isfinite(x))


@all_finite.def_vmap
def _all_finite_of_batch(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return all_finite(x), False


def cleared(x: jax.Array) -> jax.Array:
    """Replaces NaN and infinity by 0."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def masked_product(
    product: Callable[[jax.Array, jax.Array], jax.Array], weights: jax.Array, x: jax.Array, visible: jax.Array | None
) -> jax.Array:
    """``product(weights, x)``, to which masked rows of `x` add nothing, even if they are NaN.

    Args:
      product: A GEMM: sums of weights times rows.
      weights: Weights, 0 where masked.
      x: Rows.
      visible: Which weights are not masked, in their shape or broadcast to it; None for all.

    Returns:
      The sums; NaN or infinite where a visible row is.
    """
    if visible is None:
        return product(weights, x)

    def contained() -> jax.Array:
        seen = jnp.broadcast_to(visible, weights.shape).astype(weights.dtype)

        def with_value(value: jax.Array, out: jax.Array) -> jax.Array:
            chosen = jnp.where(value == value, x == value, x != x)
            return out + jnp.where(product(seen, chosen.astype(x.dtype)) > 0, value, 0.0).astype(out.dtype)

        values = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan], x.dtype)  # in a loop, to take the memory of one GEMM
        return lax.fori_loop(0, 3, lambda i, out: with_value(values[i], out), product(weights, cleared(x)))

    return lax.cond(all_finite(x), lambda: product(weights, x), contained)
