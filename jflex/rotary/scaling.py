"""Scaling of rotary embeddings for contexts longer than those of pretraining."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, TypeAlias, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Length: TypeAlias = int | Int[Array, ""]
"""The length of sequences in tokens."""


@runtime_checkable
class RotaryScaling(Protocol):
    """Scales the frequencies of `jflex.rope` and `jflex.rotary.rotate`."""

    @property
    def magnitude(self) -> float:
        """Factor of the rotated features."""
        ...

    def __call__(self, frequencies: Float[Array, " pairs"], length: Length) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies, in radians per position, for sequences of a length."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides all positions by one factor (Chen et al. 2023, arXiv:2306.15595).

    Attributes:
      factor: Ratio of the new context to the original one.

    >>> LinearScaling(4.0)(jnp.array([1.0, 0.5]), length=100).tolist()
    [0.25, 0.125]
    """

    factor: float
    magnitude = 1.0

    def __call__(self, frequencies: Float[Array, " pairs"], length: Length) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies, the same for every length."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Divides low frequencies by a factor, keeps high ones, and interpolates between them (Llama 3.1).

    Attributes:
      factor: Divides frequencies with fewer than `low_frequency_factor` turns in the original context.
      low_frequency_factor: Number of turns below which frequencies are divided.
      high_frequency_factor: Number of turns above which frequencies do not change.
      original_max_positions: Length of the original context.

    >>> scaling = Llama3Scaling(8.0, 1.0, 4.0, original_max_positions=64)
    >>> scaling(jnp.array([1.0, 0.01]), length=100).tolist()  # ten turns in 64 positions, and a tenth of a turn
    [1.0, 0.0012499999720603228]
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int
    magnitude = 1.0

    def __call__(self, frequencies: Float[Array, " pairs"], length: Length) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies, the same for every length."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Divides low frequencies by a factor, keeps high ones, and sharpens the softmax (YaRN).

    Between the two, the share of division grows in equal steps from pair to pair, where `Llama3Scaling` interpolates by
    the number of turns.

    Attributes:
      factor: Divides the frequencies with fewer than `beta_slow` turns in the original context.
      original_max_positions: Length of the original context.
      beta_fast: Number of turns above which frequencies do not change.
      beta_slow: Number of turns below which frequencies are divided.
      attention_factor: Factor of the rotated features, and so, squared, of the scores. None: ``0.1 * log(factor) + 1``.
      mscale: With `mscale_all_dim`, the factor is ``(0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all_dim *
        log(factor) + 1)``, as in DeepSeek-V2; `attention_factor` takes precedence.
      mscale_all_dim: See `mscale`.
      truncate: Whether both ends of the interpolation are moved outwards to whole pairs, as in the authors' code.

    References:
      Peng et al. 2023, YaRN: Efficient Context Window Extension of Large Language Models, arXiv:2309.00071.

    >>> scaling = YarnScaling(4.0, original_max_positions=4096)
    >>> scaled = scaling(10000.0 ** -jnp.linspace(0.0, 1.0, 5), length=100) * 10000.0 ** jnp.linspace(0.0, 1.0, 5)
    >>> [round(x, 3) for x in scaled.tolist()], round(scaling.magnitude, 4)
    ([1.0, 1.0, 0.625, 0.25, 0.25], 1.1386)
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Factor of the rotated features."""
        if self.attention_factor is not None:
            return self.attention_factor
        attention_factor = lambda mscale: 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0
        if self.mscale and self.mscale_all_dim:
            return attention_factor(self.mscale) / attention_factor(self.mscale_all_dim)
        return attention_factor(1.0)

    def __call__(self, frequencies: Float[Array, " pairs"], length: Length) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies, the same for every length."""
        pairs = frequencies.size
        if pairs < 2:  # one pair turns once in 2 * pi positions: a high frequency
            return frequencies
        # Frequencies are base ** (-i / pairs), so the index with a number of turns follows from the last of them.
        step = -jnp.log(frequencies[-1]) / (pairs - 1)
        index = lambda turns: math.log(self.original_max_positions / (turns * 2 * math.pi)) / step
        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = jnp.floor(first), jnp.ceil(last)
        first, last = jnp.maximum(first, 0), jnp.minimum(last, 2 * pairs - 1)
        last = jnp.where(first == last, first + 0.001, last)
        divided = jnp.clip((jnp.arange(pairs, dtype=frequencies.dtype) - first) / (last - first), 0.0, 1.0)
        return divided * frequencies / self.factor + (1 - divided) * frequencies


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Divides each frequency by a factor of its own, found by search (Ding et al. 2024, arXiv:2402.13753).

    There is one set of factors for sequences within the original context, and one for longer sequences. As in
    Transformers, the length of a call selects the set. With a cache its capacity does, since keys in the cache are
    already rotated.

    Attributes:
      short_factors: A factor for each pair of features, for lengths up to `original_max_positions`.
      long_factors: Likewise, for greater lengths.
      original_max_positions: Length of the original context.
      max_positions: The longest context. Up to `original_max_positions`, only the short factors are used.
      magnitude: Factor of the rotated features.

    >>> scaling = LongRopeScaling((1.0, 1.0), (1.0, 4.0), original_max_positions=4096, max_positions=131072)
    >>> scaling(jnp.array([1.0, 0.5]), length=4096).tolist(), scaling(jnp.array([1.0, 0.5]), length=4097).tolist()
    ([1.0, 0.5], [1.0, 0.125])
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    max_positions: int
    magnitude: float = 1.0

    def __call__(self, frequencies: Float[Array, " pairs"], length: Length) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies."""
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            if len(factors) != frequencies.size:
                raise ValueError(
                    f"`{name}` of a LongRopeScaling must hold one factor for each of the {frequencies.size} pairs of "
                    f"features that rotate. Got {len(factors)}. Change them, or `rotary_dim`."
                )
        short, long = (jnp.asarray(x, frequencies.dtype) for x in (self.short_factors, self.long_factors))
        if self.max_positions <= self.original_max_positions:
            return frequencies / short
        return frequencies / jnp.where(length > self.original_max_positions, long, short)
