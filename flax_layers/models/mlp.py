"""The gated MLP of all families."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
}
"""Activations, by their names in Transformers."""


class MLP(nnx.Module):
    """A gated MLP.

    Args:
        width: Size of the residual stream.
        hidden: Size of the hidden layer.
        activation: A name in `ACTIVATIONS`.
        linear: Makes a projection with given input and output sizes.
    """

    def __init__(self, width: int, hidden: int, activation: str, linear: Callable[..., nnx.Module]):
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)
        self.activation = activation

    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Returns the output, which is added to the residual stream."""
        return self.down(ACTIVATIONS[self.activation](self.gate(inputs)) * self.up(inputs))
