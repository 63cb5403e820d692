"""Reading and writing parts of large bfloat16 arrays on a CPU, without a copy of all of them.

XLA's CPU compiler of jaxlib 0.10.2 has no bfloat16 slices, gathers, updates and scatters: it converts the array to
float32, takes the part, and converts back. Where the part is read in a loop, the conversion moves out of it, and all of
the array is widened: 2.0 times its memory. A scatter widens it anywhere. `jax.lax.optimization_barrier` does not stay
long enough to stop this, and integers through ``bitcast_convert_type`` are another whole copy. In jaxlib 0.11.2 and
0.12.0 none of this happens, as for float16 and float32 everywhere; there, and on other devices, nothing is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jflex._call.checks import current_device
from jflex.types import AnyArray

_NATIVE = (0, 11, 2)  # the first version of JAX that was seen to leave bfloat16 as it is


def is_widened(dtype: DTypeLike, platform: str) -> bool:
    """Whether XLA converts arrays of this dtype to take a part of them.

    >>> is_widened(jnp.float16, "cpu"), is_widened(jnp.bfloat16, "gpu")
    (False, False)
    """
    return platform == "cpu" and dtype == jnp.bfloat16 and jax.__version_info__ < _NATIVE


def read(part: Callable[[], jax.Array], exists: jax.Array, platform: str) -> jax.Array:
    """A part of an array, in a loop or before the array is written: XLA moves nothing out of a branch.

    Args:
      part: Slices or gathers.
      exists: A boolean that XLA does not know, True where `part` is read.
      platform: Of the device.
    """
    out = jax.eval_shape(part)
    if not is_widened(out.dtype, platform):
        return part()
    return lax.cond(exists, part, lambda: jnp.zeros(out.shape, out.dtype))


def set_rows(x: jax.Array, index: tuple[jax.Array, ...], rows: AnyArray) -> jax.Array:
    """``x.at[index].set(rows)`` in place if `x` is donated; what lies outside, below 0 too, is dropped.

    Where a scatter would be widened, each row of the array looks up what is new in it: one pass over the array, in
    place. 4 tokens into 4096 pages of 16 tokens, 2 heads of 64, take 2 ms so, 31 ms by a scatter, 4 ms by one of
    integers (which also copies the array); from 0.11.2 on 0.03 ms by a scatter.

    Args:
      x: The array.
      index: int32 arrays that broadcast to one shape, for the leading axes of `x`. No row twice.
      rows: That shape, and the other axes of `x`.

    >>> set_rows(jnp.zeros((2, 2)), (jnp.array([1, -1, 2]),), jnp.ones((3, 2))).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    rows = jnp.asarray(rows)
    if not rows.size or not is_widened(x.dtype, current_device(x)[0]):
        return x.at[index].set(rows, mode="drop", wrap_negative_indices=False)
    leading, shape = x.shape[: len(index)], jnp.broadcast_shapes(*(i.shape for i in index))
    numbers = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    number = jnp.full(leading, -1, jnp.int32).at[index].set(numbers, mode="drop", wrap_negative_indices=False)
    new = rows.reshape(-1, *x.shape[len(index) :])[jnp.maximum(number, 0)]
    return jnp.where((number >= 0).reshape(*leading, *[1] * (x.ndim - len(index))), new, x)
