"""Keys and values of eight bits: how they are rounded, and their scales.

What is held times its scale is the key or the value. A scale is given for each head, or made from the largest
magnitude of each row, for each token and head.

Latent vectors have tiles of columns with a scale each, which is a power of two, and rotated columns apart. This is the
row of FlashMLA for DeepSeek-V3.2 in three arrays. Of 512 latent and 64 rotated columns it has 656 bytes: 512 of
float8_e4m3fn, four scales of float32, 64 rotated columns of bfloat16, which rounding would harm most.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32

from jflex._check.arguments import LARGEST, describe_array, is_eight_bits, known_values
from jflex.backends.eight_bits import in_tiles
from jflex.types import AnyArray
from pallas_kernels.spec import LATENT_TILE

LEAST_SCALE = float(np.finfo(np.float32).tiny)  # GPUs and XLA take anything smaller for zero
WRITTEN = ("bfloat16", "float16", "float32")  # of queries, and of tokens that are written
TILES_DTYPE = "float8_e4m3fn"  # of latent vectors with a scale for each tile of columns
ROPE_DTYPE = "bfloat16"
QUERIES = ("bfloat16", "float32")  # dtypes that hold each number of a tile times its scale
_MANTISSA, _OF_448 = 0x7FFFFF, 0x600000  # of float32: all bits, and those of 448 = 1.75 * 2 ** 8


def row_scales(rows: AnyArray, dtype: DTypeLike) -> Float32[Array, "*tokens H"]:
    """The scale of each row of [*tokens, H, D]: its largest magnitude is the largest number of `dtype`.

    A row of zeros gets the smallest normal float32. The inverse of the largest number is rounded to float32 first.

    >>> row_scales(jnp.array([[1.0, -254.0], [0.5, 0.0]]), jnp.int8).tolist()
    [2.0, 0.003937007859349251]
    """
    largest = jnp.max(jnp.abs(jnp.asarray(rows).astype(jnp.float32)), axis=-1)
    # A division by a constant would be a product or not, as XLA likes.
    return jnp.maximum(largest * np.float32(1 / LARGEST[str(jnp.dtype(dtype))]), LEAST_SCALE)


def quantized(rows: AnyArray, scale: Float32[AnyArray, "*tokens H"], dtype: DTypeLike) -> jax.Array:
    """Rows [*tokens, H, D] times the inverse of their scale, in float32, rounded to the nearest, ties to even.

    What is out of range becomes the largest number of its sign. NaN stays NaN; in int8, which has none, it becomes 0.

    >>> quantized(jnp.array([[1.0, -5.0, 1000.0]]), jnp.array([2.0]), jnp.int8).tolist()
    [[0, -2, 127]]
    """
    largest = LARGEST[str(jnp.dtype(dtype))]
    scaled = jnp.asarray(rows).astype(jnp.float32) * (1 / jnp.asarray(scale))[..., None]
    scaled = jnp.clip(scaled, -largest, largest)
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.where(jnp.isnan(scaled), 0, jnp.round(scaled))
    return scaled.astype(dtype)


def first_scale(name: str, scale: ArrayLike | None, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array | None:
    """The scale of a new cache of pages [*L, P, page_size, Hkv]: that of each head, or ones for each token and head.

    >>> first_scale("k_scale", 0.5, (4, 2, 3), jnp.int8).shape, first_scale("k_scale", None, (4, 2, 3), jnp.int8).shape
    ((3,), (4, 2, 3))
    """
    if is_eight_bits(dtype):
        heads = (*shape[:-3], shape[-1])
        return jnp.ones(shape, jnp.float32) if scale is None else static_scale(name, scale, heads)
    if scale is not None:
        raise TypeError(f"`{name}` must be None: keys and values of {jnp.dtype(dtype)} have no scales. Leave it out.")
    return None


def static_scale(name: str, scale: ArrayLike | None, shape: tuple[int, ...]) -> Float32[Array, "*L Hkv"]:
    """A given scale as one number for each head, checked."""
    is_number = isinstance(scale, int | float | np.generic) and not isinstance(scale, bool)
    x = np.asarray(scale) if is_number else scale
    kinds = jnp.floating, jnp.integer
    if not isinstance(x, jax.Array | np.ndarray) or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        raise TypeError(f"`{name}` must be a number, or an array of them. Got {scale!r}.")
    try:
        fits = np.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` must be one number, or one for each key head, {list(shape)}. Got {describe_array(x)}. Leave it "
            "out for a scale of each token and head, which `jflex.paged.write` computes."
        )
    x = jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape)
    check_positive(name, x)
    return x


def check_scale(name: str, scale: Any, pages: AnyArray) -> None:
    """Raises unless a scale fits pages of keys or values, [*L, P, page_size, Hkv, D]."""
    if not is_eight_bits(pages.dtype):
        if scale is not None:
            raise TypeError(
                f"`{name}` must be None: keys and values of {pages.dtype} have no scales, only those of "
                f"{', '.join(LARGEST)}. Multiply them in before `jflex.paged.write`."
            )
        return
    if not (hasattr(scale, "shape") and hasattr(scale, "dtype")) or scale.dtype != jnp.float32:
        got = describe_array(scale) if hasattr(scale, "dtype") else type(scale).__name__
        raise TypeError(
            f"`{name}` must be float32: keys and values of {pages.dtype} have scales. Got {got}. Make the cache with "
            "`PagedCache.create`."
        )
    tokens = pages.shape[:-1]
    heads = (*tokens[:-3], tokens[-1])
    if scale.shape not in (tokens, heads):
        raise ValueError(
            f"`{name}` must have one scale for each head, {list(heads)}, or for each token and head, {list(tokens)}. "
            f"Got {describe_array(scale)}. Blocks of 128 columns have scales in a `LatentCache` alone."
        )
    if scale.shape == heads:
        check_positive(name, scale)


def check_positive(name: str, scale: ArrayLike) -> None:
    """Raises ValueError unless all scales, if they are known, are positive, finite and not subnormal."""
    x = known_values(scale)
    if x is None:
        return
    wrong = x[~((x >= LEAST_SCALE) & (x < np.inf))]
    if wrong.size:
        raise ValueError(
            f"`{name}` must be positive, finite and at least {LEAST_SCALE:.3g}. Got {wrong[0]}. A scale is the largest "
            "magnitude that must be held, divided by that of the dtype: 448 of float8_e4m3fn, 57344 of float8_e5m2, "
            "127 of int8."
        )


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


def quantized_tiles(
    latent: Float[AnyArray, "N latent"], scale: Float32[AnyArray, "N tiles"]
) -> Float[Array, "N latent"]:
    """Latent vectors divided by the scales of their tiles, rounded to the nearest, ties to even.

    >>> quantized_tiles(jnp.full((1, 128), 3.0), jnp.array([[2.0]]))[0, 0].item()
    1.5
    """
    return quantized(in_tiles(jnp.asarray(latent)), scale, TILES_DTYPE).reshape(latent.shape)


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
