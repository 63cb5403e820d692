"""`&`, `|`, `~` of BlockMasks: on block states, and by a composed mask_mod inside partial blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int8

from jflex.block_mask.lists import EMPTY, FULL, PARTIAL, BlockMatrix, block_count
from jflex.mods.array_sizes import Requirement, SizedMod, requirements_of, without
from jflex.mods.compose import MaskMod, and_masks, not_mask, or_masks
from jflex.mods.reindex import Positions, ReindexedMod


@dataclasses.dataclass(frozen=True, eq=False)
class ListedMask(SizedMod):
    """Visible where the block is listed and the mask_mod, if any, is True."""

    listed: Bool[Array, "B H R C"]
    mask_mod: MaskMod | None
    block_size: tuple[int, int]

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> ArrayLike:
        """Evaluates the mask at one position."""
        batch, heads = self.listed.shape[:2]
        row, column = q_idx // self.block_size[0], kv_idx // self.block_size[1]
        visible = self.listed[b if batch > 1 else 0, h if heads > 1 else 0, row, column]
        return visible if self.mask_mod is None else visible & self.mask_mod(b, h, q_idx, kv_idx)

    def requirements(self) -> tuple[Requirement, ...]:
        """See `SizedMod`."""
        return requirements_of(self.mask_mod)


@dataclasses.dataclass(frozen=True, eq=False)
class ExtendedMask(SizedMod):
    """One mask inside of some lengths, another outside."""

    inside: MaskMod
    outside: MaskMod
    seq_lengths: tuple[int, int]

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> ArrayLike:
        """Evaluates the mask at one position."""
        is_inside = (q_idx < self.seq_lengths[0]) & (kv_idx < self.seq_lengths[1])
        return jnp.where(is_inside, self.inside(b, h, q_idx, kv_idx), self.outside(b, h, q_idx, kv_idx))

    def requirements(self) -> tuple[Requirement, ...]:
        """See `SizedMod`."""
        return requirements_of(self.outside)


def solid_states(states: Int8[Array, "B H R C"]) -> Int8[Array, "B H R C"]:
    """Makes every listed block full, as lists without a mask_mod mean."""
    return jnp.where(states >= PARTIAL, jnp.int8(FULL), jnp.int8(EMPTY))


def element_mod(mask: BlockMatrix) -> MaskMod:
    """A mask_mod that alone defines the mask within the lengths."""
    if mask.mask_mod is not None and mask.lists_follow_mod:
        return mask.mask_mod
    return ListedMask(mask.states > 0, mask.mask_mod, mask.block_size)


def invert(mask: BlockMatrix) -> BlockMatrix:
    """Negates a mask: swaps full and empty blocks; partial ones stay partial."""
    states = jnp.int8(FULL) - _meant_states(mask)
    if mask.mask_mod is None:
        return mask._replace(states=states)
    return mask._replace(states=states, mask_mod=not_mask(element_mod(mask)), source=f"~{mask.source}")


def intersect(first: BlockMatrix, second: BlockMatrix) -> BlockMatrix:
    """Visible where both are; a partial block may have no visible element."""
    shape = _joined_shape(first, second, "&")
    states = jnp.minimum(*(_spread_states(mask, shape) for mask in (first, second)))
    # The joined lists leave out what either list does, so a mask without a mask_mod adds nothing to the mod.
    mods = [_shared(mask, mask.mask_mod, shape) for mask in (first, second) if mask.mask_mod is not None]
    return _joined(first, second, "&", states, and_masks(*mods) if mods else None)


def unite(first: BlockMatrix, second: BlockMatrix) -> BlockMatrix:
    """Visible where either is; a partial block may be visible everywhere."""
    shape = _joined_shape(first, second, "|")
    states = jnp.maximum(*(_spread_states(mask, shape) for mask in (first, second)))
    if first.mask_mod is None and second.mask_mod is None:
        return _joined(first, second, "|", states, None)
    mods = [_shared(mask, element_mod(mask), shape) for mask in (first, second)]
    return _joined(first, second, "|", states, or_masks(*mods))


def no_mask(other: object, symbol: str) -> Any:
    """Refuses a function as an operand of a BlockMask's operator; other operands may answer themselves."""
    if not callable(other):
        return NotImplemented
    joined = "and_masks" if symbol == "&" else "or_masks"
    raise TypeError(
        f"`{symbol}` joins BlockMasks. Got a function. Make a BlockMask of it with `create_block_mask`, or join two "
        f"mask_mods before: `create_block_mask({joined}(f, g), ...)`."
    )


