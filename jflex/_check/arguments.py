"""Checks of single arguments of calls: arrays, numbers, the config, and the device that arrays are on."""

from __future__ import annotations

import math
import operator
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.typing import DTypeLike

from jflex.config import Config
from jflex.types import ArrayOrShape
from pallas_kernels.spec import Blocks

LAYOUTS = ("BTNH", "BNTH")
DTYPES = ("bfloat16", "float16", "float32", "float64")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}  # of keys and values that have scales


def describe_array(x: ArrayOrShape) -> str:
    """Formats an array for messages: ``bfloat16[2,1024,16,64]``."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def is_eight_bits(dtype: DTypeLike) -> bool:
    """True if keys of this dtype have scales."""
    return str(jnp.dtype(dtype)) in LARGEST


def check_layout(layout: object) -> None:
    """Raises ValueError for a layout that jflex does not have."""
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` must be one of {', '.join(map(repr, LAYOUTS))}. Got {layout!r}.")


def check_is_array(x: object, name: str) -> None:
    """Raises TypeError unless an argument has a shape and a dtype."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")


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


def check_scale(scale: object, D: int) -> float:
    """Returns the scale as a float; ``D ** -0.5`` for None."""
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
    """Raises unless `normalize` is known and fits the sinks."""
    if normalize not in ("softmax", "none"):
        raise ValueError(f"`normalize` must be 'softmax' or 'none'. Got {normalize!r}.")
    if normalize == "none" and sinks is not None:
        raise ValueError(
            "`sinks` enter the denominator of a softmax, and with `normalize='none'` there is none. Leave one out."
        )


def checked_sinks(sinks: object, heads: int) -> jax.Array:
    """Returns `sinks` as a JAX array."""
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


def checked_lengths(
    lengths: ArrayOrShape,
    B: int,
    size: int,
    name: str = "kv_lengths",
    noun: str = "visible keys",
    remedy: str = "Make `key` and `value` longer, or clamp",
) -> jax.Array:
    """Returns the number of keys (or `noun`) of each batch entry as a JAX array, or the shape that `explain` got."""
    x: Any = lengths
    rule = f"`{name}` must be an int32 array [B], the number of {noun} of each of the {B} batch entries"
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{rule}. Got {type(x).__name__}; pass `jnp.asarray({name}, jnp.int32)`.")
    if x.dtype != jnp.int32:
        raise TypeError(f"{rule}. Got {describe_array(x)}; cast it with `.astype(jnp.int32)`.")
    if tuple(x.shape) != (B,):
        hint = "" if x.shape else f" For one length for all, pass `jnp.full({B}, length, jnp.int32)`."
        raise ValueError(f"{rule}. Got {describe_array(x)}.{hint}")
    known = known_values(x)
    if known is not None and known.size and not (known.min() >= 0 and known.max() <= size):
        wrong = int(np.argmax((known < 0) | (known > size)))
        letter, counted = ("T", "queries") if noun == "queries" else ("S", "keys")
        raise ValueError(
            f"`{name}` must lie between 0 and {letter}, the number of {counted}, {size}. Batch entry {wrong} has "
            f"{known[wrong]}. {remedy} the lengths with `jnp.clip({name}, 0, {size})`."
        )
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def checked_size(size: SupportsIndex, name: str) -> int:
    """A size as a Python int."""
    try:
        number = None if isinstance(size, bool) else operator.index(size)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"`{name}` must be a Python int, known while tracing. Got {size!r} ({type(size).__name__}).")
    if number < 0:
        raise ValueError(f"`{name}` must not be negative. Got {number}.")
    return number


def checked_positive(size: SupportsIndex, name: str) -> int:
    """A size of at least 1 as a Python int."""
    number = checked_size(size, name)
    if number == 0:
        raise ValueError(f"`{name}` must be at least 1. Got 0.")
    return number


