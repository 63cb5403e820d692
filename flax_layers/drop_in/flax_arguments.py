"""Arguments that Flax passes to an `attention_fn`: dense masks and biases, precision, and unsupported ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import TypedDict

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, Shaped

Reader = Callable[[ArrayLike, ArrayLike, ArrayLike, ArrayLike], Array]
"""`(b, h, q_idx, kv_idx) -> element`, on scalars."""


class DropoutOptions(TypedDict, total=False):
    """Arguments for dropout of `jflex.flex_attention`."""

    dropout_rate: float
    dropout_key: Array


def dropout_options(rate: float, deterministic: bool, is_broadcast: bool, key: Array | None) -> DropoutOptions:
    """Returns the arguments for dropout of `jflex.flex_attention`; none if dropout is off.

    With `is_broadcast`, the `broadcast_dropout` of Flax, batch entries and heads drop the same weights.

    Raises:
        ValueError: There is no key.

    Example:
        >>> dropout_options(0.1, True, True, None)
        {}
        >>> dropout_options(0.1, False, True, jax.random.key(0))["dropout_key"].shape
        (1, 1)
    """
    if rate == 0 or deterministic:
        return {}
    if key is None:
        raise ValueError(f"`dropout_rng` is missing, and `dropout_rate` is {rate}. Pass a key, or deterministic=True.")
    return {"dropout_rate": rate, "dropout_key": key[None, None] if is_broadcast else key}


def check_flax_arguments(*, module: object, input_positions: object, einsums: Mapping[str, object]) -> None:
    """Raises NotImplementedError for arguments that jflex does not support; all must be None, and so must all einsums.

    Example:
        >>> check_flax_arguments(module=object(), input_positions=None, einsums={})
        Traceback (most recent call last):
        NotImplementedError: `module` is set to sow the attention weights (`sow_weights=True`), which jflex never ...
    """
    if module is not None:
        raise NotImplementedError(
            "`module` is set to sow the attention weights (`sow_weights=True`), which jflex never stores. Call the "
            "layer without `sow_weights`, or make it with Flax's own `dot_product_attention` to inspect the weights."
        )
    if input_positions is not None:
        raise NotImplementedError(
            "`input_positions` are for a rotary embedding, which this `attention_fn` does not apply; mods get indices "
            "in the sequence. Rotate queries and keys in a function that calls this one, or use "
            "`FlexAttention(rotary_base=...)` of flax_layers, whose call takes `positions`."
        )
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(
                f"`{name}` would replace a matrix product inside the kernels of jflex. Got {einsum}. Pass None, or "
                "make the layer with Flax's own `dot_product_attention`."
            )


def four_axes(name: str, array: Shaped[Array, "*shape"], shape: tuple[int, ...]) -> Shaped[Array, "#B #H #T #S"]:
    """Folds the batch axes of a dense mask or bias into one, of size 1 if all of them are broadcast.

    `shape` is `(*batch, heads, queries, keys)`. Axes of size 1 for heads, queries and keys are kept.

    Raises:
        ValueError: The array does not broadcast to `shape`.

    Example:
        >>> four_axes("mask", jnp.ones((2, 1, 1, 7, 1)), (2, 3, 4, 7, 7)).shape
        (6, 1, 7, 1)
    """
    padded = (1,) * (len(shape) - array.ndim) + array.shape
    if len(padded) != len(shape) or any(size not in (1, full) for size, full in zip(padded, shape, strict=True)):
        raise ValueError(
            f"`{name}` must broadcast to [*batch, heads, queries, keys], {list(shape)}. Got shape {list(array.shape)}."
        )
    batch = padded[:-3]
    if math.prod(batch) != 1:
        batch = shape[:-3]
    return jnp.broadcast_to(array.reshape(padded), (*batch, *padded[-3:])).reshape(math.prod(batch), *padded[-3:])


def reader(array: Shaped[Array, "#B #H #T #S"]) -> Reader:
    """A function that reads one element of an array. Indices of axes of size 1 are ignored.

    Example:
        >>> read = reader(jnp.arange(3.0).reshape(1, 1, 1, 3))
        >>> float(read(5, 7, 9, 2))
        2.0
    """
    is_used = [size != 1 for size in array.shape]
    squeezed = array.reshape([size for size in array.shape if size != 1])
    return lambda *indices: squeezed[tuple(index for index, used in zip(indices, is_used, strict=True) if used)]


def allowed_lengths(mask: Shaped[Array, "#B #H 1 #S"], batch: int, keys: int) -> Int32[Array, " B"]:
    """The number of keys of each batch entry, up to the last one that the mask allows for any head.

    Example:
        >>> allowed_lengths(jnp.array([1, 0, 1, 0], bool).reshape(1, 1, 1, 4), 2, 4).tolist()
        [3, 3]
    """
    allowed = jnp.broadcast_to(jnp.any(mask, axis=(1, 2)), (batch, keys))
    ends = jnp.arange(1, keys + 1, dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(allowed, ends, 0), axis=1, initial=0)


def matmul_precision(
    precision: jax.lax.PrecisionLike | jax.lax.DotAlgorithmPreset,
) -> contextlib.AbstractContextManager[object]:
    """A context in which jflex computes with the `precision` of Flax; for None, it changes nothing.

    It takes a `jax.lax.Precision`, a `jax.lax.DotAlgorithmPreset`, a name of one, or a pair of equal ones.

    Raises:
        ValueError: The precision is something else.

    Example:
        >>> with matmul_precision(jax.lax.Precision.HIGHEST):
        ...     jax.config.jax_default_matmul_precision
        'highest'
    """
    if precision is None:
        return contextlib.nullcontext()
    value = precision[0] if isinstance(precision, tuple) and len(set(precision)) == 1 else precision
    if isinstance(value, jax.lax.DotAlgorithmPreset):
        value = value.name
    elif isinstance(value, jax.lax.Precision):
        value = value.name.lower()
    try:
        return jax.default_matmul_precision(value)
    except ValueError:
        raise ValueError(
            "`precision` must be the same for both operands: None, a jax.lax.Precision, a "
            f"jax.lax.DotAlgorithmPreset, or a name that jax.default_matmul_precision takes. Got {precision!r}."
        ) from None
