"""Samples the next token from logits: greedy, or with temperature, top-k, top-p and a seed.

All functions take logits `[B, V]` and the parameters of each row as arrays, so different requests share one program.
The token of a row depends only on its logits, parameters and position, not on the other rows.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

_LEAST_TEMPERATURE = 1e-6
"""The lower bound of positive temperatures: below it, logits divided by the temperature overflow float32."""

_MOST_TOKENS = (1 << 31) - 1
"""The most that `top_k` keeps, which is int32 on the device. No vocabulary is larger."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request. Temperature is applied first, then top-k, top-p and min-p.

    Attributes:
        temperature: Divides the logits. 0: greedy; the other fields are ignored.
        top_k: Keeps this many of the most probable tokens, and ties with the last one. 0: all tokens. Values above
            2**31 - 1 become that.
        top_p: Keeps the most probable tokens until their probabilities sum to this or more, and ties. 1: all tokens.
        seed: The random key of a token is derived from it and from the position of the token.
        min_p: Keeps tokens whose probability is at least this fraction of that of the most probable one (Nguyen et al.,
            2024, arXiv:2407.01082). 0: all tokens.

    Raises:
        TypeError: `top_k` or `seed` is not an integer.
        ValueError: A value is out of range, once it is rounded to float32.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95, seed=1)
        Sampling(temperature=0.8, top_k=0, top_p=0.95, seed=1, min_p=0.0)
        >>> Sampling(top_p=0)
        Traceback (most recent call last):
        ValueError: `top_p` must be greater than 0 and at most 1. Got 0. Use 1 to keep all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(as_float32(self.temperature))):
            raise ValueError(
                f"`temperature` must be finite and at least 0. Got {self.temperature}. Use 0 for greedy decoding, and "
                "1 for the probabilities of the model; float32 ends at 3.4e38."
            )
        if not 0 < as_float32(self.top_p) <= 1:
            raise ValueError(
                f"`top_p` must be greater than 0 and at most 1. Got {self.top_p}. Use 1 to keep all tokens."
            )
        if not 0 <= as_float32(self.min_p) <= 1:
            raise ValueError(f"`min_p` must be at least 0 and at most 1. Got {self.min_p}. Use 0 to keep all tokens.")
        if checked_integer("top_k", self.top_k) < 0:
            raise ValueError(f"`top_k` must be at least 0. Got {self.top_k}. Use 0 to keep all tokens.")
        object.__setattr__(self, "top_k", min(self.top_k, _MOST_TOKENS))
        if not 0 <= checked_integer("seed", self.seed) < 1 << 32:
            raise ValueError(f"`seed` must be at least 0 and less than 2**32. Got {self.seed}. Pass another seed.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of B requests, as arrays. A parameter that no request uses is None, and its code is left out.

    Without a `temperature` all are greedy, and there is no `seed`, either.
    """

    temperature: Float[Array, " B"] | None = None
    top_k: Int32[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None
    seed: UInt32[Array, " B"] | None = None
    min_p: Float[Array, " B"] | None = None

    @classmethod
    def from_requests(cls, requests: Sequence[Sampling]) -> SamplingBatch:
        """Collects the parameters of requests.

        A parameter that is None is part of the pytree structure, so `jit` compiles for each combination.

        Example:
            >>> batch = SamplingBatch.from_requests([Sampling(), Sampling(temperature=0.5, top_k=9)])
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
            column("min_p", np.float32) if any(request.min_p for request in requests) else None,
        )


def sample(logits: Float[Array, "B V"], sampling: SamplingBatch, positions: Int[Array, " B"]) -> Int32[Array, " B"]:
    """Samples a token for each row.

    Args:
        logits: Logits of the next token, float32.
        sampling: Parameters of the rows.
        positions: Position of the next token in its sequence. The random key is derived from seed and position.

    Example:
        >>> logits = jnp.log(jnp.array([[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]))
        >>> batch = SamplingBatch.from_requests([Sampling(), Sampling(temperature=1.0, top_k=1)])
        >>> sample(logits, batch, jnp.array([5, 5])).tolist()
        [1, 1]
    """
    likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.temperature is None:
        return likely
    drawn = draw(scale_and_truncate(logits, sampling), sampling.seed, positions)
    return jnp.where(sampling.temperature > 0, drawn, likely)


def scale_and_truncate(logits: Float[Array, "B V"], sampling: SamplingBatch) -> Float[Array, "B V"]:
    """Divides logits by the temperature, and sets tokens outside of top-k, top-p or min-p to `-inf`.

    The maximum of each row becomes 0. The results of rows with temperature 0 are not used.
    """
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    if sampling.temperature is not None:
        logits = logits / jnp.maximum(sampling.temperature, _LEAST_TEMPERATURE)[:, None]
    logits = truncate(logits, sampling.top_k, sampling.top_p)
    if sampling.min_p is None:
        return logits
    # The most probable token has logit 0 now, and `log(0)` keeps all.
    return jnp.where(logits >= jnp.log(sampling.min_p)[:, None], logits, -jnp.inf)


def truncate(
    logits: Float[Array, "B V"], top_k: Int32[Array, " B"] | None, top_p: Float[Array, " B"] | None
) -> Float[Array, "B V"]:
    """Keeps the most probable tokens of each row: top-k, then top-p among these. All others become `-inf`.

    Both also keep tokens that tie with the last one kept. `top_k` 0 and `top_p` 1 keep all tokens of a row, None those
    of every row.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
        >>> jnp.exp(truncate(logits, jnp.array([2]), None))[0].tolist()
        [0.5, 0.25, 0.0, 0.0]
        >>> jnp.exp(truncate(logits, None, jnp.array([0.8])))[0].tolist()  # two sum to 0.75; the others tie
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
        probabilities = jax.nn.softmax(jnp.where(descending >= least, descending, -jnp.inf), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1)[:, :-1]  # total probability before the second token, the third, ...
        needed = jnp.sum((before < top_p[:, None]) | (top_p[:, None] >= 1), axis=-1, dtype=jnp.int32)
        least = jnp.maximum(least, jnp.take_along_axis(descending, needed[:, None], axis=-1))
    return jnp.where(logits >= least, logits, -jnp.inf)


def draw(
    logits: Float[Array, "B V"], seed: UInt32[Array, " B"] | None, positions: Int[Array, " B"]
) -> Int32[Array, " B"]:
    """Draws a token for each row with probability `softmax(logits)`; its key is the seed, folded with the position."""
    if seed is None:
        raise ValueError(
            "`seed` of a SamplingBatch with a `temperature` must be an array. Got None. Use "
            "`SamplingBatch.from_requests`."
        )

    def draw_one(row: Array, seed: Array, position: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), row)

    return jax.vmap(draw_one)(logits, seed, positions).astype(jnp.int32)


def as_float32(value: float) -> float:
    """A number as the device gets it: rounded to float32, which makes large ones infinite.

    Example:
        >>> as_float32(0.1), as_float32(1e39)
        (0.10000000149011612, inf)
    """
    with np.errstate(over="ignore"):
        try:
            return float(np.float32(value))
        except OverflowError:  # an integer that is no float64 either
            return math.inf if value > 0 else -math.inf


def checked_integer(name: str, value: object) -> int:
    """Returns the argument `name` as an int, or raises TypeError."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(f"`{name}` must be an integer. Got {type(value).__name__}.") from None
