"""Functions of the layers: rotary embedding, RMS norm, and the split into heads."""

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array, Float

from jflex.rotary import rotate as rotate


def split_heads(features: Float[Array, "*batch T features"], num_heads: int) -> Float[Array, "*batch T H D"]:
    """Splits the last axis into heads of adjacent features: `num_heads` is a divisor of it.

    Example:
        >>> import jax.numpy as jnp
        >>> split_heads(jnp.zeros((2, 7, 48)), num_heads=3).shape
        (2, 7, 3, 16)
    """
    return features.reshape(*features.shape[:-1], num_heads, features.shape[-1] // num_heads)


def merge_heads(heads: Float[Array, "*batch T H D"]) -> Float[Array, "*batch T H*D"]:
    """Merges the last two axes: the inverse of `split_heads`.

    Example:
        >>> import jax.numpy as jnp
        >>> merge_heads(jnp.zeros((2, 7, 3, 16))).shape
        (2, 7, 48)
    """
    return heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])


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
        inputs: Inputs, which are normalized along the last axis.
        scale: One factor for each feature.
        epsilon: Added to the mean of squares.
        offset: Added to the scale.
        dtype: Dtype of the result. Default: the dtype of the inputs.

    References:
        Zhang and Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> import jax.numpy as jnp
        >>> [round(x, 3) for x in rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2)).tolist()]
        [0.849, 1.131]
    """
    x = inputs.astype(jnp.float32)
    factor = jnp.expand_dims(scale.astype(jnp.float32) + offset, range(x.ndim - 1))
    # In the sum, not behind it: XLA fuses a norm of one row, whose sum is a scalar, only if no constant follows.
    mean_square = jnp.sum((x * x + epsilon) / x.shape[-1], axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square) * factor).astype(dtype or inputs.dtype)
