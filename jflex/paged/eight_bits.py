"""Keys and values of eight bits: how they are rounded, and their scales.

What is held times its scale is the key or the value. A scale is given for each head, or made from the largest
magnitude of each row, for each token and head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float32

from jflex._check.arguments import describe_array
from jflex.paged.store import LARGEST, is_eight_bits
from jflex.types import AnyArray

LEAST_SCALE = float(np.finfo(np.float32).tiny)  # GPUs and XLA take anything smaller for zero
WRITTEN = ("bfloat16", "float16", "float32")  # of queries, and of tokens that are written


def row_scales(rows: AnyArray, dtype: DTypeLike) -> Float32[Array, "*tokens H"]:
    """The scale of each row of [*tokens, H, D]: its largest magnitude is the largest number of `dtype`.

    A row of zeros gets the smallest normal float32. The inverse of the largest number is rounded to float32 first.

    >>> row_scales(jnp.array([[1.0, -254.0], [0.5, 0.0]]), jnp.int8).tolist()
    [2.0, 0.003937007859349251]
    """
    largest = jnp.max(jnp.abs(jnp.asarray(rows).astype(jnp.float32)), axis=-1)
    # A division by a constant would be a product or not, as XLA likes.
    return jnp.maximum(largest * np.float32(1 / LARGEST[str(jnp.dtype(dtype))]), LEAST_SCALE)


def quantised(rows: AnyArray, scale: Float32[AnyArray, "*tokens H"], dtype: DTypeLike) -> jax.Array:
    """Rows [*tokens, H, D] times the inverse of their scale, in float32, rounded to the nearest, ties to even.

    What is out of range becomes the largest number of its sign. NaN stays NaN; in int8, which has none, it becomes 0.

    >>> quantised(jnp.array([[1.0, -5.0, 1000.0]]), jnp.array([2.0]), jnp.int8).tolist()
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
    is_array = isinstance(scale, jax.Array | np.ndarray) and not isinstance(scale, Tracer)
    if not is_array or (isinstance(scale, jax.Array) and not scale.is_fully_addressable):
        return
    x = np.asarray(scale)
    wrong = x[~((x >= LEAST_SCALE) & (x < np.inf))]
    if wrong.size:
        raise ValueError(
            f"`{name}` must be positive, finite and at least {LEAST_SCALE:.3g}. Got {wrong[0]}. A scale is the largest "
            "magnitude that must be held, divided by that of the dtype: 448 of float8_e4m3fn, 57344 of float8_e5m2, "
            "127 of int8."
        )
