"""Chooses the next token from logits: greedy, or sampled with temperature, top-k, top-p and a seed.

All are pure functions of `[B, V]` logits with parameters for each row, so that all requests share a program. The
token of a row depends only on its logits, its parameters and its position, never on the other rows.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

_LEAST_TEMPERATURE = 1e-6
"""What a smaller one counts as: below it quotients of logits leave float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen. Temperature is applied first, then top-k, then top-p.

    Attributes:
        temperature: Divides the logits. 0: the most probable token; the other fields are ignored.
        top_k: Only the most probable tokens may be drawn, so many, and those that tie with the last. 0: all.
        top_p: Only the most probable tokens may be drawn whose probabilities add up to at least this. 1: all.
        seed: With the position of the token it makes the random key.

    Raises:
        TypeError: `top_k` or `seed` is no integer.
        ValueError: A value lies outside of its range.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95, seed=1)
        Sampling(temperature=0.8, top_k=0, top_p=0.95, seed=1)
        >>> Sampling(top_p=0)
        Traceback (most recent call last):
        ValueError: `top_p` must be greater than 0 and at most 1. Got 0. Use 1 to draw from all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"`temperature` must be finite and at least 0. Got {self.temperature}. Use 0 for the most probable "
                "token, and 1 for the probabilities of the model."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"`top_p` must be greater than 0 and at most 1. Got {self.top_p}. Use 1 to draw from all tokens."
            )
        if _integer("top_k", self.top_k) < 0:
            raise ValueError(f"`top_k` must be at least 0. Got {self.top_k}. Use 0 to draw from all tokens.")
        if not 0 <= _integer("seed", self.seed) < 1 << 32:
            raise ValueError(f"`seed` must be at least 0 and less than 2**32. Got {self.seed}. Pass another number.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B requests, as arrays. A parameter that no request uses is None and costs nothing.

    Attributes:
        temperature: As of `Sampling`; None: the most probable tokens.
        top_k: Likewise; None: all tokens.
        top_p: Likewise; None: all tokens.
        seed: Likewise; None only with `temperature`.
    """

    temperature: Float[Array, " B"] | None = None
    top_k: Int32[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None
    seed: UInt32[Array, " B"] | None = None

    @classmethod
    def of(cls, requests: Sequence[Sampling]) -> SamplingBatch:
        """The parameters of requests.

        Args:
            requests: One for each row.

        Returns:
            The arrays. Which of them are None is part of the pytree structure, so `jit` compiles for each choice.

        Example:
            >>> batch = SamplingBatch.of([Sampling(), Sampling(temperature=0.5, top_k=9)])
            >>> batch.top_k.tolist(), batch.top_p
            ([0, 9], None)
        """
        if all(request.temperature == 0 for request in requests):
            return cls()
        column = lambda name, dtype: jnp.asarray(np.array([getattr(x, name) for x in requests], dtype))
        return cls(
            column("temperature", np.float32),
            column("top_k", np.int32) if any(request.top_k for request in requests) else None,
            column("top_p", np.float32) if any(request.top_p < 1 for request in requests) else None,
            column("seed", np.uint32),
        )


def sample(logits: Float[Array, "B V"], sampling: SamplingBatch, positions: Int[Array, " B"]) -> Int32[Array, " B"]:
    """Chooses a token for each row.

    Args:
        logits: Of the token at `positions`, float32.
        sampling: Parameters of the rows.
        positions: Position of the token in its sequence. With the seed it makes the random key, so that every
            position has its own.

    Returns:
        Tokens.

    Example:
        >>> logits = jnp.log(jnp.array([[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]))
        >>> batch = SamplingBatch.of([Sampling(), Sampling(temperature=1.0, top_k=1)])
        >>> sample(logits, batch, jnp.array([5, 5])).tolist()
        [1, 1]
    """
    likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.temperature is None:
        return likely
    drawn = draw(scale_and_truncate(logits, sampling), sampling.seed, positions)
    return jnp.where(sampling.temperature > 0, drawn, likely)


def scale_and_truncate(logits: Float[Array, "B V"], sampling: SamplingBatch) -> Float[Array, "B V"]:
    """The logits that tokens are drawn by: divided by the temperature, `-inf` for what may not be drawn.

    Args:
        logits: Float32.
        sampling: Parameters of the rows; results of rows with temperature 0 are unused.

    Returns:
        Logits, the greatest of each row 0.
    """
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    if sampling.temperature is not None:
        logits = logits / jnp.maximum(sampling.temperature, _LEAST_TEMPERATURE)[:, None]
    return truncate(logits, sampling.top_k, sampling.top_p)


def truncate(
    logits: Float[Array, "B V"], top_k: Int32[Array, " B"] | None, top_p: Float[Array, " B"] | None
) -> Float[Array, "B V"]:
    """Keeps the most probable tokens of each row, by top-k and then by top-p among these; others become `-inf`.

    Both also keep tokens that tie with the last one kept.

    Args:
        logits: Float32.
        top_k: How many tokens; 0 for all. None for all in each row.
        top_p: Their probability together, at least; 1 for all. None for all in each row.

    Returns:
        Logits.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
        >>> jnp.exp(truncate(logits, jnp.array([2]), None))[0].tolist()
        [0.5, 0.25, 0.0, 0.0]
        >>> jnp.exp(truncate(logits, None, jnp.array([0.8])))[0].tolist()  # two have 0.75, and the others tie
        [0.5, 0.25, 0.125, 0.125]
    """
    if top_k is None and top_p is None:
        return logits
    descending = jnp.sort(logits, axis=-1, descending=True)
    least = descending[:, -1:]
    if top_k is not None:
        tokens = logits.shape[-1]
        last = jnp.where(top_k > 0, jnp.minimum(top_k, tokens), tokens) - 1
        least = jnp.take_along_axis(descending, last[:, None], axis=-1)
    if top_p is not None:
        shares = jax.nn.softmax(jnp.where(descending >= least, descending, -jnp.inf), axis=-1)
        before = jnp.cumsum(shares, axis=-1)[:, :-1]  # the probability of all before the second, the third, ...
        needed = jnp.sum((before < top_p[:, None]) | (top_p[:, None] >= 1), axis=-1, dtype=jnp.int32)
        least = jnp.maximum(least, jnp.take_along_axis(descending, needed[:, None], axis=-1))
    return jnp.where(logits >= least, logits, -jnp.inf)


def draw(
    logits: Float[Array, "B V"], seed: UInt32[Array, " B"] | None, positions: Int[Array, " B"]
) -> Int32[Array, " B"]:
    """Draws a token of each row with probability `softmax(logits)`, by a key of its seed and position.

    Args:
        logits: `-inf` where a token may not be drawn.
        seed: Of each row.
        positions: Of each row.

    Returns:
        Tokens.
    """
    if seed is None:
        raise ValueError("`seed` of a `SamplingBatch` with a `temperature` must be an array. Got None.")

    def draw_one(row: Array, seed: Array, position: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), row)

    return jax.vmap(draw_one)(logits, seed, positions).astype(jnp.int32)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer. Got {type(value).__name__}.") from None
