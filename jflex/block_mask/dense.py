"""Dense masks, one element per score: for references, pictures and tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int8, Int32

from jflex._check.arguments import checked_shape
from jflex.block_mask.lists import FULL, PARTIAL
from jflex.block_mask.states import visible_elements
from jflex.mods.array_sizes import check_mask_shape
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import mod_requirements, trace_mask_mod
from jflex.mods.types import MaskMod
from pallas_kernels.spec import Mod


@answers_keywords
def create_mask(mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> Bool[Array, "B H Q KV"]:
    """Evaluates a mask_mod at every position.

    Args:
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``.
      B: Batch size; None counts as 1.
      H: Query heads; None counts as 1.

    Returns:
      The dense mask, True where a query attends to a key.

    Raises:
      TypeError: `mask_mod` is not a mask_mod, or a size is not an integer.
      ValueError: `mask_mod` branches in Python on its arguments, or was made for other sizes; or a size is negative.

    >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    shape = checked_shape(B, H, Q_LEN, KV_LEN)
    traced, operands = trace_mask_mod(mask_mod)
    check_mask_shape(mod_requirements(mask_mod, traced), shape, "a mask")
    everywhere = jnp.full((*shape[:2], 1, 1), PARTIAL, jnp.int8)
    return dense_elements(traced, operands, everywhere, shape[2:], shape[2:])


def dense_elements(
    traced: Mod,
    operands: tuple[jax.Array, ...],
    states: Int8[Array, "B H R C"],
    seq_lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> Bool[Array, "B H Q KV"]:
    """The dense mask: all of a full block is visible, a partial one where the mod is True."""
    indices = (jnp.arange(seq_lengths[0], dtype=jnp.int32), jnp.arange(seq_lengths[1], dtype=jnp.int32))
    return elements_at(traced, operands, states, indices, seq_lengths, block_size)


@jax.jit(static_argnames=("traced", "seq_lengths", "block_size"))
def elements_at(
    traced: Mod,
    operands: tuple[jax.Array, ...],
    states: Int8[Array, "B H R C"],
    indices: tuple[Int32[Array, " Q"], Int32[Array, " KV"]],
    seq_lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> Bool[Array, "B H Q KV"]:
    """The dense mask of some queries and keys, at positions within the lengths."""
    q_idx, kv_idx = indices
    batch, heads = states.shape[:2]
    if 0 in (batch, heads, q_idx.size, kv_idx.size):
        return jnp.zeros((batch, heads, q_idx.size, kv_idx.size), jnp.bool_)

    def of_head(b: Int32[Array, ""], h: Int32[Array, ""]) -> Bool[Array, "Q KV"]:
        return visible_elements(traced, operands, b, h, (q_idx, kv_idx[None]), seq_lengths)[0]

    of_batch = jax.vmap(of_head, in_axes=(None, 0))
    numbers = jnp.arange(batch, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)
    visible = jax.vmap(of_batch, in_axes=(0, None))(*numbers)
    spread = states[:, :, q_idx // block_size[0]][:, :, :, kv_idx // block_size[1]]
    return (spread == FULL) | ((spread == PARTIAL) & visible)
