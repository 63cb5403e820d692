"""Evaluates a mask_mod over blocks of queries and keys, never over the whole mask at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int8, Int32

from jflex.block_mask.lists import block_count
from jflex.mods.trace import TracedMod
from pallas_kernels.spec import Mod

# Elements evaluated at once: enough to fill a GPU (131072 x 131072 takes 1024 steps), and few enough that without
# fusion of the mask into its reduction only tens of megabytes are needed.
_ELEMENTS_PER_STEP = 1 << 24


@jax.jit(static_argnames=("traced", "shape", "block_size"))
def block_states(
    traced: TracedMod,
    operands: tuple[jax.Array, ...],
    shape: tuple[int, int, int, int],
    block_size: tuple[int, int],
) -> Int8[Array, "B H R C"]:
    """Classifies every block of a mask of `shape` ``(B, H, Q_LEN, KV_LEN)``, exactly.

    The blocks are grouped into units, a few neighbouring blocks of one row; a step of the loop evaluates as many units
    as `_ELEMENTS_PER_STEP` allows and reduces them at once, so that XLA fuses the mask into the reduction.
    """
    batch, heads, q_length, kv_length = shape
    rows, columns = block_count(q_length, block_size[0]), block_count(kv_length, block_size[1])
    if 0 in (batch, heads, rows, columns):
        return jnp.zeros((batch, heads, rows, columns), jnp.int8)

    block_area = block_size[0] * block_size[1]
    width = min(columns, max(1, _ELEMENTS_PER_STEP // block_area))
    groups = block_count(columns, width)
    units = batch * heads * rows * groups
    units_per_step = min(units, max(1, _ELEMENTS_PER_STEP // (block_area * width)))
    steps = block_count(units, units_per_step)

    def classify_unit(unit: Int32[Array, ""]) -> Int8[Array, " W"]:
        # An axis of size 1 has a constant index, so that values that depend on it alone are computed only once.
        group, unit = (jnp.int32(0), unit) if groups == 1 else (unit % groups, unit // groups)
        row, unit = (jnp.int32(0), unit) if rows == 1 else (unit % rows, unit // rows)
        h, b = (jnp.int32(0), unit) if heads == 1 else (unit % heads, unit // heads)
        b = jnp.int32(0) if batch == 1 else b
        q_idx = row * block_size[0] + jnp.arange(block_size[0], dtype=jnp.int32)
        kv_idx = group * width * block_size[1] + jnp.arange(width * block_size[1], dtype=jnp.int32)
        visible = visible_elements(traced, operands, b, h, (q_idx, kv_idx.reshape(width, -1)), (q_length, kv_length))
        return jnp.any(visible, axis=(1, 2)).astype(jnp.int8) + jnp.all(visible, axis=(1, 2)).astype(jnp.int8)

    unit_ids = jnp.minimum(jnp.arange(steps * units_per_step, dtype=jnp.int32), units - 1)
    states = lax.map(jax.vmap(classify_unit), unit_ids.reshape(steps, units_per_step))
    states = states.reshape(steps * units_per_step, width)[:units]
    return states.reshape(batch, heads, rows, groups * width)[..., :columns]


def visible_elements(
    traced: Mod,
    operands: tuple[jax.Array, ...],
    b: Int32[Array, ""],
    h: Int32[Array, ""],
    indices: tuple[Int32[Array, " Q"], Int32[Array, "N K"]],
    seq_lengths: tuple[int, int],
) -> Bool[Array, "N Q K"]:
    """Evaluates a mask on some queries and some blocks of keys; False beyond the lengths.

    Indices of padding are clamped, so that the mod never reads a captured array out of range. ``vmap`` over one axis at
    a time keeps values that depend on the query alone at the size of the queries.
    """
    q_idx, kv_idx = indices
    q_length, kv_length = seq_lengths

    def element(q: Int32[Array, ""], kv: Int32[Array, ""]) -> Bool[Array, ""]:
        return traced(operands, b, h, q, kv)

    over_keys = jax.vmap(element, in_axes=(None, 0))
    over_queries = jax.vmap(over_keys, in_axes=(0, None))
    over_blocks = jax.vmap(over_queries, in_axes=(None, 0))
    visible = over_blocks(jnp.minimum(q_idx, q_length - 1), jnp.minimum(kv_idx, kv_length - 1))
    return visible & (q_idx < q_length)[None, :, None] & (kv_idx < kv_length)[:, None, :]
