"""Latent vectors of eight bits: tiles of columns with a scale each, which is a power of two; rotated columns apart.

This is the row of FlashMLA for DeepSeek-V3.2 in three arrays. Of 512 latent and 64 rotated columns it has 656 bytes:
512 of float8_e4m3fn, four scales of float32, 64 rotated columns of bfloat16, which rounding would harm most.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jflex._check.arguments import describe_array
from jflex.backends.eight_bits import in_tiles
from jflex.paged.eight_bits import quantised
from jflex.types import AnyArray
from pallas_kernels.spec import LATENT_TILE

TILES_DTYPE = "float8_e4m3fn"
ROPE_DTYPE = "bfloat16"
QUERIES = ("bfloat16", "float32")  # dtypes that hold each number times its scale
_MANTISSA, _OF_448 = 0x7FFFFF, 0x600000  # of float32: all bits, and those of 448 = 1.75 * 2 ** 8


def has_tiles(dtype: DTypeLike) -> bool:
    """True if latent vectors of this dtype have scales."""
    return str(jnp.dtype(dtype)) == TILES_DTYPE


def tile_scales(latent: Float[AnyArray, "N latent"]) -> Float32[Array, "N tiles"]:
    """Scales of tiles: the least power of two that brings the largest magnitude of a tile to at most 448.

    It is computed on bits, so that no logarithm rounds it. A tile of zeros gets the smallest normal float32; one with
    NaN or an infinity gets that, so that all of it becomes NaN.

    >>> tile_scales(jnp.repeat(jnp.array([448.0, 449.0]), 128)[None]).tolist()
    [[1.0, 2.0]]
    """
    largest = jnp.max(jnp.abs(in_tiles(jnp.asarray(latent).astype(jnp.float32))), axis=-1)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits >> 23) - 8 + ((bits & _MANTISSA) > _OF_448).astype(jnp.int32)
    scale = lax.bitcast_convert_type(jnp.maximum(exponent, 1) << 23, jnp.float32)
    return jnp.where(jnp.isfinite(largest), scale, largest)


def quantised_tiles(
    latent: Float[AnyArray, "N latent"], scale: Float32[AnyArray, "N tiles"]
) -> Float[Array, "N latent"]:
    """Latent vectors divided by the scales of their tiles, rounded to the nearest, ties to even.

    >>> quantised_tiles(jnp.full((1, 128), 3.0), jnp.array([[2.0]]))[0, 0].item()
    1.5
    """
    return quantised(in_tiles(jnp.asarray(latent)), scale, TILES_DTYPE).reshape(latent.shape)


def check_latent_size(size: int) -> None:
    """Raises ValueError unless latent vectors of eight bits are whole tiles."""
    if size % LATENT_TILE:
        raise ValueError(
            f"`latent_size` must be a multiple of {LATENT_TILE} with {TILES_DTYPE}: so many columns share a scale. Got "
            f"{size}. Take another dtype, or pad the latent vectors with zeros."
        )


def check_tiles(rows: AnyArray, rope_size: int, rope: Any, scale: Any) -> None:
    """Raises unless rotated columns and scales fit rows of latent vectors."""
    tiled = has_tiles(rows.dtype)
    for name, x, dtype in (("cache.rope", rope, ROPE_DTYPE), ("cache.scale", scale, "float32")):
        if not tiled and x is not None:
            raise TypeError(
                f"`{name}` must be None: rows of {rows.dtype} hold the rotated columns, and have no scales. Only "
                f"latent vectors of {TILES_DTYPE} have."
            )
        if tiled and str(getattr(x, "dtype", None)) != dtype:
            got = type(x).__name__ if x is None or not hasattr(x, "dtype") else describe_array(x)
            raise TypeError(
                f"`{name}` must be {dtype}: the cache holds latent vectors of {rows.dtype}, with scales, and rotated "
                f"columns apart. Got {got}. Make the cache with `LatentCache.create`."
            )
    if not tiled:
        return
    check_latent_size(rows.shape[-1])
    tiles = rows.shape[-1] // LATENT_TILE
    shapes = ("cache.rope", rope, (*rows.shape[:-1], rope_size)), ("cache.scale", scale, (*rows.shape[:-2], tiles))
    for name, x, shape in shapes:
        if x.shape != shape:
            raise ValueError(
                f"`{name}` must have the shape {list(shape)}, by `cache.rows` and `rope_size`. Got {describe_array(x)}."
                " Make the cache with `LatentCache.create`."
            )
