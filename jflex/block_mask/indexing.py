"""Indexing a BlockMask: the selected batches, heads and query blocks, and the mask_mod at their indices."""

from __future__ import annotations

import dataclasses
import operator
from typing import SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32

from jflex.block_mask.lists import BlockMatrix
from jflex.mods.array_sizes import requirements_of, without
from jflex.mods.reindex import Positions, ReindexedMod
from jflex.mods.types import MaskMod

AxisIndex: TypeAlias = SupportsIndex | slice | jax.Array | np.ndarray | list[int]
_AXES = ("batch", "heads", "query blocks")


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """The entries selected on one axis."""

    size: int
    blocks: Int32[Array, " N"] | None = None
    start: Int32[Array, ""] | None = None  # the first index if they are consecutive, else None
    known: tuple[int, ...] | None = None  # all indices, if known while tracing


def select(mask: BlockMatrix, index: AxisIndex | tuple[AxisIndex, ...]) -> BlockMatrix:
    """Computes ``block_mask[index]``; see `BlockMask.__getitem__`."""
    batch, heads, rows = mask.states.shape[:3]
    selections = _selections(index, (batch, heads, rows))
    q_length = _selected_length(selections[2], mask.seq_lengths[0], mask.block_size[0])
    states = mask.states
    for axis, selection in enumerate(selections):
        if selection.blocks is not None:
            states = _take(states, selection.blocks, axis=axis)
    return mask._replace(
        states=states,
        mask_mod=None if mask.mask_mod is None else _selected_mask(mask.mask_mod, selections, mask.block_size[0]),
        seq_lengths=(q_length, mask.seq_lengths[1]),
    )


def _selected_mask(
    mask_mod: MaskMod, selections: tuple[Selection, Selection, Selection], q_block_size: int
) -> ReindexedMod:
    """The mask_mod that maps the new indices to the old ones."""
    of_batch, of_head, of_query = selections

    def old(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Positions:
        old_b, old_h = _look_up(of_batch, b), _look_up(of_head, h)
        old_q, exists = _look_up_query(of_query, q_idx, q_block_size)
        return Positions(old_b, old_h, old_q, kv_idx, exists)

    kept = requirements_of(mask_mod)
    kept = kept if of_batch.blocks is None else without(kept, "b")
    kept = kept if of_head.blocks is None else without(kept, "h")
    # Consecutive blocks require more, which depends on their start; that is data.
    required = kept if of_query.blocks is None or of_query.start is not None else without(kept, "q_idx")
    return ReindexedMod(mask_mod, old, required)


def _look_up(selection: Selection, index: jax.Array) -> jax.Array:
    if selection.blocks is None:
        return index
    if selection.size == 1:
        return selection.blocks[0]
    return selection.blocks[index] if selection.size else index


def _look_up_query(selection: Selection, q_idx: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array | None]:
    """The old index of a query, and whether it was selected; None if all are."""
    if selection.blocks is None:
        return q_idx, None
    if selection.start is not None:  # consecutive blocks: an offset, which also holds past the selected ones
        return q_idx + selection.start * block_size, None
    if not selection.size:
        return q_idx, jnp.asarray(False)
    block, within = q_idx // block_size, q_idx % block_size
    return selection.blocks[block] * block_size + within, block < selection.size


def _selections(
    index: AxisIndex | tuple[AxisIndex, ...], sizes: tuple[int, int, int]
) -> tuple[Selection, Selection, Selection]:
    """Parses the index of ``block_mask[index]`` for axes of these sizes."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > 3:
        raise IndexError(
            f"a BlockMask takes at most 3 indices (batch, head, query block); got {len(indices)}. "
            "Crop the keys with `block_mask.with_lengths(q_len, kv_len)`."
        )
    indices += (slice(None),) * (3 - len(indices))
    first, second, third = (_select_axis(i, n, name) for i, n, name in zip(indices, sizes, _AXES, strict=True))
    return first, second, third


def _select_axis(index: AxisIndex, size: int, axis: str) -> Selection:
    if isinstance(index, slice):
        chosen = range(size)[index]
        if chosen == range(size):
            return Selection(size)
        return _known_selection(np.asarray(chosen, np.int64), neighbors=chosen.step == 1)
    numbers = _integers(index, axis)
    if isinstance(numbers, Tracer):
        # The value is not known while tracing, so one out of range is clamped, as JAX does for arrays.
        index = numbers.astype(jnp.int32)
        blocks = jnp.clip(jnp.where(index < 0, index + size, index), 0, max(size - 1, 0)).reshape(-1)
        return Selection(blocks.size, blocks, blocks[0] if index.ndim == 0 else None)
    if numbers.size and (numbers.min() < -size or numbers.max() >= size):
        raise IndexError(f"index {numbers.tolist()} is out of range for the {axis} of a BlockMask, of size {size}.")
    numbers = np.where(numbers < 0, numbers + size, numbers)
    return _known_selection(np.atleast_1d(numbers), neighbors=numbers.size == 1)


def _integers(index: SupportsIndex | jax.Array | np.ndarray | list[int], axis: str) -> np.ndarray | Tracer:
    fault = f"a BlockMask is indexed on its {axis} with an integer, a slice or an array of integers with one axis; got "
    if isinstance(index, (bool, np.bool_)) or index is None or index is Ellipsis:
        raise TypeError(f"{fault}{index!r}.")
    if not isinstance(index, (np.ndarray, jax.Array, list)):
        try:
            return np.asarray(operator.index(index))
        except TypeError:
            raise TypeError(f"{fault}{type(index).__name__}.") from None
    if isinstance(index, Tracer):
        numbers = index
    else:
        numbers = np.asarray(index) if np.ndim(index) == 0 or np.size(index) else np.zeros(np.shape(index), np.int64)
    if numbers.ndim > 1 or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(f"{fault}{numbers.dtype}[{','.join(map(str, numbers.shape))}].")
    return numbers


def _known_selection(numbers: np.ndarray, *, neighbors: bool) -> Selection:
    blocks = jnp.asarray(numbers, jnp.int32)
    start = blocks[0] if neighbors and numbers.size else None
    return Selection(numbers.size, blocks, start, tuple(numbers.tolist()))


_take = jax.jit(jnp.take, static_argnames="axis")


def _selected_length(selection: Selection, length: int, block: int) -> int:
    """Number of queries in the selected blocks.

    Raises:
      ValueError: The length is not a multiple of the block size, and the short last block is selected before another
        one, or may be (the indices are traced): positions are counted in blocks, so a short block must come last.
    """
    tail, blocks = length % block, -(-length // block)
    if selection.blocks is None:
        return length
    if not tail or not selection.size:
        return selection.size * block
    if selection.known is None:
        raise ValueError(
            f"query blocks of a BlockMask can be selected with traced indices only if Q_LEN is a multiple of the block "
            f"size: the length of the result must be known. Q_LEN is {length}, the block size {block}. Extend the mask "
            f"first, with `block_mask.with_lengths({blocks * block}, kv_len)`."
        )
    if blocks - 1 in selection.known[:-1]:
        raise ValueError(
            f"query block {blocks - 1} of a BlockMask holds {tail} queries instead of {block}, so it can only be "
            f"selected last. The selected blocks are {list(selection.known)}."
        )
    return selection.size * block - (block - tail if selection.known[-1] == blocks - 1 else 0)
