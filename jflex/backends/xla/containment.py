"""Keeps masked NaN out of sums, in plain JAX: a weight of 0 times NaN is NaN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_batching.custom_vmap
def all_of_batch(x: jax.Array) -> jax.Array:
    """A boolean; under `jax.vmap`, whether it is true for the whole batch.

    So a `lax.cond` on it stays a branch: with a predicate for each entry, both branches would run.
    """
    return x


@all_of_batch.def_vmap
def _all_of_batch(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return all_of_batch(jnp.all(x)), False


def all_finite(x: jax.Array) -> jax.Array:
    """True if an array, or the batch of `jax.vmap`, is finite; False, too, if its sum overflows: a sum is fast."""
    return all_of_batch(jnp.isfinite(jnp.sum(x if x.dtype.itemsize > 2 else x.astype(jnp.float32))))


def cleared(x: jax.Array) -> jax.Array:
    """Replaces NaN and infinity by 0."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def masked_product(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    weights: jax.Array,
    x: jax.Array,
    # evaluates which weights are not masked, in their shape or broadcast to it; None for all
    visible: Callable[[], jax.Array] | None,
    is_clean: jax.Array | bool | None = None,  # True if `x` is finite, or nothing is masked; None to test `x` here
) -> jax.Array:
    """``product(weights, x)``, to which masked rows of `x` add nothing, even if they are NaN."""
    if visible is None:
        return product(weights, x)

    def contained() -> jax.Array:
        seen = jnp.broadcast_to(visible(), weights.shape).astype(weights.dtype)
        out, is_nan = product(weights, cleared(x)), jnp.isnan(x)
        for value in (jnp.inf, -jnp.inf):  # their sum is NaN
            count = product(seen, ((x == value) | is_nan).astype(x.dtype))
            out = out + jnp.where(count > 0, value, 0.0).astype(out.dtype)
        return out

    return lax.cond(all_finite(x) if is_clean is None else is_clean, lambda: product(weights, x), contained)
