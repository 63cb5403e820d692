"""Peers: what a user would write or call instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Attention = Callable[[Any, Any, Any], Any]


def dense_masked(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S H D"],
    value: Float[Array, "B S H Dv"],
    visible: Bool[Array, "T S"],
) -> Float[Array, "B T H Dv"]:
    """Softmax attention in plain jnp: all scores, then the mask."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def forward_and_backward(attention: Attention) -> Callable[..., Any]:
    """``(query, key, value, cotangent) -> (out, gradients)`` of an attention."""

    def both(query, key, value, cotangent):
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(cotangent)

    return both