def crop(mask: BlockMatrix, seq_lengths: tuple[int, int]) -> BlockMatrix:
    """Keeps the blocks that begin within shorter lengths."""
    rows, columns = map(block_count, seq_lengths, mask.block_size)
    return mask._replace(states=mask.states[:, :, :rows, :columns], seq_lengths=seq_lengths, lists_follow_mod=False)


def _joined(
    first: BlockMatrix, second: BlockMatrix, symbol: str, states: Int8[Array, "B H R C"], mask_mod: MaskMod | None
) -> BlockMatrix:
    follows = first.lists_follow_mod and second.lists_follow_mod
    names = ("listed blocks" if mask.mask_mod is None else mask.source for mask in (first, second))
    source = f"({f' {symbol} '.join(map(str, names))})"
    return first._replace(states=states, mask_mod=mask_mod, lists_follow_mod=follows, source=source)


def _meant_states(mask: BlockMatrix) -> Int8[Array, "B H R C"]:
    return solid_states(mask.states) if mask.mask_mod is None else mask.states


def _spread_states(mask: BlockMatrix, shape: tuple[int, int]) -> Int8[Array, "B H R C"]:
    states = _meant_states(mask)
    return jnp.broadcast_to(states, (*shape, *states.shape[2:]))


def _shared(mask: BlockMatrix, mask_mod: MaskMod, shape: tuple[int, int]) -> MaskMod:
    """Broadcasts a mask of batch size 1, of one head, or of both: indexes it with batch 0 or head 0."""
    shape_of_lists = mask.states.shape
    shares_batch, shares_heads = shape_of_lists[0] == 1 != shape[0], shape_of_lists[1] == 1 != shape[1]
    if not (shares_batch or shares_heads):
        return mask_mod

    def first(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        zero = jnp.int32(0)
        return Positions(zero if shares_batch else b, zero if shares_heads else h, q_idx, kv_idx)

    kept = requirements_of(mask_mod)
    kept = without(kept, "b") if shares_batch else kept
    return ReindexedMod(mask_mod, first, without(kept, "h") if shares_heads else kept)


def _joined_shape(first: BlockMatrix, second: BlockMatrix, symbol: str) -> tuple[int, int]:
    """Batch and heads of a join; ValueError where two masks cannot be joined."""
    if first.seq_lengths != second.seq_lengths:
        raise ValueError(
            f"`{symbol}` joins BlockMasks of equal lengths. Got {first.seq_lengths} and {second.seq_lengths}. "
            "Crop or extend one with `with_lengths`."
        )
    if first.block_size != second.block_size:
        raise ValueError(
            f"`{symbol}` joins BlockMasks of equal block sizes. Got {first.block_size} and {second.block_size}. "
            "Make both with the same `block_size`."
        )
    sizes = []
    for axis, name in enumerate(("batch", "heads")):
        one, other = first.states.shape[axis], second.states.shape[axis]
        if one != other and 1 not in (one, other):
            raise ValueError(
                f"`{symbol}` joins BlockMasks whose {name} are equal or 1. Got {one} and {other}. "
                "Make both for the same batch and heads, or one of them with None."
            )
        sizes.append(other if one == 1 else one)
    return sizes[0], sizes[1]
