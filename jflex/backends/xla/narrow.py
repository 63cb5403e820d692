"""Reading and writing slices of large narrow arrays on a CPU, without copying the whole array.

XLA's CPU compiler of jaxlib 0.10.2 has no bfloat16 slices, gathers, updates and scatters: it converts the array to
float32, slices it, and converts back. If it is sliced in a loop, the conversion is hoisted, and the whole array is
widened: 2.0 times its memory. A scatter widens it anywhere. `jax.lax.optimization_barrier` is removed too early to stop
this, and integers through ``bitcast_convert_type`` cost another whole copy outside of loops and branches. jaxlib 0.11.2
and 0.12.0 do none of this, and no version does it for float16 or float32; there, and on other devices, nothing is done
here. Arrays of eight-bit floating-point numbers are converted to float16 in the same way, by all versions alike; int8
is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jflex._check.arguments import current_device
from jflex._mesh import leading_axes, match_manual_axes, partitioned_by_xla
from jflex.types import AnyArray

_NATIVE = (0, 11, 2)  # the first version of JAX seen not to widen bfloat16
_EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_Rows: TypeAlias = tuple[tuple[jax.Array, ...], jax.Array]  # indices and rows
_Write: TypeAlias = tuple[jax.Array, tuple[jax.Array, ...], jax.Array]  # an array, indices and rows


def is_widened(dtype: DTypeLike, platform: str) -> bool:
    """True if XLA converts arrays of this dtype to slice them."""
    if platform != "cpu":
        return False
    return dtype in _EIGHT_BITS or (dtype == jnp.bfloat16 and jax.__version_info__ < _NATIVE)


def read(part: Callable[[], jax.Array], exists: jax.Array, platform: str) -> jax.Array:
    """Reads a slice in a branch, out of which XLA hoists nothing; `exists` must be a boolean that XLA cannot fold."""
    out = jax.eval_shape(part)
    if not is_widened(out.dtype, platform):
        return part()
    return lax.cond(exists, part, lambda: jnp.zeros(out.shape, out.dtype))


def set_rows(x: jax.Array, index: tuple[jax.Array, ...], rows: AnyArray) -> jax.Array:
    """``x.at[index].set(rows)``, in place if `x` is donated; indices out of range, below 0 too, are dropped.

    Args:
      index: int32 arrays that broadcast to one shape, for the leading axes of `x`; no index in range may repeat.
      rows: That shape, and the other axes of `x`.

    >>> set_rows(jnp.zeros((2, 2)), (jnp.array([1, -1, 2]),), jnp.ones((3, 2))).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    rows, platform = jnp.asarray(rows), current_device(x)[0]
    if not rows.size or not is_widened(x.dtype, platform):
        if platform == "gpu" and all(i.size == 1 for i in index):
            index, rows = _with_dropped_row(x, index, rows)
        # Without `unique_indices`, XLA writes 8 and 16 bits on a GPU by loops of compare-and-swap.
        options = {"mode": "drop", "wrap_negative_indices": False, "unique_indices": True}
        write = lambda x, index, rows: x.at[index].set(rows, **options)
        return partitioned_by_xla(write, lambda: leading_axes(x, x.ndim))(x, index, rows)
    x, index, rows = match_manual_axes((x, tuple(jnp.broadcast_arrays(*index)), rows))
    return _set_bits_jit(x, index, rows)


def _with_dropped_row(x: jax.Array, index: tuple[jax.Array, ...], row: jax.Array) -> _Rows:
    """Index and rows of a second row, out of range.

    XLA replaces a scatter of one row by a read, a select and an update: with the rotation of new queries and keys, five
    kernels of a decoding step of one sequence in each layer, 6.2 us, in place of three (H200, JAX 0.11.2).
    """
    index = tuple(jnp.stack([i.reshape(()), jnp.asarray(n, i.dtype)]) for i, n in zip(index, x.shape, strict=False))
    return index, jnp.broadcast_to(row.reshape(1, *x.shape[len(index) :]), (2, *x.shape[len(index) :]))


@jax.custom_batching.custom_vmap
def _set_bits(x: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    """`set_rows` as integers of the same width, which XLA does not widen; the indices have one shape.

    In a loop or a branch, XLA fuses the casts and the write into one in-place kernel, and LLVM removes its stores of
    unchanged elements. Elsewhere, each cast copies the array. A reshape copies it, too, if an axis but the first has
    size 1, and gathers it over a mesh.

    JAX 0.10.2: the loop takes 2 us a token, and 12 ns for each element of the longer axis of slots, the pass 1.2 ns a
    slot.
    """
    leading, row = x.shape[: len(index)], x.shape[len(index) :]
    slots, mesh = math.prod(leading), jax.typeof(x).sharding.mesh
    bounds = [(i >= 0) & (i < size) for i, size in zip(index, leading, strict=True)]
    valid = functools.reduce(jnp.logical_and, bounds).reshape(-1)
    inner = next(n for n in range(math.isqrt(slots), 0, -1) if slots % n == 0)
    split = leading if 1 in x.shape[1:] else (slots // inner, inner)
    is_divided = not (mesh.empty or mesh.are_all_axes_manual)
    if is_divided or slots <= valid.size * (1024 + 4 * max(split)) or slots >= 1 << 31:
        merge = lambda x: lax.bitcast_convert_type(_one_pass(_bits(x), index, _bits(rows)), x.dtype)
        return lax.cond(jnp.any(valid), merge, lambda x: x, x)
    slot = jnp.ravel_multi_index(index, leading, mode="clip").reshape(-1)
    order = jnp.argsort(~valid)
    # As int32: LLVM could not tell rows of the dtype of `x` from `x`, and would keep its stores.
    wide = _bits(rows).reshape(slot.size, *[1] * len(split), *row).astype(jnp.int32)

    def write(number: jax.Array, x: jax.Array) -> jax.Array:
        bits, at = _bits(x), order[number]
        start = *jnp.unravel_index(slot[at], split), *[jnp.int32(0)] * len(row)
        return lax.bitcast_convert_type(lax.dynamic_update_slice(bits, wide[at].astype(bits.dtype), start), x.dtype)

    count = jnp.sum(valid, dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, write, x.reshape(*split, *row)).reshape(x.shape)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize])


@_set_bits.def_vmap
def _set_bits_of_batch(
    size: int, in_batched: list[bool | list[bool]], x: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array
) -> tuple[jax.Array, bool]:
    of_batch = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
    x, index, rows = jax.tree.map(of_batch, (x, tuple(index), rows), tuple(in_batched))
    entry = lax.broadcasted_iota(jnp.int32, index[0].shape, 0)
    return _set_bits(x, (entry, *index), rows), True


_differentiable = jax.custom_jvp(_set_bits)


@_differentiable.defjvp
def _set_bits_jvp(primals: _Write, tangents: _Write) -> tuple[jax.Array, jax.Array]:
    (x, index, rows), (d_x, _, d_rows) = primals, tangents
    return _differentiable(x, index, rows), _one_pass(d_x, index, d_rows)


_set_bits_jit = jax.jit(_differentiable)  # outside of `jit`, each call would compile its own branch or loop


def _one_pass(x: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    """`set_rows` in one pass over the array, in place: each of its rows gathers its new value."""
    leading, shape = x.shape[: len(index)], index[0].shape
    numbers = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    number = jnp.full(leading, -1, jnp.int32).at[index].set(numbers, mode="drop", wrap_negative_indices=False)
    new = rows.reshape(-1, *x.shape[len(index) :])[jnp.maximum(number, 0)]
    return jnp.where((number >= 0).reshape(*leading, *[1] * (x.ndim - len(index))), new, x)
