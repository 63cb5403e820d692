"""Score mods, each in JAX and, written anew, in numpy with its derivatives: the rows of `cases.py`.

A pair is named after what it does. `jax` takes the captured arrays and returns the mod, `exact` is the oracle's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

import jflex
from tests.support.oracle import Score

F32 = jnp.float32


@dataclasses.dataclass(frozen=True, eq=False)
class ScorePair:
    """A score mod twice.

    Attributes:
      jax: ``c -> mod``, for a dict of captured JAX arrays.
      exact: In numpy.
      captures: ``(rng, sizes) -> {name: array}``; the floating-point ones get gradients.
      smooth: Whether finite differences can judge the derivatives.
      by_tanh: Whether scores are a tanh, which GPUs compute with a relative error of 2 ** -11.
    """

    jax: Callable[..., Any]
    exact: Score
    captures: Callable[..., dict[str, Any]] = lambda rng, n: {}
    smooth: bool = True
    by_tanh: bool = False


def plain(
    jax_mod: Callable[..., Any], value: Callable[..., Any], d_score: Callable[..., Any] | None = None, **more: Any
):
    """A pair that captures nothing."""
    with_captures = lambda f: None if f is None else lambda s, b, h, q, k, c: f(s, b, h, q, k)
    return ScorePair(lambda c: jax_mod, Score(with_captures(value), with_captures(d_score)), **more)


# --- without captures

identity = plain(lambda s, b, h, q, k: s, lambda s, *_: s)
times_two = plain(lambda s, b, h, q, k: s * 2, lambda s, *_: 2 * s, lambda s, *_: 2.0)
squared = plain(lambda s, b, h, q, k: s * s, lambda s, *_: s**2, lambda s, *_: 2 * s)
causal = plain(
    lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf),
    lambda s, b, h, q, k: np.where(q >= k, s, -np.inf),
    lambda s, b, h, q, k: (q >= k) * 1.0,
)
inverse_causal = plain(
    lambda s, b, h, q, k: jnp.where(q <= k, s, -jnp.inf),
    lambda s, b, h, q, k: np.where(k >= q, s, -np.inf),
    lambda s, b, h, q, k: (q <= k) * 1.0,
)
relative = plain(lambda s, b, h, q, k: s + (q - k).astype(F32), lambda s, b, h, q, k: s + (q - k))
relative_causal = plain(
    lambda s, b, h, q, k: jnp.where(q >= k, s + (q - k).astype(F32), -jnp.inf),
    lambda s, b, h, q, k: np.where(q >= k, s + q - k, -np.inf),
    lambda s, b, h, q, k: (q >= k) * 1.0,
)
alibi = plain(
    lambda s, b, h, q, k: s + (k - q).astype(F32) * jnp.exp2(-(h + 1).astype(F32) * 2),
    lambda s, b, h, q, k: s + (k - q) * 4.0 ** -(h + 1.0),
)
silu = plain(
    lambda s, b, h, q, k: jax.nn.silu(s),
    lambda s, *_: s * special.expit(s),
    lambda s, *_: special.expit(s) * (1 + s * special.expit(-s)),
)
floor_division = plain(
    lambda s, b, h, q, k: s - (q // (1 + k)).astype(F32), lambda s, b, h, q, k: s - np.floor(q / (1 + k))
)
remainder = plain(
    lambda s, b, h, q, k: s + 0.25 * ((q - k) % 5).astype(F32) + 0.5 * (q.astype(F32) % 1.5),
    lambda s, b, h, q, k: s + 0.25 * np.mod(q - k, 5) + 0.5 * np.mod(q, 1.5),
)
odd_keys = plain(
    lambda s, b, h, q, k: jnp.where(k % 2 == 0, s, -jnp.inf),
    lambda s, b, h, q, k: np.where(k & 1, -np.inf, s),
    lambda s, b, h, q, k: 1.0 - k % 2,
)
bits = plain(
    lambda s, b, h, q, k: (
        s + 0.5 * ((q ^ k) & 3).astype(F32) + ((q >> 2) == (k >> 2)).astype(F32) - 0.1 * ((q << 1) | ~k).astype(F32)
    ),
    lambda s, b, h, q, k: (
        s + 0.5 * np.mod(np.bitwise_xor(q, k), 4) + (q // 4 == k // 4) - 0.1 * np.bitwise_or(2 * q, -1 - k)
    ),
)
softcap = plain(
    lambda s, b, h, q, k: 5 * jnp.tanh(s / 5),
    lambda s, *_: 5 * np.tanh(s / 5),
    lambda s, *_: 1 - np.tanh(s / 5) ** 2,
    by_tanh=True,
)
softcap_far = plain(
    lambda s, b, h, q, k: 50 * jnp.tanh(s / 50),
    lambda s, *_: 50 * np.tanh(s / 50),
    lambda s, *_: 1 - np.tanh(s / 50) ** 2,
    by_tanh=True,
)
softcap_of_much = plain(
    lambda s, b, h, q, k: 5 * jnp.tanh((s + jnp.sin((q - k).astype(F32))) / 5),
    lambda s, b, h, q, k: 5 * np.tanh((s + np.sin(q - k)) / 5),
    lambda s, b, h, q, k: 1 - np.tanh((s + np.sin(q - k)) / 5) ** 2,
    by_tanh=True,
)
flash_sigmoid = plain(  # of FlashInfer's documentation, with a scale of 128 ** -0.5
    jflex.scores.sigmoid(0.25),
    lambda s, *_: special.expit(s + 0.25),
    lambda s, *_: special.expit(s + 0.25) * special.expit(-s - 0.25),
)
sigmoid = plain(
    jflex.scores.sigmoid(-2.0),
    lambda s, *_: special.expit(s - 2),
    lambda s, *_: special.expit(s - 2) * special.expit(2 - s),
)
relu = plain(lambda s, b, h, q, k: 2 * jax.nn.relu(s), lambda s, *_: 2 * np.maximum(s, 0), lambda s, *_: 2.0 * (s > 0))
softplus = plain(
    lambda s, b, h, q, k: jax.nn.softplus(s), lambda s, *_: np.logaddexp(s, 0), lambda s, *_: special.expit(s)
)
gelu = plain(
    lambda s, b, h, q, k: jax.nn.gelu(s, approximate=False),
    lambda s, *_: s * special.ndtr(s),
    lambda s, *_: special.ndtr(s) + s * np.exp(-s * s / 2) / np.sqrt(2 * np.pi),
)
clip = plain(
    lambda s, b, h, q, k: jnp.clip(s, -1.0, 0.75),
    lambda s, *_: np.minimum(np.maximum(s, -1), 0.75),
    lambda s, *_: ((s > -1) & (s < 0.75)) * 1.0,
)
reciprocal = plain(lambda s, b, h, q, k: 1 / s, lambda s, *_: 1 / s, lambda s, *_: -1 / s**2)
log_distance = plain(
    lambda s, b, h, q, k: s - jnp.log((q - k).astype(F32)), lambda s, b, h, q, k: s - np.log(q - k + 0.0)
)
trigonometry = plain(
    lambda s, b, h, q, k: jnp.cos(s) * jnp.sin(s) + jnp.tan(b.astype(F32)),
    lambda s, b, h, q, k: np.sin(2 * s) / 2 + np.tan(b),
    lambda s, *_: np.cos(2 * s),
)
cond = plain(
    lambda s, b, h, q, k: jax.lax.cond(q > k, lambda x: 0.5 * x, lambda x: x - 1, s),
    lambda s, b, h, q, k: np.where(q > k, s / 2, s - 1),
    lambda s, b, h, q, k: np.where(q > k, 0.5, 1),
)
switch = plain(
    lambda s, b, h, q, k: jax.lax.switch((q + h) % 3, [lambda x: x, lambda x: 2 * x, jnp.sin], s),
    lambda s, b, h, q, k: np.choose((q + h) % 3 + 0 * k, [s, 2 * s, np.sin(s)]),
    lambda s, b, h, q, k: np.choose((q + h) % 3 + 0 * k, [1 + 0 * s, 2 + 0 * s, np.cos(s)]),
)


@jax.custom_vjp
def _half_derivative(x):
    return x


_half_derivative.defvjp(lambda x: (x, None), lambda _, ct: (0.5 * ct,))
own_derivative = plain(lambda s, b, h, q, k: _half_derivative(s), lambda s, *_: s, lambda s, *_: 0.5, smooth=False)
