"""Scaling of rotary embeddings for contexts longer than those of pretraining."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Length = int | Int[Array, ""]
"""The length of sequences in tokens."""


@runtime_checkable
class RotaryScaling(Protocol):
    """Scales the frequencies of `flax_layers.functional.rotate`."""

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

    Example:
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

    Example:
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

    Example:
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
        """Returns the scaled frequencies.

        Raises:
            ValueError: There is not one factor for each frequency.
        """
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
