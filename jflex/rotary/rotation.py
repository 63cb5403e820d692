"""`rotate`: the rotary embedding of arrays; the angles, and the rotation of pairs of features by them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jflex.rotary.scaling import Length, RotaryScaling


def rotate(
    heads: Float[Array, "*batch T H D"],
    positions: Int[Array, "*#batch T"],
    base: float = 10000.0,
    *,
    scaling: RotaryScaling | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    length: Length | None = None,
    is_far: bool = False,
) -> Float[Array, "*batch T H D"]:
    """Rotary position embedding: rotates pairs of features by angles that grow with the position.

    The score of a rotated query and a rotated key depends only on the difference of their positions. Feature `i` of the
    first half is paired with feature `i` of the second half (the order of GPT-NeoX, and of Llama in Transformers), or
    features `2 * i` and `2 * i + 1` are a pair (that of GPT-J, and of Llama's own code); the pair is rotated by
    `positions * base ** (-2 * i / D)` radians. Angles and rotation are in float32, for float64 `heads` in float64.

    Args:
      heads: Queries or keys. `D` is even.
      positions: Position of each vector, integers from any origin. Leading axes broadcast.
      base: Wavelengths range from `2 * pi` to almost `2 * pi * base` positions.
      scaling: Scaling of the frequencies for longer contexts, from `jflex.rotary`.
      rotary_dim: Number of features of a head that rotate, from the first on; replaces `D` above. Default: all.
      interleaved: Whether a pair is two neighbors.
      length: Length of the sequences, for LongRoPE. Default: the largest position plus 1.
      is_far: Whether to compensate what float32 angles lose by rounding: a radian in 2**24 of their own size, so that
        scores at position 1,000,000 are wrong by 1 % of their spread. With it, they are as at position 0 up to 2**24.

    Returns:
      The rotated vectors in the dtype of `heads`.

    Raises:
      ValueError: `D` is odd, `rotary_dim` is odd or greater than `D`, or `positions` do not fit.

    References:
      Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.

    >>> rotated = rotate(jnp.ones((1, 2, 1, 2)), jnp.array([[0, 1]]))
    >>> print(jnp.allclose(rotated[0, 1, 0], jnp.array([jnp.cos(1) - jnp.sin(1), jnp.cos(1) + jnp.sin(1)])))
    True
    """
    rotary_dim = checked_rotary_dim(rotary_dim, heads.shape[-1])
    shape, axes = jnp.shape(positions), heads.shape[:-2]
    fits = len(shape) <= len(axes) and (shape[-1:] or (1,)) == axes[-1:]
    if not fits or any(n not in (1, m) for n, m in zip(shape[::-1], axes[::-1], strict=False)):
        raise ValueError(
            f"`positions` must be one for each token, {list(axes)}, and leading axes may be absent or 1. Got "
            f"{list(shape)}. Add `jnp.arange({axes[-1]})` to the first position of each sequence."
        )
    length = jnp.max(jnp.asarray(positions), initial=-1) + 1 if length is None and scaling is not None else length
    positions = jnp.broadcast_to(positions, heads.shape[:-2])[..., None]  # the same for all heads
    dtype = jnp.float64 if heads.dtype == jnp.float64 else jnp.float32
    by = angles(positions, rotary_dim, base, scaling, 0 if length is None else length, dtype=dtype, is_far=is_far)
    turning, still = heads[..., :rotary_dim].astype(dtype), heads[..., rotary_dim:]
    return jnp.concatenate([rotated(turning, by, interleaved=interleaved).astype(heads.dtype), still], axis=-1)


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

    Pair ``i`` rotates by ``base ** (-2 * i / rotary_dim)`` radians per position; see `rotate`.
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
    """Rotates pairs of features, which are neighbors if `interleaved`, and else lie half of the features apart."""
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
