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

LOG_OF_ZERO = -1000.0  # its exponential is 0 in float64, too


def fold_sinks(spec: AttentionSpec, saved: Saved, sinks: jax.Array | None) -> Saved:
    """The results of a dense call with sinks, from those without; rounds `out` once more, to its dtype."""
    if sinks is None:
        return saved
    state = AttentionState.from_attention(saved.out, saved.lse, spec.layout)
    out, lse = with_sinks(state, sinks).to_attention(spec.layout)
    return Saved(out, lse, saved.max, None if saved.entropy is None else _entropy_with_sinks(saved, sinks, lse))


def _entropy_with_sinks(saved: Saved, sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """The entropy with the weight of the sink, by the chain rule: that between keys and sink, and that among keys.

    Args:
      saved: The results without sinks.
      sinks: [Hq].
      lse: With sinks.
    """
    assert saved.entropy is not None  # the caller has it
    of_keys, of_sink = (log_weight(x, lse) for x in (saved.lse, sinks[None, :, None].astype(lse.dtype)))
    return jnp.exp(of_keys) * (saved.entropy - of_keys) - jnp.exp(of_sink) * of_sink


def log_weight(score: jax.Array, lse: jax.Array) -> jax.Array:
    """``score - lse``, but a large negative number for a weight of 0, so that weight times logarithm is 0."""
    return jnp.where((score == -jnp.inf) | (lse == -jnp.inf), LOG_OF_ZERO, score - lse)


def sinks_gradient(spec: AttentionSpec, sinks: jax.Array, saved: Saved, d_saved: SavedCotangents) -> jax.Array:
    """The gradient of the sinks, [Hq]: minus the sum over rows of the sink's weight times delta.

    The value of a sink is zero, so its dP is that of the entropy alone, and without it dS = P * (dP - delta) is ``-P *
    delta``.
    """
    # Not `pallas_kernels.gradients.row_statistics`: this is in the dtype of the sinks, float64 too.
    heads_first = (lambda x: x.swapaxes(1, 2)) if spec.layout == "BTNH" else (lambda x: x)
    out, d_out = (heads_first(x).astype(sinks.dtype) for x in (saved.out, d_saved.out))
    delta = jnp.sum(out * d_out, axis=-1) - (0 if d_saved.lse is None else d_saved.lse)
    lse = jnp.where(saved.lse == -jnp.inf, jnp.inf, saved.lse)  # no key and a sink of -inf: a weight of 0
    weight = jnp.exp(sinks[None, :, None] - lse)
    if d_saved.entropy is not None and saved.entropy is not None:  # dP is ``-d_entropy * log P``, and delta its mean
        delta = delta + d_saved.entropy * (saved.entropy + log_weight(sinks[None, :, None], saved.lse))
    return -jnp.sum(jnp.where(weight == 0, 0, weight * delta), axis=(0, 2))
