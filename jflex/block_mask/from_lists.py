"""Block lists made by the user: checks them, and converts them to a matrix of block states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int8

from jflex.block_mask.lists import block_count, join_states, listed_blocks
from jflex.types import AnyArray

_NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def states_from_given(
    arguments: tuple[ArrayLike, ArrayLike, ArrayLike | None, ArrayLike | None],
    block_size: tuple[int, int],
    seq_lengths: tuple[int, int] | None,
) -> tuple[Int8[Array, "B H R C"], tuple[int, int]]:
    """Checks the arguments of `BlockMask.from_kv_blocks`, and returns the matrix of states and the lengths."""
    if (arguments[2] is None) != (arguments[3] is None):
        present, absent = (_NAMES[2], _NAMES[3]) if arguments[3] is None else (_NAMES[3], _NAMES[2])
        raise ValueError(f"`{present}` is passed without `{absent}`: pass both, or neither if no block is full.")
    pairs = [_checked_pair(arguments[0], arguments[1], _NAMES[:2])]
    if arguments[2] is not None and arguments[3] is not None:
        pairs.append(_checked_pair(arguments[2], arguments[3], _NAMES[2:]))
        if pairs[1][0].shape != pairs[0][0].shape:
            raise ValueError(
                "`full_kv_num_blocks` must have the shape of `kv_num_blocks` [B, H, query blocks]. "
                f"Got {pairs[1][0].shape} and {pairs[0][0].shape}."
            )
    rows, width = pairs[0][0].shape[-1], max(numbers.shape[-1] for _, numbers in pairs)
    if seq_lengths is None:
        seq_lengths = (rows * block_size[0], width * block_size[1])
    expected_rows, columns = map(block_count, seq_lengths, block_size)
    if rows != expected_rows or width > columns:
        raise ValueError(
            f"`seq_lengths` {seq_lengths} with `block_size` {block_size} makes {expected_rows} query blocks and "
            f"{columns} key blocks, but the lists are for {rows} query blocks and up to {width} key blocks."
        )
    listed = []
    for (counts, numbers), names in zip(pairs, (_NAMES[:2], _NAMES[2:]), strict=False):
        _check_values(counts, numbers, columns, names)
        listed.append(listed_blocks(jnp.asarray(counts, jnp.int32), jnp.asarray(numbers, jnp.int32), columns))
    partial, full = (*listed, jnp.zeros_like(listed[0]))[:2]
    if not isinstance(partial, Tracer) and not isinstance(full, Tracer):
        twice = np.argwhere(np.asarray(partial & full))
        if len(twice):
            b, h, row, column = twice[0].tolist()
            raise ValueError(
                f"a block is partial or full, not both: key block {column} is in `kv_indices` and in "
                f"`full_kv_indices` of batch {b}, head {h}, query block {row}."
            )
    return join_states(partial, full), seq_lengths


def _checked_pair(counts: ArrayLike, numbers: ArrayLike, names: tuple[str, ...]) -> tuple[AnyArray, AnyArray]:
    arrays: list[AnyArray] = []
    for argument, name, axes in zip((counts, numbers), names, ("[B, H, R]", "[B, H, R, W]"), strict=True):
        array = argument if isinstance(argument, jax.Array | np.ndarray) else np.asarray(argument)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"`{name}` must hold integers. Got {array.dtype}.")
        rank = axes.count(",") + 1
        if array.ndim != rank:
            raise ValueError(f"`{name}` must have {rank} axes {axes}. Got shape {array.shape}.")
        arrays.append(array)
    if arrays[0].shape != arrays[1].shape[:3]:
        raise ValueError(
            f"`{names[1]}` [B, H, R, W] must begin with the shape of `{names[0]}` [B, H, R]. "
            f"Got {arrays[1].shape} and {arrays[0].shape}."
        )
    return arrays[0], arrays[1]


def _check_values(counts: AnyArray, numbers: AnyArray, columns: int, names: tuple[str, ...]) -> None:
    if isinstance(counts, Tracer) or isinstance(numbers, Tracer):
        return
    counts, numbers = np.asarray(counts), np.asarray(numbers)
    if counts.size and (counts.min() < 0 or counts.max() > numbers.shape[-1]):
        raise ValueError(
            f"`{names[0]}` must lie between 0 and the last axis of `{names[1]}`, {numbers.shape[-1]}. "
            f"Got {counts.min()} to {counts.max()}."
        )
    used = np.arange(numbers.shape[-1]) < counts[..., None]
    if np.any(used & ((numbers < 0) | (numbers >= columns))):
        wrong = numbers[used & ((numbers < 0) | (numbers >= columns))][0]
        raise ValueError(f"`{names[1]}` must lie between 0 and {columns - 1}, the last key block. Got {wrong}.")
    ordered = np.sort(np.where(used, numbers, columns + np.arange(numbers.shape[-1])), axis=-1)
    if np.any(ordered[..., 1:] == ordered[..., :-1]):
        block = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]][0]
        raise ValueError(f"`{names[1]}` lists key block {block} twice for one query block. List each block once.")
