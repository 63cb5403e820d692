"""Lists of the visible blocks of every row and column, and the matrix of block states.

The *state* of a block of queries and keys is ``EMPTY`` (no element is visible), ``PARTIAL`` (the mask decides for each
element) or ``FULL`` (every element is visible and the block lies wholly within the lengths, so that a kernel does not
evaluate the mask). A matrix of states and the lists of block indices hold the same information: the matrix is easy to
reason about, the lists are what a kernel walks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int8, Int32

from jflex.mods.types import MaskMod

EMPTY, PARTIAL, FULL = 0, 1, 2


class BlockLists(NamedTuple):
    """The eight arrays that kernels walk, int32.

    ``R`` and ``C`` count blocks of queries and of keys. Row ``r`` of head ``h`` visits the key blocks
    ``kv_indices[b, h, r, :kv_num_blocks[b, h, r]]`` (partial ones) and likewise those of the ``full_`` pair. The ``q_``
    arrays are the transpose: the query blocks that visit a key block, for the backward pass. Entries past a count are
    arbitrary.
    """

    kv_num_blocks: Int32[Array, "B H R"]
    kv_indices: Int32[Array, "B H R C"]
    full_kv_num_blocks: Int32[Array, "B H R"]
    full_kv_indices: Int32[Array, "B H R C"]
    q_num_blocks: Int32[Array, "B H C"]
    q_indices: Int32[Array, "B H C R"]
    full_q_num_blocks: Int32[Array, "B H C"]
    full_q_indices: Int32[Array, "B H C R"]


class BlockMatrix(NamedTuple):
    """A BlockMask with a matrix of states in place of lists, on which algebra, cropping and indexing work.

    Attributes:
      states: The state of every block.
      mask_mod: Decides which elements of a partial block are visible; None: all.
      seq_lengths: ``(Q_LEN, KV_LEN)``.
      block_size: Of queries and of keys.
      lists_follow_mod: Whether the mask_mod alone defines the mask.
      source: The name of the mask_mod in messages; None: its own name.
    """

    states: Int8[Array, "B H R C"]
    mask_mod: MaskMod | None
    seq_lengths: tuple[int, int]
    block_size: tuple[int, int]
    lists_follow_mod: bool
    source: str | None = None


def block_count(length: int, block: int) -> int:
    """How many blocks of size `block` cover `length`.

    >>> block_count(100, 32)
    4
    """
    return -(-length // block)


@jax.jit
def lists_from_states(states: Int8[Array, "B H R C"]) -> BlockLists:
    """Lists the partial and the full blocks of every row and of every column, in ascending order.

    >>> lists = lists_from_states(jnp.array([[[[FULL, EMPTY], [PARTIAL, FULL]]]], jnp.int8))
    >>> lists.full_kv_num_blocks.tolist(), lists.full_kv_indices[0, 0, 1, :1].tolist()
    ([[[1, 1]]], [1])
    """
    transposed = jnp.swapaxes(states, -1, -2)
    return BlockLists(
        *_list_row(states == PARTIAL), *_list_row(states == FULL),
        *_list_row(transposed == PARTIAL), *_list_row(transposed == FULL),
    )  # fmt: skip


def _list_row(listed: Bool[Array, "*rows C"]) -> tuple[Int32[Array, "*rows"], Int32[Array, "*rows C"]]:
    columns = listed.shape[-1]
    counts = jnp.sum(listed, axis=-1, dtype=jnp.int32)
    number = jax.lax.broadcasted_iota(jnp.int32, listed.shape, listed.ndim - 1)
    # One sort puts the listed indices first, in order. The rest become 0, so that a kernel that loads an index before
    # it checks the count reads a block that exists.
    ordered = jax.lax.sort(jnp.where(listed, number, columns), dimension=-1)
    return counts, jnp.where(ordered < columns, ordered, 0)


@jax.jit
def states_from_lists(lists: BlockLists) -> Int8[Array, "B H R C"]:
    """The matrix of states of the ``kv_`` lists; their last axis must be as wide as the matrix."""
    columns = lists.kv_indices.shape[-1]
    partial = listed_blocks(lists.kv_num_blocks, lists.kv_indices, columns)
    full = listed_blocks(lists.full_kv_num_blocks, lists.full_kv_indices, columns)
    return join_states(partial, full)


def join_states(partial: Bool[Array, "B H R C"], full: Bool[Array, "B H R C"]) -> Int8[Array, "B H R C"]:
    """The matrix of states with these partial and full blocks; a block in both is full."""
    return jnp.where(full, jnp.int8(FULL), jnp.where(partial, jnp.int8(PARTIAL), jnp.int8(EMPTY)))


@jax.jit(static_argnames="columns")
def listed_blocks(
    counts: Int[Array, "B H R"], indices: Int[Array, "B H R W"], columns: int
) -> Bool[Array, "B H R {columns}"]:
    """A boolean matrix of the listed blocks; entries past a count or outside the matrix are ignored."""
    batch, heads, rows, width = indices.shape
    valid = jax.lax.broadcasted_iota(jnp.int32, indices.shape, 3) < counts[..., None]
    valid &= (indices >= 0) & (indices < columns)
    flat = jnp.where(valid, indices, columns).reshape(batch * heads * rows, width)
    row = jnp.arange(batch * heads * rows, dtype=jnp.int32)[:, None]
    listed = jnp.zeros((batch * heads * rows, columns), jnp.bool_).at[row, flat].set(True, mode="drop")
    return listed.reshape(batch, heads, rows, columns)


@jax.jit(static_argnames=("seq_lengths", "block_size"))
def demote_tails(
    states: Int8[Array, "B H R C"], seq_lengths: tuple[int, int], block_size: tuple[int, int]
) -> Int8[Array, "B H R C"]:
    """Makes full blocks that reach past a length partial, because kernels mask elements in partial blocks only."""
    inside = inside_blocks(seq_lengths, block_size)[None, None]
    return jnp.where((states == FULL) & ~inside, jnp.int8(PARTIAL), states)


def inside_blocks(seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> Bool[Array, "R C"]:
    """Which blocks lie wholly within the lengths."""
    sides = [
        (jnp.arange(block_count(length, block), dtype=jnp.int32) + 1) * block <= length
        for length, block in zip(seq_lengths, block_size, strict=True)
    ]
    return sides[0][:, None] & sides[1][None, :]
