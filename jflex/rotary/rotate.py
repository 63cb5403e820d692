"""`rotate`: the rotary position embedding of arrays of queries or keys."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflex.rotary.rotation import angles, checked_rotary_dim, rotated
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
      interleaved: Whether a pair is two neighbours.
      length: Length of the sequences, for LongRoPE. Default: the largest position plus 1.
      is_far: Whether to compensate what float32 angles lose by rounding: a radian in 2**24 of their own size, so that
        scores at position 1,000,000 are wrong by 1 % of their spread. With it, they are as at position 0 up to 2**24.

    Returns:
      The rotated vectors in the dtype of `heads`.

    Raises:
      ValueError: `D` is odd, or `rotary_dim` is odd or greater than `D`.

    References:
      Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.

    >>> rotated = rotate(jnp.ones((1, 2, 1, 2)), jnp.array([[0, 1]]))
    >>> print(jnp.allclose(rotated[0, 1, 0], jnp.array([jnp.cos(1) - jnp.sin(1), jnp.cos(1) + jnp.sin(1)])))
    True
    """
    rotary_dim = checked_rotary_dim(rotary_dim, heads.shape[-1])
    length = jnp.max(jnp.asarray(positions), initial=-1) + 1 if length is None and scaling is not None else length
    positions = jnp.broadcast_to(positions, heads.shape[:-2])[..., None]  # the same for all heads
    dtype = jnp.float64 if heads.dtype == jnp.float64 else jnp.float32
    by = angles(positions, rotary_dim, base, scaling, 0 if length is None else length, dtype=dtype, is_far=is_far)
    turning, still = heads[..., :rotary_dim].astype(dtype), heads[..., rotary_dim:]
    return jnp.concatenate([rotated(turning, by, interleaved=interleaved).astype(heads.dtype), still], axis=-1)
