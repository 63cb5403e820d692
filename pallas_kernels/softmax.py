"""Online softmax in base 2 (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.spec import LN_2


class SoftmaxState(NamedTuple):
    """Of the rows of a tile, after some of the keys.

    Scores are in a unit of the caller's: a weight is ``2 ** (unit * (score - top))``. So the factor of the scores and
    log2 e cost nothing: with the subtraction they are one fused multiply-add for each element.

    Attributes:
      top: The largest score so far.
      total: Sum of the weights.
      out: Sum of the weights times the values, in chunks of columns.
    """

    top: jax.Array
    total: jax.Array
    out: tuple[jax.Array, ...]


def start(rows: int, out: tuple[jax.Array, ...]) -> SoftmaxState:
    """No key has been seen; `out` is zeros."""
    return SoftmaxState(jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32), out)


def update(
    state: SoftmaxState,
    s: jax.Array,
    *,
    unit: float,
    weigh: Callable[[jax.Array, jax.Array], jax.Array],
    times_values: Callable[[jax.Array], tuple[jax.Array, ...]],
    may_hide: bool,
) -> SoftmaxState:
    """Takes in a tile of scores.

    Args:
      state: Before.
      s: Scores; -inf where nothing is seen.
      unit: Of the scores; positive.
      weigh: ``(s, shift) -> 2 ** (unit * s - shift)``.
      times_values: Multiplies a tile of weights by the values.
      may_hide: Whether a row may have seen nothing yet: then ``-inf - -inf`` is avoided.
    """
    top = jnp.maximum(state.top, jnp.max(s, axis=1))
    shift = (jnp.where(top == -jnp.inf, 0.0, top) if may_hide else top) * unit
    p, keep = weigh(s, shift[:, None]), weigh(state.top, shift)
    out = tuple(x * keep[:, None] + y for x, y in zip(state.out, times_values(p), strict=True))
    return SoftmaxState(top, state.total * keep + jnp.sum(p, axis=1), out)


def finish(state: SoftmaxState, unit: float) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Output and lse (natural log); zeros and -inf for rows that have seen nothing."""
    empty = state.total == 0.0
    total = jnp.where(empty, 1.0, state.total)
    lse = jnp.where(empty, -jnp.inf, state.top * (unit * LN_2) + jnp.log(total))
    return tuple(x * (1.0 / total)[:, None] for x in state.out), lse
