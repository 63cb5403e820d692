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
from pallas_kernels.triton import language
from pallas_kernels.triton.head_chunks import Columns, powers_of_two


def words(x: jax.Array) -> jax.Array:
    """Pages [..., size] of eight bits as int16 [..., size / 2], the first of two columns in the lower half.

    XLA makes a bitcast of it, which moves nothing.
    """
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int16)


def columns_of(spec: AttentionSpec, x: jax.Array) -> Columns:
    """The even and the odd columns of words, float16."""
    assert spec.paging is not None  # of a paged call
    held = jnp.dtype(str(spec.paging.dtype))
    if spec.route == "interpreted":
        pair = lax.bitcast_convert_type(x, held)
        return pair[..., 0].astype(jnp.float16), pair[..., 1].astype(jnp.float16)
    return tuple(language.element(spec.route, f"{which}_{held.name}", x) for which in ("even", "odd"))


def in_float16(spec: AttentionSpec, rows: Columns) -> tuple[Columns, jax.Array | None]:
    """Rows in float16, and the powers of two, float32 [rows, 1], that they were divided by; None if by none."""
    if rows[0].dtype == jnp.float16:
        return rows, None
    largest = [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1) for x in rows]
    smaller, factor = powers_of_two(functools.reduce(jnp.maximum, largest))
    return tuple((x.astype(jnp.float32) * smaller).astype(jnp.float16) for x in rows), factor
