"""Dense scores [B, H, T, S] and their softmax, with masked NaN contained: for `reference` and `attention_weights`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jflex.backends.xla.containment import cleared
from jflex.states.lse import log_weight
from pallas_kernels.spec import Mod


def einsum(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A GEMM at the highest precision."""
    return jnp.einsum(axes, a, b, precision=jax.lax.Precision.HIGHEST)


def scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """The products of [B, H, T, D] and [B, H, S, D], not scaled."""
    return einsum("bnth,bnsh->bnts", query, key)


_values_cleared = jax.custom_jvp(cleared)  # with the derivative of the identity
_values_cleared.defjvp(lambda primals, tangents: (cleared(*primals), *tangents))


def contained_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """The scores; the derivative takes NaN in query and key as 0, because a masked dS is 0, and 0 times NaN is NaN.

    A visible NaN score still makes dS itself NaN.
    """
    clean = scores(_values_cleared(query), _values_cleared(key))
    return clean + jax.lax.stop_gradient(scores(query, key) - clean)


def modified(
    mod: Mod, operands: Sequence[jax.Array], score: jax.Array, positions: Sequence[jax.Array], visible: jax.Array
) -> jax.Array:
    """The score mod on all scores.

    Where masked, it is evaluated at a visible position: a mod may be NaN or infinite where masked
    (``log(q_idx - kv_idx)``), and 0 times its NaN derivative would reach captured arrays. If no position is visible,
    derivatives are 0.
    """
    visible = jnp.broadcast_to(visible, score.shape)
    seen = jnp.argmax(visible)
    some = visible.reshape(-1)[seen]
    instead = lambda x: jnp.where(visible, x, x.reshape(-1)[seen])
    constant_unless_seen = lambda x: jnp.where(some, x, jax.lax.stop_gradient(x))
    score, operands = jax.tree.map(constant_unless_seen, (instead(score), tuple(operands)))
    call = lambda *args: mod(operands, *args)
    for _ in range(4):
        call = jax.vmap(call)
    return call(score, *map(instead, positions))


def stats_of(
    score: jax.Array, visible: jax.Array, weights: jax.Array, lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The largest visible score of each row, without a derivative, and its entropy; see `AttentionStats`."""
    score = jnp.where(visible, score, -jnp.inf)
    entropy = -jnp.sum(weights * log_weight(score, lse[..., None]), axis=-1)
    if sinks is not None:
        of_sink = log_weight(sinks.astype(lse.dtype)[None, :, None], lse)
        entropy = entropy - jnp.exp(of_sink) * of_sink
    return jnp.max(jax.lax.stop_gradient(score), axis=-1), entropy


def softmax(score: jax.Array, visible: jax.Array, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Softmax over the visible keys and the sink of the head, and its logsumexp; 0 and -inf for a row without any.

    Masked scores are replaced before anything is computed from them, so that neither they nor their derivatives (of
    ``1 / score``, say) can introduce NaN.
    """
    score = jnp.where(visible, score, -jnp.inf)
    sink = jnp.full((), -jnp.inf, score.dtype) if sinks is None else sinks.astype(score.dtype)[None, :, None, None]
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(score, axis=-1, keepdims=True), sink))
    empty = top == -jnp.inf
    start = jnp.where(empty, 0, top)
    shifted = jnp.exp(score - start)
    total = jnp.sum(shifted, axis=-1, keepdims=True) + (0 if sinks is None else jnp.exp(sink - start))
    safe = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, top) + jnp.log(safe))
    return shifted / safe, lse[..., 0]
