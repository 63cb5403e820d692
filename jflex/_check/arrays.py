"""Checks of arrays and numbers of a call."""

from __future__ import annotations

import math
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jflex._check.user_warnings import warn_user
from jflex.types import AnyArray, ArrayOrShape

LAYOUTS = ("BTNH", "BNTH")
DTYPES = ("bfloat16", "float16", "float32", "float64")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
_VALUES_OF_EIGHT_BITS = ("bfloat16", "float16")  # each holds every number of eight bits
_MOST_HEADS = 256


def describe_array(x: ArrayOrShape) -> str:
    """Formats an array for messages: ``bfloat16[2,1024,16,64]``."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def known_values(x: object) -> np.ndarray | None:
    """The values of an array; None for tracers, shapes, and arrays spread over several hosts.

    >>> known_values(jnp.arange(3)).tolist(), known_values(jax.ShapeDtypeStruct((3,), jnp.int32))
    ([0, 1, 2], None)
    """
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable:
        return np.asarray(x)
    return x if isinstance(x, np.ndarray) else None


def largest_value(x: object) -> int | None:
    """The largest of known values, 0 of none; None if they are not known."""
    known = known_values(x)
    return None if known is None else int(known.max(initial=0))


def check_arrays(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape | None,
    layout: str,
    *,
    has_value: bool = True,
    may_have_eight_bits: bool = False,
) -> None:
    """Raises unless query, key and value fit together.

    Args:
      query: The query.
      key: The key.
      value: The value; not looked at where the call has none.
      layout: Of all of them.
      has_value: Whether the call has a value.
      may_have_eight_bits: Whether it takes queries and keys of eight bits.

    Raises:
      TypeError: An argument is not an array, or their dtypes do not go together or are not floating-point.
      ValueError: Their shapes do not fit, or `layout` is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` must be one of {', '.join(map(repr, LAYOUTS))}. Got {layout!r}.")
    named: dict[str, Any] = {"query": query, "key": key} | ({"value": value} if has_value else {})
    for name, x in named.items():
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
    got = "Got " + ", ".join(f"{name}: {describe_array(x)}" for name, x in named.items()) + "."
    for name, x in named.items():
        if len(x.shape) != 4:
            axes = "[B, T, Hq, D]" if name == "query" else "[B, S, Hkv, D]"
            axes = axes if layout == "BTNH" else "[B, Hq, T, D]" if name == "query" else "[B, Hkv, S, D]"
            raise ValueError(
                f"`{name}` must have four axes, {axes} in the layout {layout!r}; it has {len(x.shape)}. Add the "
                f"missing ones with `x[None]`, or `jax.vmap` the call. {got}"
            )
        if not all(isinstance(size, int) for size in x.shape):
            raise ValueError(
                f"`{name}` must have sizes that are known while tracing; `jax.export` gave it symbolic ones. Export "
                "one program for each size. A batch can be symbolic where `jax.vmap` is around a call for one entry, "
                f"`flex_attention(q[None], k[None], v[None], ...)[0]`. {got}"
            )
    if may_have_eight_bits and not {str(query.dtype), str(key.dtype)}.isdisjoint(EIGHT_BITS):
        _check_eight_bits(query, key, value, got)
        del named["query"], named["key"]
    _check_floats(named, got, may_have_eight_bits)
    if len({x.dtype for x in named.values()}) > 1:
        names = "`query`, `key` and `value`" if has_value else "`query` and `key`"
        raise TypeError(f"{names} must have one dtype. Cast them to one of these. {got}")
    _check_shapes(query.shape, key.shape, named.get("value", key).shape, layout, got, has_value)


def _check_eight_bits(query: Any, key: Any, value: Any, got: str) -> None:
    """Raises unless query and key share a dtype of eight bits, and the value is wider; `got` lists them all.

    Raises:
      TypeError: They do not.
    """
    if query.dtype != key.dtype:
        raise TypeError(
            f"`query` and `key` must have one dtype where one of them has eight bits ({', '.join(EIGHT_BITS)}). "
            f"Quantise both, or cast both to the dtype of `value`. {got}"
        )
    if str(value.dtype) not in _VALUES_OF_EIGHT_BITS:
        raise TypeError(
            f"`value` must be {' or '.join(_VALUES_OF_EIGHT_BITS)} where `query` and `key` have eight bits: weights "
            f"and output have its dtype. Cast it. {got}"
        )


def _check_floats(named: dict[str, Any], got: str, may_have_eight_bits: bool) -> None:
    for name, x in named.items():
        if str(x.dtype) in DTYPES:
            continue
        also = ""
        if may_have_eight_bits and name != "value":
            other = "key" if name == "query" else "query"
            also = f", or have eight bits, as `{other}` ({', '.join(EIGHT_BITS)})"
        raise TypeError(f"`{name}` must be floating-point ({', '.join(DTYPES)}){also}; it is {x.dtype}. Cast it. {got}")


def _check_shapes(q: tuple, k: tuple, v: tuple, layout: str, got: str, has_value: bool) -> None:
    heads, length = (2, 1) if layout == "BTNH" else (1, 2)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]

    def fail(text: str) -> NoReturn:
        swapped_fits = (
            k[heads] == v[heads]
            and k[length] == v[length]
            and k[length]
            and q[length] % k[length] == 0
            and q[length] < q[heads]
            and q[3] == k[3]
            and q[0] == v[0] == k[0]
        )
        hint = (
            f" The shapes suggest another order of axes: if it is meant, pass layout={other!r}." if swapped_fits else ""
        )
        raise ValueError(f"{text} {got}{hint}")

    if k[0] != v[0] or k[0] not in (1, q[0]):
        if not has_value:
            fail(
                f"`key` must have the batch size of `query`, or 1 (shared by all). The batch sizes are {q[0]} (query), "
                f"{k[0]} (key)."
            )
        fail(
            f"`key` and `value` must have the batch size of `query`, or both 1 (shared by all). The batch sizes are "
            f"{q[0]} (query), {k[0]} (key), {v[0]} (value)."
        )
    if q[3] != k[3]:
        fail(f"`query` and `key` must have one head size. They have {q[3]} and {k[3]}.")
    if k[length] != v[length]:
        fail(f"`key` and `value` must have one length. They have {k[length]} and {v[length]}.")
    if k[heads] != v[heads]:
        fail(f"`key` and `value` must have as many heads. They have {k[heads]} and {v[heads]}.")
    if k[heads] == 0 or q[heads] == 0 or q[heads] % k[heads]:
        fail(
            f"`key` has {k[heads]} heads, which do not divide the {q[heads]} heads of `query`. Grouped-query "
            f"attention gives "
            "each key head an equal share of the query heads."
        )
    if 0 in (q[3], v[3]):
        fail("Head sizes must be at least 1.")


def warn_of_layout(query: ArrayOrShape, key: ArrayOrShape, layout: str) -> None:
    """Warns of arrays that are meant in the other layout: no model has so many heads, and fewer positions than heads.

    One query is a decoding step, and says nothing.
    """
    length, heads = (1, 2) if layout == "BTNH" else (2, 1)
    (T, Hq), (S, Hkv) = ((x.shape[length], x.shape[heads]) for x in (query, key))
    if Hq > _MOST_HEADS and 1 < T < Hq and Hkv > S:
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        warn_user(
            f"In the layout {layout!r}, `query` {describe_array(query)} has {Hq} heads and {T} positions, `key` "
            f"{describe_array(key)} {Hkv} heads and {S} positions. If heads and positions are swapped, pass "
            f"layout={other!r} to `jflex.flex_attention`, or arrays with `jnp.swapaxes(x, 1, 2)`."
        )


def check_scale(scale: object, D: int) -> float:
    """Returns the scale as a float; ``D ** -0.5`` for None.

    Raises:
      TypeError: `scale` is not a Python number.
      ValueError: `scale` is 0, infinite or NaN.
    """
    if scale is None:
        return D**-0.5
    if isinstance(scale, bool | Tracer | jax.Array) or not isinstance(scale, (int, float, np.number)):
        raise TypeError(
            f"`scale` must be a Python number. Got {type(scale).__name__}. To multiply by an array, capture it "
            "in a `score_mod`, or multiply `query` by it."
        )
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"`scale` must be finite and not 0. Got {scale}. Pass None for the default, D ** -0.5.")
    return float(scale)


def check_normalize(normalize: object, sinks: object) -> None:
    """Raises unless `normalize` is known and fits the sinks.

    Raises:
      ValueError: It is unknown, or there are sinks without a softmax.
    """
    if normalize not in ("softmax", "none"):
        raise ValueError(f"`normalize` must be 'softmax' or 'none'. Got {normalize!r}.")
    if normalize == "none" and sinks is not None:
        raise ValueError(
            "`sinks` enter the denominator of a softmax, and with `normalize='none'` there is none. Leave one out."
        )


def checked_sinks(sinks: object, heads: int) -> jax.Array:
    """Returns `sinks` as a JAX array.

    Raises:
      TypeError: They are no array, or not floating-point.
      ValueError: They are not one logit for each query head.
    """
    rule = f"`sinks` must be a floating-point array with one logit for each of the {heads} query heads, [{heads}]."
    x: Any = sinks
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{rule} Got {type(x).__name__}. Make one with `jnp.full({heads}, logit)`.")
    if str(x.dtype) not in DTYPES:
        raise TypeError(f"{rule} Got {describe_array(x)}. Cast it with `.astype(jnp.float32)`.")
    if x.shape != (heads,):
        raise ValueError(f"{rule} Got {describe_array(x)}. Index or broadcast it to one number for each head.")
    return jnp.zeros(heads, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def check_lse(return_lse: bool, normalize: str) -> None:
    """Raises ValueError if an lse is requested where there is none."""
    if return_lse and normalize == "none":
        raise ValueError(
            "`return_lse` must be False with `normalize='none'`: the lse is that of a softmax. Leave one of them out."
        )


# fmt: off
@overload
def check_kv_lengths(kv_lengths: None, B: int, S: int, name: str = "kv_lengths") -> None: ...
@overload
def check_kv_lengths(kv_lengths: AnyArray, B: int, S: int, name: str = "kv_lengths") -> jax.Array: ...
@overload
def check_kv_lengths(
    kv_lengths: jax.ShapeDtypeStruct, B: int, S: int, name: str = "kv_lengths"
) -> jax.ShapeDtypeStruct: ...
# fmt: on
def check_kv_lengths(
    kv_lengths: ArrayOrShape | None, B: int, S: int, name: str = "kv_lengths"
) -> jax.Array | jax.ShapeDtypeStruct | None:
    """Returns the lengths as a JAX array, or as the shape that `jflex.explain` got; `name` is the argument's.

    Raises:
      TypeError: They are not an array, or not int32.
      ValueError: There is not one for each batch entry, or a known one is negative or greater than S.
    """
    rule = f"`{name}` must be an int32 array [B], the number of visible keys of each of the {B} batch entries"
    if kv_lengths is None:
        return None
    if not (hasattr(kv_lengths, "shape") and hasattr(kv_lengths, "dtype")):
        raise TypeError(f"{rule}. Got {type(kv_lengths).__name__}; pass `jnp.asarray({name}, jnp.int32)`.")
    if kv_lengths.dtype != jnp.int32:
        raise TypeError(f"{rule}. Got {describe_array(kv_lengths)}; cast it with `.astype(jnp.int32)`.")
    if tuple(kv_lengths.shape) != (B,):
        hint = "" if kv_lengths.shape else f" For one length for all, pass `jnp.full({B}, length, jnp.int32)`."
        raise ValueError(f"{rule}. Got {describe_array(kv_lengths)}.{hint}")
    known = known_values(kv_lengths)
    if known is not None and known.size and not (known.min() >= 0 and known.max() <= S):
        wrong = int(np.argmax((known < 0) | (known > S)))
        raise ValueError(
            f"`{name}` must lie between 0 and S, the number of keys, {S}. Batch entry {wrong} has "
            f"{known[wrong]}. Make `key` and `value` longer, or clamp the lengths with `jnp.clip({name}, 0, {S})`."
        )
    return jnp.asarray(kv_lengths) if isinstance(kv_lengths, np.ndarray) else kv_lengths
