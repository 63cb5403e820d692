"""Dropout of the weights of a block, in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jflex.backends.base import Inputs
from jflex.backends.xla.blockwise import Unit, Walk, over_block
from pallas_kernels.spec import AttentionSpec


def kept_weights(walk: Walk, inputs: Inputs, unit: Unit, column: jax.Array) -> jax.Array | None:
    """Kept weights of a block, in the shape of its scores; None without dropout."""
    dropout = walk.spec.dropout
    if dropout is None:
        return None
    mod = functools.partial(dropout.mod, inputs.captured.dropout)
    return over_block(mod, (), walk.indices(unit, column), walk.axes)


def dropped(x: jax.Array, kept: jax.Array | None) -> jax.Array:
    """Weights or their cotangents, 0 where dropped."""
    return x if kept is None else jnp.where(kept, x, 0.0)


def scaled_up(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Multiplies a sum over kept weights, or its cotangent, by the scale of dropout."""
    return x if spec.dropout is None else x * jnp.asarray(spec.dropout.scale, x.dtype)
