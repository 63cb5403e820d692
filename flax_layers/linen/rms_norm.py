"""Normalization by the root mean square."""

import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype
from jaxtyping import Array, Float

from flax_layers.functional import rms_norm


class RMSNorm(linen.Module):
    """Divides by the root mean square and multiplies by a learned scale, both in float32; as `flax_layers.nnx.RMSNorm`.

    It takes the arguments of that norm, but no `rngs`.

    Example:
        >>> import jax
        >>> outputs, variables = RMSNorm(2, offset=1.0).init_with_output(jax.random.key(0), jnp.array([3.0, 4.0]))
        >>> variables["params"]["scale"].tolist(), [round(x, 3) for x in outputs.tolist()]
        ([0.0, 0.0], [0.849, 1.131])
    """

    num_features: int
    epsilon: float = 1e-6
    offset: float = 0.0
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    @linen.compact
    def __call__(self, inputs: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Returns the normalized inputs."""
        initializer = linen.initializers.constant(1.0 - self.offset)
        scale = self.param("scale", initializer, (self.num_features,), self.param_dtype)
        return rms_norm(inputs, scale, epsilon=self.epsilon, offset=self.offset, dtype=self.dtype)
