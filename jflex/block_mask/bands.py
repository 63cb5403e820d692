"""BlockMasks of causal masks, windows, query lengths and dense masks, without evaluating a mask_mod.

A *band* is ``q_idx - left <= kv_idx <= q_idx + right``: a causal mask, a window or both. The state of a block follows
from its corners. The lists of a band alone are static: they are computed once, in numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8, Int32

from jflex.block_mask.lists import FULL, PARTIAL, BlockLists, block_count, demote_tails, lists_from_states
from jflex.block_mask.mask import BlockMask
from jflex.mods.dependence import uses_index
from jflex.mods.trace import trace_mask_mod
from jflex.mods.types import MaskMod
from jflex.types import AnyArray


class Band(NamedTuple):
    """Numbers of visible keys before and after the position of the query; None for all."""

    before: int | None = None
    after: int | None = None

    def within(self, T: int, S: int) -> Band:
        """The band with None for sides that mask nothing at these lengths, so that the others fit into int32.

        >>> Band(4096, 0).within(512, 512)
        Band(before=None, after=0)
        """
        before = None if self.before is None or self.before >= T - 1 else max(self.before, -S)
        after = None if self.after is None or self.after >= S - 1 else max(self.after, -T)
        return Band(before, after)


def band_block_mask(
    mask_mod: MaskMod,
    band: Band,
    shape: tuple[int, int, int, int],
    block_size: tuple[int, int],
    q_lengths: Int32[Array, " B"] | None = None,
    mask: Bool[Array, "b h t s"] | None = None,
    *,
    hides_more: bool = False,
) -> BlockMask | None:
    """The BlockMask of a band, query lengths and a dense mask, and of whatever else `mask_mod` masks.

    Args:
      mask_mod: The whole mask, evaluated in partial blocks.
      shape: ``(B, H, T, S)`` of the call. The mask has 1 for B and H where `mask_mod` does not use ``b`` and ``h``.
      mask: A dense mask, which is read once for its blocks; its axes may be 1.
      hides_more: Whether `mask_mod` masks more than the other arguments do: then no block is full.

    Returns:
      The mask; None if lists would skip nothing: all blocks are partial, or there is only one.
    """
    seq_lengths = shape[2:]
    R, C = (block_count(n, block) for n, block in zip(seq_lengths, block_size, strict=True))
    if R * C <= 1:
        return None
    static = (q_lengths is None or R == 1) and mask is None
    hides_more = hides_more or (static and q_lengths is not None)
    lists = _static_lists(band, seq_lengths, block_size, hides_more) if static else None
    if static and lists is None:
        return None
    traced, operands = trace_mask_mod(mask_mod)
    batch_heads = tuple(size if uses_index(traced, index) else 1 for size, index in zip(shape, "bh", strict=False))
    if lists is None:  # query lengths or a dense mask decide
        states = jnp.asarray(_static_states(band, seq_lengths, block_size))
        if q_lengths is not None:
            states = _cut_by_queries(states, band, seq_lengths, block_size, q_lengths)
        if mask is not None:
            states = jnp.minimum(*jnp.broadcast_arrays(states, dense_states(mask, block_size)))
        states = jnp.minimum(states, jnp.int8(PARTIAL)) if hides_more else states
        states = jnp.broadcast_to(states, (*batch_heads, R, C))
        lists = BlockLists(*lists_from_states(demote_tails(states, seq_lengths, block_size)))
    elif batch_heads != (1, 1):
        lists = BlockLists(*(jnp.broadcast_to(x, (*batch_heads, *x.shape[2:])) for x in lists))
    return BlockMask(*lists, operands, traced, seq_lengths, block_size, lists_follow_mod=True)


@jax.jit(static_argnames="block_size")
def dense_states(mask: Bool[Array, "b h t s"], block_size: tuple[int, int]) -> Int8[Array, "b h r c"]:
    """The states of the blocks of a dense mask; axes of size 1 are kept, and padding has no effect.

    >>> dense_states(jnp.tril(jnp.ones((1, 1, 5, 5), bool)), (2, 2))[0, 0].tolist()
    [[1, 0, 0], [2, 1, 0], [2, 2, 2]]
    """
    t, s = (min(size, block) for size, block in zip(mask.shape[2:], block_size, strict=True))
    padding = [(0, 0), (0, 0), (0, -mask.shape[2] % t), (0, -mask.shape[3] % s)]

    def reduced(over: Callable[..., Array], beyond: bool) -> Int8[Array, "b h r c"]:
        padded = jnp.pad(mask, padding, constant_values=beyond)
        b, h, rows, columns = padded.shape
        return over(padded.reshape(b, h, rows // t, t, columns // s, s), axis=(3, 5)).astype(jnp.int8)

    return reduced(jnp.any, False) + reduced(jnp.all, True)


@functools.lru_cache(maxsize=64)
def _static_lists(
    band: Band, seq_lengths: tuple[int, int], block_size: tuple[int, int], hides_more: bool
) -> BlockLists | None:
    """The lists of a band alone, or None if all of its blocks are partial."""
    states = _static_states(band, seq_lengths, block_size)
    if hides_more:
        states = np.minimum(states, PARTIAL)
    ends = [(np.arange(block_count(n, block)) + 1) * block for n, block in zip(seq_lengths, block_size, strict=True)]
    inside = (ends[0] <= seq_lengths[0])[:, None] & (ends[1] <= seq_lengths[1])
    states = np.where((states == FULL) & ~inside, PARTIAL, states)
    if (states == PARTIAL).all():
        return None
    rows = [_list_row(x == state) for x in (states, states.swapaxes(-1, -2)) for state in (PARTIAL, FULL)]
    return BlockLists(*(x for row in rows for x in row))  # pyright: ignore[reportArgumentType]  # numpy, as constants


def _list_row(listed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.argsort(~listed, axis=-1, kind="stable").astype(np.int32)
    return listed.sum(-1, dtype=np.int32), np.where(np.sort(~listed, axis=-1), np.int32(0), numbers)


@functools.lru_cache(maxsize=64)
def _static_states(band: Band, seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> AnyArray:
    """The states of the blocks of a band, int8 [1, 1, R, C]; positions beyond the lengths have no effect."""
    (first_q, last_q), (first_kv, last_kv) = map(_ends, seq_lengths, block_size)
    return _states(first_q[:, None], last_q[:, None], first_kv, last_kv, band)[None, None]


def _ends(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(block_count(length, block), dtype=np.int32) * block
    return first, np.minimum(first + (block - 1), length - 1)


def _states(first_q: AnyArray, last_q: AnyArray, first_kv: AnyArray, last_kv: AnyArray, band: Band) -> AnyArray:
    """States of blocks from their corners: ``kv_idx - q_idx`` takes every value between its bounds there."""
    least, most = first_kv - last_q, last_kv - first_q
    sees, sees_all = least <= most, least <= most
    if band.after is not None:
        sees, sees_all = sees & (least <= band.after), sees_all & (most <= band.after)
    if band.before is not None:
        sees, sees_all = sees & (most >= -band.before), sees_all & (least >= -band.before)
    return sees.astype(np.int8) + (sees & sees_all).astype(np.int8)


def _cut_by_queries(
    states: AnyArray,
    band: Band,
    seq_lengths: tuple[int, int],
    block_size: tuple[int, int],
    q_lengths: Int32[Array, " B"],
) -> Int8[Array, "B 1 R C"]:
    """Makes blocks of queries beyond the length of their batch entry empty; a block that it cuts is at most partial."""
    (first_q, last_q), (first_kv, last_kv) = map(_ends, seq_lengths, block_size)
    first, last = (jnp.asarray(x)[None, None, :, None] for x in (first_q, last_q))
    ends = q_lengths[:, None, None, None]
    last_seen = jnp.minimum(last, ends - 1)
    cut = _states(
        first, last_seen, jnp.asarray(first_kv)[None, None, None], jnp.asarray(last_kv)[None, None, None], band
    )
    cut = jnp.where(last < ends, states, jnp.minimum(cut, jnp.int8(PARTIAL)))
    return jnp.where(first < ends, cut, jnp.int8(0))
