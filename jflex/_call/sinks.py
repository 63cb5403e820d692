"""Attention sinks: a logit for each query head that enters the denominator of the softmax, and has no value.

A sink is the state of one key whose value is zero (`jflex.with_sinks`). So the backward kernels need not know of it:
they take weights from the lse, which has the sink in it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jflex.backends.base import Saved, SavedCotangents
from jflex.state import AttentionState, with_sinks
from pallas_kernels.spec import AttentionSpec


def fold_sinks(spec: AttentionSpec, saved: Saved, sinks: jax.Array | None) -> Saved:
    """Out and lse of a dense call with sinks, from those without; rounds `out` once more, to its dtype."""
    if sinks is None:
        return saved
    state = AttentionState.from_attention(saved.out, saved.lse, spec.layout)
    return Saved(*with_sinks(state, sinks).to_attention(spec.layout))


def sinks_gradient(spec: AttentionSpec, sinks: jax.Array, saved: Saved, d_saved: SavedCotangents) -> jax.Array:
    """The gradient of the sinks, [Hq]: minus the sum over rows of the sink's weight times delta.

    The value of a sink is zero, so its dP is, and its dS = P * (dP - delta) is ``-P * delta``.
    """
    # Not `pallas_kernels.gradients.row_statistics`: this is in the dtype of the sinks, float64 too.
    heads_first = (lambda x: x.swapaxes(1, 2)) if spec.layout == "BTNH" else (lambda x: x)
    out, d_out = (heads_first(x).astype(sinks.dtype) for x in (saved.out, d_saved.out))
    delta = jnp.sum(out * d_out, axis=-1) - (0 if d_saved.lse is None else d_saved.lse)
    lse = jnp.where(saved.lse == -jnp.inf, jnp.inf, saved.lse)  # no key and a sink of -inf: a weight of 0
    weight = jnp.exp(sinks[None, :, None] - lse)
    return -jnp.sum(jnp.where(weight == 0, 0, weight * delta), axis=(0, 2))
