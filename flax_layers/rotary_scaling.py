"""Scaling of rotary embeddings to contexts longer than those of pretraining."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float


@runtime_checkable
class RotaryScaling(Protocol):
    """Changes the frequencies of `flax_layers.functional.rotate`."""

    @property
    def magnitude(self) -> float:
        """Factor of the rotated features."""
        ...

    def __call__(self, frequencies: Float[Array, " pairs"]) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies, in radians per position."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides all positions by one factor (Chen et al. 2023, arXiv:2306.15595).

    Attributes:
        factor: How many times longer the context is.

    Example:
        >>> LinearScaling(4.0)(jnp.array([1.0, 0.5])).tolist()
        [0.25, 0.125]
    """

    factor: float
    magnitude = 1.0

    def __call__(self, frequencies: Float[Array, " pairs"]) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Divides low frequencies by a factor, keeps high ones, and interpolates between them (Llama 3.1).

    Attributes:
        factor: Divides frequencies that turn less than `low_frequency_factor` times in the original context.
        low_frequency_factor: Turns in the original context.
        high_frequency_factor: Turns from which frequencies stay what they are.
        original_max_positions: Length of the original context.

    Example:
        >>> scaling = Llama3Scaling(8.0, 1.0, 4.0, original_max_positions=64)
        >>> scaling(jnp.array([1.0, 0.01])).tolist()  # turns ten times in 64 positions, and a tenth of once
        [1.0, 0.0012499999720603228]
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int
    magnitude = 1.0

    def __call__(self, frequencies: Float[Array, " pairs"]) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Divides each frequency by a factor of its own, found by search (Ding et al. 2024, arXiv:2402.13753).

    One set of factors serves up to the original context, another beyond. Keys in a cache have been rotated already, so
    a model keeps to one set: that of `max_positions`. (Transformers goes by the length of each call.)

    Attributes:
        short_factors: One for each pair of features, for contexts up to `original_max_positions`.
        long_factors: Likewise, for longer ones.
        original_max_positions: Length of the original context.
        max_positions: The longest context that the model will see.
        magnitude: Factor of the rotated features.

    Example:
        >>> scaling = LongRopeScaling((1.0, 1.0), (1.0, 4.0), original_max_positions=4096, max_positions=131072)
        >>> scaling(jnp.array([1.0, 0.5])).tolist()
        [1.0, 0.125]
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    max_positions: int
    magnitude: float = 1.0

    def __call__(self, frequencies: Float[Array, " pairs"]) -> Float[Array, " pairs"]:
        """Returns the scaled frequencies.

        Raises:
            ValueError: There is not one factor for each frequency.
        """
        factors = self.long_factors if self.max_positions > self.original_max_positions else self.short_factors
        if len(factors) != frequencies.size:
            raise ValueError(
                f"LongRopeScaling must hold one factor for each of the {frequencies.size} pairs of features that "
                f"rotate. Got {len(factors)}."
            )
        return frequencies / jnp.asarray(factors, frequencies.dtype)
