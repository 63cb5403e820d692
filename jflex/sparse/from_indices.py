"""`block_mask_from_indices`: the BlockMask of key blocks that each query block selects, made inside of a step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int8, Int32

from jflex._check.arguments import checked_block_size, checked_size
from jflex._mesh import as_known, leading_axes, partitioned_by_xla, without_mesh
from jflex.block_mask.lists import (
    EMPTY,
    FULL,
    PARTIAL,
    BlockLists,
    Widths,
    block_count,
    inside_blocks,
    listed_blocks,
    lists_from_states,
    lists_of_width,
    pack_states,
)
from jflex.block_mask.mask import BlockMask, BlockSize
from jflex.block_mask.states import Shape, block_states, known_block_states
from jflex.mods.array_sizes import check_mask_shape
from jflex.mods.dependence import uses_index
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import TracedMod, mod_requirements, trace_mask_mod
from jflex.mods.types import MaskMod


@answers_keywords
def block_mask_from_indices(
    indices: Int[ArrayLike, "B heads R k"],
    Q_LEN: int,
    KV_LEN: int,
    *,
    H: int | None = None,
    block_size: BlockSize = 128,
    mask_mod: MaskMod | None = None,
) -> BlockMask:
    """Makes the BlockMask in which each query block attends to the key blocks that it selects.

    An element is visible if the key block of its key is selected by the query block of its query, and the mask_mod is
    True. For blocks that are selected anew in each step, by `select_blocks`: shapes of tables do not follow from
    values, so that a step under ``jit`` is compiled once. Under ``jit`` or not, a block in which the mask_mod is True
    everywhere is full, and one in which it is True nowhere is left out. The gradient of the selection is zero.

    Tables of key blocks are at most ``k`` wide, and those of query blocks, for the backward pass, at most as wide as
    there are query blocks: any number of query blocks may select a key block. They take up to
    ``8 * B * H * C * R`` bytes; less where the values that the mask_mod captures are known while tracing. Then its
    blocks are evaluated while tracing, and else in each step, as by `create_block_mask`.

    Args:
      indices: Key blocks of each query block, of each key head or query head, in any order. Batch size and heads may be
        1, for all. One that is negative or not below the number of key blocks is dropped; one that is there several
        times counts once. A query block that selects none attends to nothing.
      H: Query heads, a multiple of the heads of `indices`: each head of these is for ``H // heads`` adjacent query
        heads, as a key head is. None: as many as `indices` have, which must then be all query heads, or one for all.
      block_size: Of queries and keys, one number or a pair. Lengths need not be multiples of it.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, such as `masks.causal`. None: all of a selected block is visible.

    Returns:
      The mask, of `H` heads.

    Raises:
      TypeError: `indices` are not integers, a size is not an integer, or `mask_mod` is not a mask_mod.
      ValueError: `indices` do not have four axes, or not a row for each query block; `H` is not a multiple of their
        heads; a size is negative; or a mask was made for other sizes.

    References:
      Yuan et al. 2025, Native Sparse Attention, arXiv:2502.11089; Lu et al. 2025, MoBA, arXiv:2502.13189.

    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> indices = jnp.array([[[[0, -1], [1, 0], [2, 0], [1, 3]]]])
    >>> print(block_mask_from_indices(indices, 512, 512, mask_mod=causal))
    BlockMask(shape=(1, 1, 512, 512), block_size=(128, 128), sparsity=56.25%)
    batch 0, head 0
    ░░      |
    ██░░    |
    ██  ░░  |
      ██  ░░|
    """
    block_size = checked_block_size(block_size)
    lengths = checked_size(Q_LEN, "Q_LEN"), checked_size(KV_LEN, "KV_LEN")
    rows, columns = map(block_count, lengths, block_size)
    chosen = _checked_indices(indices, rows, columns, block_size[0], lengths[0])
    heads = _checked_heads(H, chosen.shape[1])
    shape = chosen.shape[0], heads, *lengths
    traced, operands = (None, ()) if mask_mod is None else trace_mask_mod(mask_mod)
    check_mask_shape(mod_requirements(mask_mod, traced), shape, "a BlockMask")
    bounds = _states_of_mod(traced, operands, shape, block_size)
    make = functools.partial(_lists, heads=heads, widths=_widths(bounds, chosen.shape[3]))
    lists = BlockLists(*partitioned_by_xla(make, lambda: leading_axes(chosen, 2))(chosen, bounds))
    return BlockMask(*lists, operands, traced, lengths, block_size, lists_follow_mod=False)


def _checked_indices(
    indices: ArrayLike, rows: int, columns: int, block: int, length: int
) -> Int32[Array, "B heads R k"]:
    """The indices as int32, with -1 for all that are out of range: no wide integer may wrap around to a block."""
    blocks = indices if isinstance(indices, jax.Array | np.ndarray) else np.asarray(indices)
    if not jnp.issubdtype(blocks.dtype, jnp.integer):
        raise TypeError(f"`indices` must be integers, numbers of key blocks. Got {blocks.dtype}.")
    if blocks.ndim != 4:
        raise ValueError(
            f"`indices` must have 4 axes, [B, heads, query blocks, k]. Got shape {blocks.shape}. Add axes of size 1 "
            "for one selection for all batch entries or heads."
        )
    if blocks.shape[2] != rows:
        raise ValueError(
            f"`indices` must have a row for each query block, {rows} for `Q_LEN` {length} in blocks of {block}. Got "
            f"{blocks.shape[2]} in shape {blocks.shape}. Pass the `block_size` and `Q_LEN` that they were selected for."
        )
    numpy = jnp if isinstance(blocks, jax.Array) else np
    wide = blocks.astype(numpy.int32) if blocks.dtype.itemsize < 4 else blocks
    exists = (wide >= 0) & (wide < columns)
    return jnp.asarray(numpy.where(exists, wide.astype(numpy.int32), numpy.int32(-1)))


def _checked_heads(H: int | None, heads: int) -> int:
    if H is None:
        return heads
    number = checked_size(H, "H")
    if number != heads and (heads == 0 or number % heads):
        raise ValueError(
            f"`H` must be a multiple of the heads of `indices`, {heads}, so that each is for as many query heads. Got "
            f"{number}. Pass the number of query heads, and indices of each key head."
        )
    return number


def _states_of_mod(
    traced: TracedMod | None, operands: tuple[jax.Array, ...], shape: Shape, block_size: tuple[int, int]
) -> Int8[Array, "#B #H R C"]:
    """States of blocks if they are selected; evaluated now if values are known, even while tracing."""
    if traced is None:
        with as_known(True):
            inside = inside_blocks((shape[2], shape[3]), block_size)
            states = jnp.where(inside, jnp.int8(FULL), jnp.int8(PARTIAL))[None, None]
        return without_mesh(states)
    batch, heads = (n if uses_index(traced, index) else 1 for n, index in zip(shape[:2], "bh", strict=True))
    mod_shape = batch, heads, shape[2], shape[3]
    known = not any(isinstance(x, Tracer) for x in operands)
    with as_known(known):
        states = (known_block_states if known else block_states)(traced, operands, mod_shape, block_size)
    return without_mesh(states) if known else states


def _widths(bounds: Int8[Array, "B H R C"], k: int) -> Widths:
    """Entries that a row of each table may need, whatever is selected."""
    rows = bounds.shape[2]
    if isinstance(bounds, Tracer):
        return max(1, k), max(1, k), max(1, rows), max(1, rows)
    states = np.asarray(bounds)
    most = lambda state, axis: int(np.max(np.sum(states == state, axis=axis), initial=1))
    by_row = [max(1, min(k, most(state, 3))) for state in (PARTIAL, FULL)]
    return by_row[0], by_row[1], most(PARTIAL, 2), most(FULL, 2)


@jax.jit(static_argnames=("heads", "widths"))
def _lists(
    indices: Int32[Array, "B heads R k"], bounds: Int8[Array, "#B #H R C"], *, heads: int, widths: Widths
) -> BlockLists:
    counts = jnp.full(indices.shape[:3], indices.shape[3], jnp.int32)
    selected = listed_blocks(counts, indices, bounds.shape[3])
    if bounds.shape[1] > 1:
        selected = jnp.repeat(selected, heads // selected.shape[1], axis=1)
    states = jnp.where(selected, bounds, jnp.int8(EMPTY))
    if 0 in states.shape:
        lists = lists_from_states(states)
    else:
        lists = lists_of_width(pack_states(states), states.shape, widths)
    # Query heads that share a key head share its selection: tables are made once for them, and then copied.
    copies = heads // max(1, states.shape[1])
    return lists if copies == 1 else BlockLists(*(jnp.repeat(x, copies, axis=1) for x in lists))
