"""Checks of the arguments that `jflex.dot_product_attention` shares with `jax.nn.dot_product_attention`."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jflex._call.dispatch import Implementation, names_of
from jflex._check.arguments import checked_lengths, describe_array

_AXES = (("B", "batch"), ("Hq", "query heads"), ("T", "queries"), ("S", "keys"))


def as_array(x: ArrayLike, name: str) -> jax.Array:
    """An argument as an array; numbers and nested sequences are converted, as everywhere in `jax.nn`."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.") from error


def batched(x: ArrayLike, name: str) -> jax.Array:
    """Query, key or value with four axes: adds the batch axis to three."""
    x = as_array(x, name)
    heads, length = ("Hq", "T") if name == "query" else ("Hkv", "S")
    if x.ndim not in (3, 4):
        raise ValueError(
            f"`{name}` must have four axes, [B, {length}, {heads}, D], or three without the batch. Got "
            f"{describe_array(x)}. Add the axis of heads with `x[..., None, :]`; fold several batch axes into one, or "
            "`jax.vmap` the call."
        )
    return x if x.ndim == 4 else x[None]


def checked_bias(bias: ArrayLike | None, shape: tuple[int, int, int, int]) -> jax.Array | None:
    """The bias with four axes; a boolean one as numbers, which `jax.nn` adds."""
    if bias is None:
        return None
    bias = as_array(bias, "bias")
    bias = bias.astype(jnp.int8) if bias.dtype == jnp.bool_ else bias
    if not (jnp.issubdtype(bias.dtype, jnp.floating) or jnp.issubdtype(bias.dtype, jnp.integer)):
        raise TypeError(f"`bias` must be floating-point or integers. Got {describe_array(bias)}.")
    return _broadcastable(bias, "bias", shape)


def checked_mask(mask: ArrayLike | None, shape: tuple[int, int, int, int]) -> jax.Array | None:
    """The mask with four axes."""
    if mask is None:
        return None
    mask = as_array(mask, "mask")
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"`mask` must be boolean, True where a query attends. Got {describe_array(mask)}. Cast a mask of 0 and 1 "
            "with `.astype(bool)`; pass one that is added to the scores as `bias`."
        )
    return _broadcastable(mask, "mask", shape)


def _broadcastable(x: jax.Array, name: str, shape: tuple[int, int, int, int]) -> jax.Array:
    rule = f"`{name}` must be [B, Hq, T, S], each of them 1 or as in the call, {list(shape)}"
    if x.ndim > 4:
        raise ValueError(f"{rule}. Got {describe_array(x)}, with {x.ndim} axes. `jax.vmap` the call over the others.")
    full = x.reshape((1,) * (4 - x.ndim) + x.shape)
    for (letter, what), got, size in zip(_AXES, full.shape, shape, strict=True):
        if got not in (1, size):
            hint = ""
            if x.ndim == 3 and shape[0] > 1 and x.shape[0] == shape[0]:
                hint = (
                    f" Three axes are [Hq, T, S]: for one {name} for each batch entry, insert the heads, `x[:, None]`."
                )
            raise ValueError(f"{rule}. Got {describe_array(x)}: {letter} is {got}, for {size} {what}.{hint}")
    return full


def checked_scale(scale: ArrayLike | None) -> tuple[Any, ArrayLike | None]:
    """The scale as a Python number or None, and a factor to apply to the scaled scores, or None."""
    if isinstance(scale, (jax.Array, np.ndarray)):
        real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
        if scale.shape != () or not real:
            raise TypeError(
                f"`scale` must be one real number. Got {describe_array(scale)}. To scale by head or position, multiply "
                "`query` or `key`, or use a `score_mod` with `jflex.flex_attention`."
            )
        return 1.0, jnp.asarray(scale).astype(jnp.float32)
    if isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool) and scale == 0:
        return 1.0, 0.0
    return scale, None


def check_flag(flag: object, name: str) -> None:
    """Raises TypeError unless a flag is known while tracing."""
    if not isinstance(flag, (bool, np.bool_)):
        hint = f" Under `jax.jit`, make it static: `static_argnames={name!r}`." if isinstance(flag, Tracer) else ""
        raise TypeError(f"`{name}` must be True or False. Got {type(flag).__name__}.{hint}")


def checked_seq_lengths(lengths: ArrayLike | None, name: str, B: int, size: int) -> jax.Array | None:
    """Lengths as an int32 array."""
    if lengths is None:
        return None
    array = as_array(lengths, name)
    known = lengths.astype(array.dtype) if isinstance(lengths, np.ndarray) else array  # inside of `jit`, too
    return checked_lengths(known, B, size, name, "queries" if name == "query_seq_lengths" else "keys", "Clamp")


def checked_window(window: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """``(before, after)``, with None for a side without a bound.

    A window that hides every key has no bound on the sides that are -1, as in FlashAttention: ``(-1, 0)`` is causal.
    """
    if window is None:
        return None, None
    rule = "`local_window_size` must be a Python int, or a pair (left, right) of them"
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    try:
        before, after = (operator.index(side) for side in sides if not isinstance(side, (bool, jax.Array)))
    except (TypeError, ValueError):
        raise TypeError(
            f"{rule}. Got {window!r}. For sizes that are data, pass arrays to `jflex.masks.sliding_window`, and the "
            "mask to `jflex.flex_attention`."
        ) from None
    if before >= -after:
        return before, after
    if -1 not in (before, after):
        raise ValueError(
            f"{rule}, of keys before and after the position of the query. Got {(before, after)}, which hides every "
            "key. Pass -1 for a side without a bound."
        )
    return None if before == -1 else before, None if after == -1 else after


def check_implementation(implementation: Implementation) -> None:
    """Raises ValueError for a name that jflex does not have."""
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation or ())
    if "cudnn" in names:
        raise ValueError(
            "`implementation` cannot be 'cudnn', which `jax.nn.dot_product_attention` has: jflex does not call cuDNN. "
            "Pass None, which selects among jflex's own kernels, or 'mosaic_gpu' or 'triton' by name."
        )
    names_of(implementation)
