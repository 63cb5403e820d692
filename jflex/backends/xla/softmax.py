"""Online softmax of a block of scores in plain JAX, in base e (see `pallas_kernels.softmax`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jflex.backends.base import Saved, SavedCotangents
from pallas_kernels.spec import AttentionSpec


class SoftmaxState(NamedTuple):
    """The online softmax state of the rows of a unit, after some of the blocks."""

    row_max: jax.Array
    row_sum: jax.Array  # sum of the weights ``exp(score - row_max)``
    out: jax.Array  # sum of the weights times the values
    row_logs: jax.Array | None = None  # sum of the weights times their logarithms, for the entropy; None without it


def start(spec: AttentionSpec, shape: tuple[int, ...], dtype: DTypeLike) -> SoftmaxState:
    """The state of rows of this shape before the first block."""
    start = SoftmaxState(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, spec.Dv), dtype))
    return start._replace(row_logs=jnp.zeros(shape, dtype)) if "entropy" in spec.stats else start


def update(state: SoftmaxState, s: jax.Array, pv_dot: Callable[[jax.Array], jax.Array]) -> SoftmaxState:
    """One step of the online softmax; `pv_dot` multiplies the weights by the values."""
    row_max = jnp.maximum(state.row_max, jnp.max(s, axis=-1))
    shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    p = jnp.exp(s - shift[..., None])
    alpha = jnp.exp(state.row_max - shift)
    out = state.out * alpha[..., None] + pv_dot(p)
    row_logs = None
    if state.row_logs is not None:
        moved = state.row_logs + state.row_sum * _finite(state.row_max - shift)
        row_logs = moved * alpha + jnp.sum(p * _finite(s - shift[..., None]), axis=-1)
    return SoftmaxState(row_max, state.row_sum * alpha + jnp.sum(p, axis=-1), out, row_logs)


def _finite(log_of_weight: jax.Array) -> jax.Array:
    """Logarithms of weights; of a weight of 0 a finite one, because 0 times -inf is NaN."""
    return jnp.where(log_of_weight == -jnp.inf, 0.0, log_of_weight)


def finish(spec: AttentionSpec, state: SoftmaxState) -> Saved:
    """Output and row statistics; for fully masked rows 0, an lse and a max of -inf, and an entropy of 0."""
    empty = state.row_max == -jnp.inf
    safe = jnp.where(empty, 1.0, state.row_sum)
    out, log_sum = state.out / safe[..., None], jnp.log(safe)
    lse = jnp.where(empty, -jnp.inf, state.row_max + log_sum)
    entropy = None if state.row_logs is None else log_sum - state.row_logs / safe
    return Saved(out, lse, state.row_max if "max" in spec.stats else None, entropy)


class RowVectors(NamedTuple):
    """Row vectors of the backward pass, of one shape: lse, delta, and the cotangent of the entropy, or None."""

    lse: jax.Array
    delta: jax.Array
    d_entropy: jax.Array | None


def row_vectors(delta: jax.Array, saved: Saved, d_saved: SavedCotangents) -> RowVectors:
    """The vectors, in shape and dtype of `delta`, which is rowsum(dO * O) so far."""
    like = lambda x: x.reshape(delta.shape).astype(delta.dtype)
    lse, d_entropy = like(saved.lse), None
    if d_saved.lse is not None:
        delta = delta - like(d_saved.lse)
    if d_saved.entropy is not None:
        assert saved.entropy is not None  # it has a cotangent
        d_entropy = like(d_saved.entropy)
        delta = delta + d_entropy * like(saved.entropy)
    return RowVectors(jnp.where(lse == -jnp.inf, jnp.inf, lse), delta, d_entropy)  # exp(s - inf) is 0: an empty row
