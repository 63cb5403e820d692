"""The masks that a context parallel call makes: a BlockMask of a mask_mod, and masks of lengths."""

from __future__ import annotations

import math

import jax

from jflex._check.arguments import known_values
from jflex._mesh import as_known
from jflex.block_mask.drawing import is_concrete
from jflex.block_mask.mask import BlockMask, create_block_mask
from jflex.masks.sequences import padding
from jflex.mods.arrays import compile_time
from jflex.mods.compose import and_masks
from jflex.mods.dependence import uses_index
from jflex.mods.trace import trace_mask_mod
from jflex.mods.types import MaskMod

# Blocks of masks that the call makes: 128 as by default, or less where chunks are no multiple of it. Below 16 kernels
# have no tiles that divide a block; then the mask is evaluated everywhere.
_LARGEST_BLOCK, _LEAST_BLOCK = 128, 16


def own_block_size(chunk: tuple[int, int]) -> tuple[int, int] | None:
    """The blocks of a mask that the call makes, which divide the chunks; None if these are too odd."""
    queries, keys = (math.gcd(size, _LARGEST_BLOCK) for size in chunk)
    return None if min(queries, keys) < _LEAST_BLOCK else (queries, keys)


def own_block_mask(mask_mod: MaskMod, sizes: tuple[int, int, int, int], chunk: tuple[int, int]) -> BlockMask | None:
    """The BlockMask of a mask_mod, in blocks that divide the chunks; None if these are too odd."""
    block_size = own_block_size(chunk)
    if block_size is None:
        return None
    traced, operands = trace_mask_mod(mask_mod)
    batch, heads = (n if uses_index(traced, index) else None for n, index in zip(sizes, ("b", "h"), strict=False))
    with compile_time(operands):
        return create_block_mask(mask_mod, batch, heads, *sizes[2:], block_size=block_size)


def bounded_mask_mod(mask_mod: MaskMod | None, kv_lengths: jax.Array) -> MaskMod:
    """A mask that also hides the keys beyond the length of their batch entry."""
    return padding(kv_lengths) if mask_mod is None else and_masks(mask_mod, padding(kv_lengths))


def bounded_block_mask(block_mask: BlockMask, kv_lengths: jax.Array) -> BlockMask:
    """A BlockMask within lengths; blocks beyond a length are empty."""
    known = is_concrete(block_mask.lists) and known_values(kv_lengths) is not None
    with as_known(known):
        within = create_block_mask(
            padding(kv_lengths), kv_lengths.shape[0], None, *block_mask.shape[2:], block_size=block_mask.block_size
        )
        return block_mask & within
