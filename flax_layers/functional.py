"""Functions of the layers: rotary embedding, RMS norm, and the split into heads."""

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

from flax_layers.rotary_scaling import Length, RotaryScaling


def split_heads(features: Float[Array, "*batch T features"], num_heads: int) -> Float[Array, "*batch T H D"]:
    """Splits the last axis into heads of adjacent features.

    Args:
        features: The output of a projection.
        num_heads: `H`, a divisor of the last axis.

    Returns:
        The same values, with two axes in place of the last one.

    Example:
        >>> import jax.numpy as jnp
        >>> split_heads(jnp.zeros((2, 7, 48)), num_heads=3).shape
        (2, 7, 3, 16)
    """
    return features.reshape(*features.shape[:-1], num_heads, features.shape[-1] // num_heads)


def merge_heads(heads: Float[Array, "*batch T H D"]) -> Float[Array, "*batch T H*D"]:
    """Merges the last two axes: the inverse of `split_heads`.

    Args:
        heads: One vector for each position and head.

    Returns:
        The same values, with one axis in place of the last two.

    Example:
        >>> import jax.numpy as jnp
        >>> merge_heads(jnp.zeros((2, 7, 3, 16))).shape
        (2, 7, 48)
    """
    return heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])


def rotate(
    heads: Float[Array, "*batch T H D"],
    positions: Int[Array, "*#batch T"],
    base: float = 10000.0,
    *,
    scaling: RotaryScaling | None = None,
    rotary_dim: int | None = None,
    length: Length | None = None,
    is_far: bool = False,
) -> Float[Array, "*batch T H D"]:
    """Rotary position embedding: rotates pairs of features by angles that grow with the position.

    The score of a rotated query and a rotated key depends only on the difference of their positions. Feature `i` of the
    first half is paired with feature `i` of the second half (the order of GPT-NeoX, and of Llama in Transformers), and
    the pair is rotated by `positions * base ** (-2 * i / D)` radians. Angles and rotation are in float32 for every
    dtype of `heads`.

    Args:
        heads: Queries or keys. `D` is even.
        positions: Position of each vector, integers from any origin. Leading axes broadcast.
        base: Wavelengths range from `2 * pi` to almost `2 * pi * base` positions.
        scaling: Scaling of the frequencies for longer contexts; see `flax_layers.rotary_scaling`.
        rotary_dim: Number of features of a head that rotate, from the first on; replaces `D` above. Default: all.
        length: Length of the sequences, for LongRoPE. Default: the largest position plus 1.
        is_far: Whether to compensate what angles lose by rounding: a radian in 2**24 of their own size, so that scores
            at position 1,000,000 are wrong by 1 % of their spread. With it, they are as at position 0 up to 2**24.

    Returns:
        The rotated vectors in the dtype of `heads`.

    Raises:
        ValueError: `D` is odd, or `rotary_dim` is odd or greater than `D`.

    References:
        Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.

    Example:
        >>> import jax.numpy as jnp
        >>> rotated = rotate(jnp.ones((1, 2, 1, 2)), jnp.array([[0, 1]]))
        >>> print(jnp.allclose(rotated[0, 1, 0], jnp.array([jnp.cos(1) - jnp.sin(1), jnp.cos(1) + jnp.sin(1)])))
        True
    """
    head_dim = heads.shape[-1]
    if rotary_dim is not None and not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"`rotary_dim` must be between 0 and the head size, {head_dim}. Got {rotary_dim}. Change it.")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2:
        raise ValueError(
            f"The rotary embedding rotates pairs of features, so `rotary_dim` or the head size must be even. Got "
            f"{rotary_dim}. Change `head_dim`, or set `rotary_dim` to an even number."
        )
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequencies = jnp.float32(base) ** -exponents
    magnitude = 1.0
    if scaling is not None:
        length = jnp.max(jnp.asarray(positions), initial=-1) + 1 if length is None else length
        frequencies = scaling(frequencies, length)
        magnitude = scaling.magnitude
    positions = jnp.broadcast_to(positions, heads.shape[:-2])[..., None]  # the same for all heads
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    turning, still = heads[..., :rotary_dim].astype(jnp.float32), heads[..., rotary_dim:]
    first, second = jnp.split(turning, 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if is_far:
        rest = _rounding_error(positions, frequencies, angles)
        cosine, sine = (
            cosine * jnp.cos(rest) - sine * jnp.sin(rest),
            sine * jnp.cos(rest) + cosine * jnp.sin(rest),
        )
    cosine, sine = magnitude * cosine, magnitude * sine
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return jnp.concatenate([rotated.astype(heads.dtype), still], axis=-1)


def _rounding_error(
    positions: Int[Array, "*axes"], frequencies: Float[Array, " pairs"], angles: Float[Array, "*axes pairs"]
) -> Float[Array, "*axes pairs"]:
    """What float32 angles lack to the exact products of positions, from 0 to 2**24, and frequencies.

    Factors are split into halves of 12 bits, whose products are exact in float32 (Dekker 1971), with or without FMA.
    """
    bits = jax.lax.bitcast_convert_type(frequencies, jnp.int32) & -(1 << 12)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    low = frequencies - high
    upper, lower = ((positions & mask).astype(jnp.float32) for mask in (-(1 << 12), (1 << 12) - 1))
    product = jnp.multiply.outer
    return ((product(upper, high) - angles) + product(upper, low) + product(lower, high)) + product(lower, low)


def rms_norm(
    inputs: Float[Array, "*batch features"],
    scale: Float[Array, " features"],
    *,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    dtype: Dtype | None = None,
) -> Float[Array, "*batch features"]:
    """Divides by the root mean square and multiplies by `scale + offset`, both in float32.

    Args:
        inputs: Inputs, which are normalised along the last axis.
        scale: One factor for each feature.
        epsilon: Added to the mean of squares.
        offset: Added to the scale.
        dtype: Dtype of the result. Default: that of the inputs.

    Returns:
        The normalised inputs.

    References:
        Zhang and Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> import jax.numpy as jnp
        >>> [round(x, 3) for x in rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2)).tolist()]
        [0.849, 1.131]
    """
    x = inputs.astype(jnp.float32)
    factor = jnp.expand_dims(scale.astype(jnp.float32) + offset, range(x.ndim - 1))
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return (normal * factor).astype(dtype or inputs.dtype)
