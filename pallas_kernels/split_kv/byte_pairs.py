"""Keys and values of eight bits, loaded as words of two columns and widened to float16.

The GEMMs of these kernels take 16 bits. A tile of bytes would reach the layout of an MMA operand byte by byte: values,
whose keys must lie side by side in a register, by one load from shared memory for each element. Words of 16 bits take
`ldmatrix`, transposed for values, and a register then holds two columns of two keys: the even columns are one operand,
the odd ones another. float16 holds every number of these dtypes, and PTX converts two e4m3 to it by one instruction. To
bfloat16 Hopper has none: it took two more for each pair, at a quarter of the rate of other arithmetic.

H100, jax 0.11.2, (R, Hq, Hkv, S, D) = (32, 32, 8, 16384, 128), pages of 64, a tile of 64 keys: a warp takes 489 SASS
instructions for each tile of e4m3, and took 771 with bytes and bfloat16; 400 us with the best tile, bfloat16 717.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.head_chunks import Columns, powers_of_two, qk_dot
from pallas_kernels.triton.launch import runner_of


def words(x: jax.Array) -> jax.Array:
    """Pages [..., size] of eight bits as int16 [..., size / 2], the first of two columns in the lower half.

    XLA makes a bitcast of it, which moves nothing.
    """
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int16)


def columns_of(spec: AttentionSpec, x: jax.Array) -> Columns:
    """The even and the odd columns of words, float16."""
    assert spec.paging is not None  # of a paged call
    dtype = jnp.dtype(str(spec.paging.dtype))
    if runner_of(spec).is_interpreter:
        pair = lax.bitcast_convert_type(x, dtype)
        return pair[..., 0].astype(jnp.float16), pair[..., 1].astype(jnp.float16)
    return tuple(runner_of(spec).element(f"{which}_{dtype.name}", x) for which in ("even", "odd"))


def in_float16(rows: Columns) -> tuple[Columns, jax.Array | None]:
    """Rows in float16, and the powers of two, float32 [rows, 1], that they were divided by; None if by none."""
    if rows[0].dtype == jnp.float16:
        return rows, None
    largest = [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1) for x in rows]
    smaller, factor = powers_of_two(functools.reduce(jnp.maximum, largest))
    return tuple((x.astype(jnp.float32) * smaller).astype(jnp.float16) for x in rows), factor


def qk_product(
    spec: AttentionSpec, key_scales: tuple[jax.Array, ...], q_scale: jax.Array | None, q: Columns, k: Columns
) -> jax.Array:
    """QK^T of `q` [rows, D] and keys [keys, D] with scales, float32 [rows, keys].

    Args:
      key_scales: Of equal shares of the columns: scalars, or [keys]. Columns of latent vectors are pairs, with a scale
        for each; what follows them has none.
      q_scale: Of the columns with scales, [rows, 1].
    """
    scaled = 2 * len(key_scales) if spec.values_in_keys else len(k)
    share, total = scaled // len(key_scales), None
    for number, scale in enumerate(key_scales):
        columns = slice(number * share, (number + 1) * share)
        product = qk_dot(spec, q[columns], k[columns]) * (scale[None, :] if scale.ndim else scale)
        total = product if total is None else total + product
    assert total is not None  # there is a scale
    total = total if q_scale is None else total * q_scale  # a power of two, which may be tiny: last
    return total + qk_dot(spec, q[scaled:], k[scaled:]) if k[scaled:] else total