def checked_shape(
    batch: SupportsIndex | None, heads: SupportsIndex | None, q_length: SupportsIndex, kv_length: SupportsIndex
) -> tuple[int, int, int, int]:
    """``(B, H, Q_LEN, KV_LEN)`` as Python ints; B and H of None are 1."""
    return (
        1 if batch is None else checked_size(batch, "B"),
        1 if heads is None else checked_size(heads, "H"),
        checked_size(q_length, "Q_LEN"),
        checked_size(kv_length, "KV_LEN"),
    )


def checked_block_size(block_size: SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex]) -> tuple[int, int]:
    """Block sizes of queries and keys.

    >>> checked_block_size(128), checked_block_size((64, 128))
    ((128, 128), (64, 128))
    """
    pair = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise TypeError(f"`block_size` must be an integer or a pair (queries, keys). Got {block_size!r}.")
    q_block, kv_block = checked_size(pair[0], "block_size"), checked_size(pair[1], "block_size")
    if 0 in (q_block, kv_block):
        raise ValueError(f"`block_size` must be positive. Got {block_size!r}.")
    return q_block, kv_block


def checked_integers(values: npt.ArrayLike, name: str) -> np.ndarray:
    """Integers as an array; none are an array of int64.

    >>> checked_integers([3, 1], "ids"), checked_integers([], "ids").dtype
    (array([3, 1]), dtype('int64'))
    """
    array = np.asarray(values)
    if not array.size:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"`{name}` must hold integers. Got {array.dtype}.")
    return array


def check_int32(name: str, x: object, content: str) -> None:
    """Raises TypeError unless an argument is an array of int32."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"`{name}` must be an int32 array of {content}. Got {type(x).__name__}. Wrap it in "
            "`jnp.asarray(x, jnp.int32)`."
        )
    if x.dtype != jnp.int32:
        raise TypeError(
            f"`{name}` must be an int32 array of {content}. Got {describe_array(x)}. Cast it with `.astype(jnp.int32)`."
        )


def check_config(config: Config | None, blocks: Blocks | None) -> Config:
    """Returns the config; the default one for None."""
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise TypeError(f"`config` must be a `jflex.Config`. Got {type(config).__name__}.")
    for name in ("forward", "dkv", "dq", "decode"):
        tiles = getattr(config, name)
        if tiles is None or blocks is None:
            continue
        for size, tile, axis in zip(blocks.size, (tiles.block_q, tiles.block_kv), ("q", "kv"), strict=True):
            if size % tile and (name, axis) != ("decode", "q"):
                raise ValueError(
                    f"`config.{name}.block_{axis}` must divide the block size of the mask, {size}. Got {tile}. "
                    "Take a divisor, or create the mask with another `block_size`."
                )
    return config


def current_device(*arrays: object) -> tuple[str, str]:
    """Platform and kind of the device that will run the call.

    An abstract device that the user set takes precedence (lowering for an absent GPU), then the devices of concrete
    arrays and of ShapeDtypeStructs with a sharding, then JAX's default.
    """
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        platform = getattr(abstract, "platform", None) or "gpu"
        return _platform(platform), abstract.device_kind
    for device in map(device_of, arrays):
        if device is not None:
            return _platform(device.platform), device.device_kind
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    device = device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
    return _platform(device.platform), device.device_kind


def device_of(x: Any) -> Any:
    """A device of an array, or of a shape with a sharding; None without one, and for tracers."""
    if isinstance(x, jax.Array):
        return None if isinstance(x, Tracer) else next(iter(x.devices()))
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
    if sharding is None or isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    return next(iter(sharding.device_set))


def _platform(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm", "gpu") else name


def current_precision(dtype: DTypeLike) -> str | None:
    """Precision of float32 GEMMs: that of ``jax.default_matmul_precision``, None for JAX's default."""
    if jnp.dtype(dtype) != jnp.float32:
        return None
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]  # likewise
    return None if precision is None else str(precision)
