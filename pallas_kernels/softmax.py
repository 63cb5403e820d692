"""Online softmax in base 2 (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691, section 3.1).

Marks of rows whose sums are not finite show where masked NaN reached a sum. A weight of 0 times NaN is NaN: one key
that no query may attend to would reach every output of its tile, and a page that one request leaves to another would
carry it on. To clear every tile before its MMA costs on every tile. But a sum never loses a NaN. So kernels mark the
rows whose sums are not finite, and a second launch, the *repair*, computes their tiles again with cleared operands
(`pallas_kernels.triton.containment`). It reads the marks, and exits at once where there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.spec import LN_2, LOG2_E


class ScoreTile(NamedTuple):
    """A tile of scores."""

    s: jax.Array  # the scores, up to the `log2_scale` of the kernel; -inf where masked
    visible: jax.Array | None  # False where masked, or None where nothing is masked
    score: Evaluation | None  # the evaluation of the score mod, for its derivative
    kept: jax.Array | None = None  # False where dropout drops the weight, or None without dropout

    def clear(self, x: jax.Array) -> jax.Array:
        """A tile with zeros where masked."""
        return x if self.visible is None else jnp.where(self.visible, x, 0.0)

    def drop(self, x: jax.Array) -> jax.Array:
        """A tile with zeros where dropout drops the weight."""
        return x if self.kept is None else jnp.where(self.kept, x, 0.0)


class SoftmaxState(NamedTuple):
    """The online softmax state of the rows of a tile, after some of the keys.

    A weight is ``2 ** (log2_scale * (score - row_max))``, with a scale of the caller's. So the softmax scale and log2 e
    cost nothing: with the subtraction they are one FMA for each element.
    """

    row_max: jax.Array  # float32 [rows]: the largest score so far
    row_sum: jax.Array  # float32 [rows]: sum of the weights
    out: tuple[jax.Array, ...]  # float32 [rows, width] each: sum of the weights times the values, in chunks of columns
    # float32 [rows]: sum of the weights times their logarithms of base 2, for the entropy; None without it
    row_logs: jax.Array | None = None


LEAST_EXPONENT = -200.0  # of base 2: its weight is 0, and 0 times it is 0, as 0 times -inf is not


def start(rows: int, out: tuple[jax.Array, ...], *, entropy: bool = False) -> SoftmaxState:
    """The state before the first tile of keys; `out` is zeros."""
    state = SoftmaxState(jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32), out)
    return state._replace(row_logs=jnp.zeros((rows,), jnp.float32)) if entropy else state


def update(
    state: SoftmaxState,
    s: jax.Array,  # scores [rows, keys]; -inf where masked
    *,
    log2_scale: float,  # turns scores into exponents of base 2; positive
    exp2: Callable[[jax.Array, jax.Array], jax.Array],  # ``(s, row_max_log2) -> 2 ** (log2_scale * s - row_max_log2)``
    pv_dot: Callable[[jax.Array], tuple[jax.Array, ...]],  # the PV GEMM: multiplies a tile of weights by the values
    may_be_empty: bool,  # whether a row may still be fully masked after this tile: then ``-inf - -inf`` is avoided
    # whether a tile that a row is masked in must change no bit of it. Otherwise alpha may be off by one unit in the
    # last place from 1: the FMA subtracts the rounded product of an exact one
    exact: bool = False,
) -> SoftmaxState:
    """One step of the online softmax: rescales the state by alpha, and adds a tile of scores."""
    row_max = jnp.maximum(state.row_max, jnp.max(s, axis=1))
    row_max_log2 = row_max * log2_scale
    if may_be_empty:  # compared after scaling, by which scores below -2.3e38 overflow: they count as masked
        row_max_log2 = jnp.where(row_max_log2 == -jnp.inf, 0.0, row_max_log2)
    p, alpha = exp2(s, row_max_log2[:, None]), exp2(state.row_max, row_max_log2)
    alpha = jnp.where(row_max == state.row_max, 1.0, alpha) if exact else alpha
    out = tuple(x * alpha[:, None] + y for x, y in zip(state.out, pv_dot(p), strict=True))
    row_logs = None
    if state.row_logs is not None:
        exponent = jnp.maximum(s * log2_scale - row_max_log2[:, None], LEAST_EXPONENT)
        row_logs = _rescaled_logs(state, alpha, state.row_max * log2_scale - row_max_log2)
        row_logs = row_logs + jnp.sum(p * exponent, axis=1)
    return SoftmaxState(row_max, state.row_sum * alpha + jnp.sum(p, axis=1), out, row_logs)


def _rescaled_logs(state: SoftmaxState, alpha: jax.Array, log2_alpha: jax.Array) -> jax.Array:
    """``row_logs`` after a new row_max: each weight is multiplied by alpha, and its logarithm grows by log2_alpha."""
    assert state.row_logs is not None  # the caller has seen them
    return (state.row_logs + state.row_sum * jnp.maximum(log2_alpha, LEAST_EXPONENT)) * alpha


def add_weights(
    state: SoftmaxState, pv_dot: Callable[[jax.Array], tuple[jax.Array, ...]], p: jax.Array
) -> SoftmaxState:
    """One step without a softmax: `p` are weights, and only the output grows."""
    return state._replace(out=tuple(x + y for x, y in zip(state.out, pv_dot(p), strict=True)))


def with_sink(state: SoftmaxState, sink: jax.Array, log2_scale: float) -> SoftmaxState:
    """Adds the sink of a head to the state: a score with a value of zero; `sink` is a natural logit, a scalar."""
    row_max = jnp.maximum(state.row_max, sink * (LOG2_E / log2_scale))
    safe_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    alpha = jnp.exp2((state.row_max - safe_max) * log2_scale)
    row_sum = state.row_sum * alpha + jnp.exp2(sink * LOG2_E - safe_max * log2_scale)
    row_logs = None
    if state.row_logs is not None:
        exponent = jnp.maximum(sink * LOG2_E - safe_max * log2_scale, LEAST_EXPONENT)
        row_logs = _rescaled_logs(state, alpha, (state.row_max - safe_max) * log2_scale) + jnp.exp2(exponent) * exponent
    return SoftmaxState(row_max, row_sum, tuple(x * alpha[:, None] for x in state.out), row_logs)


def entropy(state: SoftmaxState) -> jax.Array:
    """Epilogue: the entropy of the weights in nats, with the sink if the state has it; 0 for fully masked rows."""
    assert state.row_logs is not None  # the state was started with it
    row_sum = jnp.where(state.row_sum == 0.0, 1.0, state.row_sum)
    return jnp.log(row_sum) - LN_2 * state.row_logs / row_sum


def finish(state: SoftmaxState, log2_scale: float, kept_scale: float = 1.0) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Epilogue: output, times the scale of dropout, and lse (natural log); zeros and -inf for fully masked rows."""
    empty = state.row_sum == 0.0
    row_sum = jnp.where(empty, 1.0, state.row_sum)
    lse = jnp.where(empty, -jnp.inf, state.row_max * (log2_scale * LN_2) + jnp.log(row_sum))
    return tuple(x * (kept_scale / row_sum)[:, None] for x in state.out), lse


def mark(*sums: jax.Array) -> jax.Array:
    """Marks rows whose sums [rows, columns] are not finite: float32 [rows], NaN for these, else 0."""
    zeros = [jnp.sum(x.astype(jnp.float32) * 0.0, axis=1) for x in sums]
    return sum(zeros[1:], start=zeros[0])
