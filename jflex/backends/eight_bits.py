"""Arrays of eight bits in wider dtypes, for kernels that do not read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jflex.backends.base import Inputs
from pallas_kernels.spec import LATENT_TILE


def widened(inputs: Inputs) -> Inputs:
    """With query and key in the dtype of the value, which holds each of their numbers."""
    dtype = inputs.value.dtype
    return inputs._replace(query=inputs.query.astype(dtype), key=inputs.key.astype(dtype))


def dequantized(rows: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows [*tokens, H, D] times their scale, [*tokens, H] or [H], rounded once."""
    exact = np.promote_types(jnp.dtype(dtype), np.float32)  # which JAX refuses under strict promotion
    scale = jnp.broadcast_to(scale, rows.shape[:-1])[..., None]
    return (rows.astype(exact) * scale.astype(exact)).astype(dtype)


def in_tiles(x: jax.Array) -> jax.Array:
    """Columns [..., latent] as tiles [..., tiles, 128]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // LATENT_TILE, LATENT_TILE)


def dequantized_latents(rows: jax.Array, scale: jax.Array, rope: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Whole rows [*tokens, 1, W] of latent columns, the scales of their tiles [*tokens, tiles], and rotated columns.

    >>> rows, rope = jnp.ones((5, 1, 256), jnp.float8_e4m3fn), jnp.ones((5, 1, 64), jnp.bfloat16)
    >>> dequantized_latents(rows, jnp.ones((5, 2)), rope, jnp.bfloat16).shape
    (5, 1, 320)
    """
    latent = dequantized(in_tiles(rows[..., 0, :]), scale, dtype).reshape(rows.shape)
    return jnp.concatenate([latent, rope.astype(dtype)], axis=-1)
