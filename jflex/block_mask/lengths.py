"""Checks of the sizes of a mask: batch, heads, lengths, blocks."""

from __future__ import annotations

from typing import SupportsIndex

from jflex._check.arguments import checked_size


def checked_shape(
    batch: SupportsIndex | None, heads: SupportsIndex | None, q_length: SupportsIndex, kv_length: SupportsIndex
) -> tuple[int, int, int, int]:
    """``(B, H, Q_LEN, KV_LEN)`` as Python ints; B and H of None are 1."""
    return (
        1 if batch is None else checked_size(batch, "B"),
        1 if heads is None else checked_size(heads, "H"),
        checked_size(q_length, "Q_LEN"),
        checked_size(kv_length, "KV_LEN"),
    )


def checked_block_size(block_size: SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex]) -> tuple[int, int]:
    """Block sizes of queries and keys.

    >>> checked_block_size(128), checked_block_size((64, 128))
    ((128, 128), (64, 128))
    """
    pair = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise TypeError(f"`block_size` must be an integer or a pair (queries, keys). Got {block_size!r}.")
    q_block, kv_block = checked_size(pair[0], "block_size"), checked_size(pair[1], "block_size")
    if 0 in (q_block, kv_block):
        raise ValueError(f"`block_size` must be positive. Got {block_size!r}.")
    return q_block, kv_block
