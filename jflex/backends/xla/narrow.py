"""Reading and writing slices of large narrow arrays on a CPU, without copying the whole array.

XLA's CPU compiler of jaxlib 0.10.2 has no bfloat16 slices, gathers, updates and scatters: it converts the array to
float32, slices it, and converts back. If it is sliced in a loop, the conversion is hoisted, and the whole array is
widened: 2.0 times its memory. A scatter widens it anywhere. `jax.lax.optimization_barrier` is removed too early to stop
this, and integers through ``bitcast_convert_type`` cost another whole copy. jaxlib 0.11.2 and 0.12.0 do none of this,
and no version does it for float16 or float32; there, and on other devices, nothing is done here. Arrays of eight-bit
floating-point numbers are converted to float16 in the same way, by 0.10.2 and 0.11.2 alike; int8 is not.
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

_NATIVE = (0, 11, 2)  # the first version of JAX seen not to widen bfloat16
_EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def is_widened(dtype: DTypeLike, platform: str) -> bool:
    """Whether XLA converts arrays of this dtype to slice them.

    >>> is_widened(jnp.float16, "cpu"), is_widened(jnp.bfloat16, "gpu")
    (False, False)
    """
    if platform != "cpu":
        return False
    return dtype in _EIGHT_BITS or (dtype == jnp.bfloat16 and jax.__version_info__ < _NATIVE)


def read(part: Callable[[], jax.Array], exists: jax.Array, platform: str) -> jax.Array:
    """Reads a slice of an array inside a branch, out of which XLA hoists nothing: in a loop, or before a write.

    Args:
      part: Slices or gathers.
      exists: A boolean that XLA cannot fold, True where `part` is read.
      platform: Platform of the device.
    """
    out = jax.eval_shape(part)
    if not is_widened(out.dtype, platform):
        return part()
    return lax.cond(exists, part, lambda: jnp.zeros(out.shape, out.dtype))


def set_rows(x: jax.Array, index: tuple[jax.Array, ...], rows: AnyArray) -> jax.Array:
    """``x.at[index].set(rows)``, in place if `x` is donated; indices out of range, below 0 too, are dropped.

    Where a scatter would be widened, each row of the array gathers its new value instead: one pass over the array, in
    place. Writing 4 tokens to 4096 pages of 16 tokens, 2 heads of 64, takes 2 ms this way, 31 ms by a scatter, and 4 ms
    by a scatter of integers (which also copies the array); from 0.11.2 on a scatter takes 0.03 ms.

    Args:
      x: The array.
      index: int32 arrays that broadcast to one shape, for the leading axes of `x`; no index in range may repeat.
      rows: That shape, and the other axes of `x`.

    >>> set_rows(jnp.zeros((2, 2)), (jnp.array([1, -1, 2]),), jnp.ones((3, 2))).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    rows = jnp.asarray(rows)
    if not rows.size or not is_widened(x.dtype, current_device(x)[0]):
        # Without `unique_indices`, XLA writes 8 and 16 bits on a GPU by loops of compare-and-swap.
        return x.at[index].set(rows, mode="drop", wrap_negative_indices=False, unique_indices=True)
    leading, shape = x.shape[: len(index)], jnp.broadcast_shapes(*(i.shape for i in index))
    numbers = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    number = jnp.full(leading, -1, jnp.int32).at[index].set(numbers, mode="drop", wrap_negative_indices=False)
    new = rows.reshape(-1, *x.shape[len(index) :])[jnp.maximum(number, 0)]
    return jnp.where((number >= 0).reshape(*leading, *[1] * (x.ndim - len(index))), new, x)
