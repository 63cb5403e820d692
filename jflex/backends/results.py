"""Results of a dense call without keys, and with attention sinks.

A sink is a logit for each query head that enters the denominator of the softmax and has no value: the state of one key
whose value is zero (`jflex.with_sinks`). So backward kernels need not know of it: they take weights from the lse, which
has the sink in it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jflex.backends.base import Saved, SavedCotangents
from jflex.states.lse import log_weight
from jflex.states.merging import with_sinks
from jflex.states.state import AttentionState
from jflex.states.stats import AttentionStats
from pallas_kernels.spec import AttentionSpec


def results_of_no_keys(spec: AttentionSpec, sinks: jax.Array | None) -> Saved:
    """The results of a dense call without queries or keys."""
    fill = lambda x: jnp.full(spec.lse_shape(), x, jnp.float32)
    values = {"max": -jnp.inf, "entropy": 0.0}
    stats = {name: fill(values[name]) for name in spec.stats}
    return fold_sinks(spec, Saved(jnp.zeros(spec.out_shape(), spec.out_dtype), fill(-jnp.inf), **stats), sinks)


def fold_sinks(spec: AttentionSpec, saved: Saved, sinks: jax.Array | None) -> Saved:
    """The results of a dense call with sinks, from those without; rounds `out` once more, to its dtype."""
    if sinks is None:
        return saved
    stats = AttentionStats(saved.lse, saved.max, saved.entropy)
    state = with_sinks(AttentionState.from_attention(saved.out, stats, spec.layout), sinks)
    out, lse = state.to_attention(spec.layout)
    return Saved(out, lse, *(None if x is None else x.swapaxes(1, 2) for x in (state.max, state.entropy)))


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
