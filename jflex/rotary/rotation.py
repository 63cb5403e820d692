"""The angles of the rotary embedding, and the rotation of pairs of features by them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jflex.rotary.scaling import Length, RotaryScaling


class Angles(NamedTuple):
    """Cosines and sines of the angles of pairs, times the magnitude of the scaling."""

    cosine: Float[Array, "*axes pairs"]
    sine: Float[Array, "*axes pairs"]


def checked_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    """Number of rotated features of a head; all of them for None."""
    if rotary_dim is not None and not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"`rotary_dim` must be between 0 and the head size, {head_dim}. Got {rotary_dim}. Change it.")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2:
        raise ValueError(
            f"The rotary embedding rotates pairs of features, so `rotary_dim` or the head size must be even. Got "
            f"{rotary_dim}. Change `head_dim`, or set `rotary_dim` to an even number."
        )
    return rotary_dim


def angles(
    positions: Int[Array, "*axes"],
    rotary_dim: int,
    base: float,
    scaling: RotaryScaling | None,
    length: Length,
    *,
    dtype: DTypeLike = jnp.float32,
    is_far: bool = False,
) -> Angles:
    """By what each pair of features rotates at some positions.

    Args:
      base: Pair ``i`` rotates by ``base ** (-2 * i / rotary_dim)`` radians per position.
      scaling: Scales these frequencies, and the rotated features.
      is_far: Whether to compensate what float32 angles lose by rounding.
    """
    exponents = jnp.arange(0, rotary_dim, 2, dtype=dtype) / rotary_dim
    frequencies = jnp.asarray(base, dtype) ** -exponents
    magnitude = 1.0
    if scaling is not None:
        frequencies, magnitude = scaling(frequencies, length), scaling.magnitude
    turned = jnp.multiply.outer(positions.astype(dtype), frequencies)
    cosine, sine = jnp.cos(turned), jnp.sin(turned)
    if is_far and dtype == jnp.float32:
        remainder = _rounding_error(positions, frequencies, turned)
        cosine, sine = (
            cosine * jnp.cos(remainder) - sine * jnp.sin(remainder),
            sine * jnp.cos(remainder) + cosine * jnp.sin(remainder),
        )
    return Angles(magnitude * cosine, magnitude * sine)


def rotated(
    features: Float[Array, "*axes rotary_dim"], by: Angles, *, interleaved: bool
) -> Float[Array, "*axes rotary_dim"]:
    """Rotates pairs of features, which are neighbours if `interleaved`, and else lie half of the features apart."""
    if interleaved:
        pairs = features.reshape(*features.shape[:-1], features.shape[-1] // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(features, 2, axis=-1)
    turned = first * by.cosine - second * by.sine, second * by.cosine + first * by.sine
    return jnp.stack(turned, axis=-1).reshape(features.shape) if interleaved else jnp.concatenate(turned, axis=-1)


def _rounding_error(
    positions: Int[Array, "*axes"], frequencies: Float[Array, " pairs"], turned: Float[Array, "*axes pairs"]
) -> Float[Array, "*axes pairs"]:
    """Rounding error of float32 angles: products of positions, from 0 to 2**24, and frequencies.

    Factors are split into halves of 12 bits, whose products are exact in float32 (Dekker 1971), with or without FMA.
    """
    bits = jax.lax.bitcast_convert_type(frequencies, jnp.int32) & -(1 << 12)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    low = frequencies - high
    upper, lower = ((positions & mask).astype(jnp.float32) for mask in (-(1 << 12), (1 << 12) - 1))
    product = jnp.multiply.outer
    return ((product(upper, high) - turned) + product(upper, low) + product(lower, high)) + product(lower, low)
