"""Normalization by the root mean square."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float

from flax_layers.functional import rms_norm


class RMSNorm(nnx.Module):
    """Divides by the root mean square and multiplies by a learned scale, both in float32.

    Args:
        num_features: Size of the input's last axis.
        epsilon: Added to the mean of squares.
        offset: Added to the scale: 1 in Gemma, whose initial scales are 0. Initial scales are `1 - offset`.
        dtype: Dtype of the result. Default: the dtype of the inputs.
        param_dtype: Dtype of the scale.
        rngs: Not used: the initial scales are constant.

    References:
        Zhang and Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> norm = RMSNorm(2, offset=1.0, rngs=nnx.Rngs(0))
        >>> norm.scale[...].tolist(), [round(x, 3) for x in norm(jnp.array([3.0, 4.0])).tolist()]
        ([0.0, 0.0], [0.849, 1.131])
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.scale = nnx.Param(jnp.full(num_features, 1.0 - offset, param_dtype))
        self.epsilon = epsilon
        self.offset = offset
        self.dtype = dtype

    def __call__(self, inputs: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Returns the normalized inputs."""
        return rms_norm(inputs, self.scale[...], epsilon=self.epsilon, offset=self.offset, dtype=self.dtype)
