"""Lists of the visible blocks of every row and column, and the matrix of block states.

The *state* of a block of queries and keys is ``EMPTY`` (no element is visible), ``PARTIAL`` (the mask decides for each
element) or ``FULL`` (every element is visible and the block lies wholly within the lengths, so that a kernel does not
evaluate the mask). A matrix of states and the lists of block indices hold the same information: the matrix is easy to
reason about, the lists are what a kernel walks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Int8, Int32

from jflex.block_mask.bits import BitRows, pack, transpose
from jflex.mods.types import MaskMod

EMPTY, PARTIAL, FULL = 0, 1, 2

# Tables of up to this many blocks are as wide as the sequence: a width that follows from values compiles a function
# again for each new one. 1,024 blocks of 128 are 131,072 tokens, and four tables 16 MB.
WIDE = 1024
# The least width that follows from values. With it the width is the same for most masks of documents and windows.
LEAST_WIDTH = 8
# The width inside `jit`, where values are unknown: 4 MB a table for 1,048,576 tokens. A window of 4096 takes 33 blocks.
TRACED_WIDTH = 128
_KINDS = (
    ("query block", "partial key blocks"),
    ("query block", "full key blocks"),
    ("key block", "partial query blocks"),
    ("key block", "full query blocks"),
)


class BlockLists(NamedTuple):
    """The eight arrays that kernels walk, int32.

    ``R`` and ``C`` count blocks of queries and of keys. Row ``r`` of head ``h`` visits the key blocks
    ``kv_indices[b, h, r, :kv_num_blocks[b, h, r]]`` (partial ones) and likewise those of the ``full_`` pair. The ``q_``
    arrays are the transpose: the query blocks that visit a key block, for the backward pass. Entries past a count are
    arbitrary.

    A table may be narrower than the axis that it indexes. Then a count may exceed its width: the last entry begins a
    run, and the blocks after it follow one by one. So a causal row, whose full blocks are all in sequence, needs one
    entry. `pallas_kernels.block_walk.block_at` reads such a table.
    """

    kv_num_blocks: Int32[Array, "B H R"]
    kv_indices: Int32[Array, "B H R _"]
    full_kv_num_blocks: Int32[Array, "B H R"]
    full_kv_indices: Int32[Array, "B H R _"]
    q_num_blocks: Int32[Array, "B H C"]
    q_indices: Int32[Array, "B H C _"]
    full_q_num_blocks: Int32[Array, "B H C"]
    full_q_indices: Int32[Array, "B H C _"]


class BlockMatrix(NamedTuple):
    """A BlockMask with a matrix of states in place of lists, on which algebra, cropping and indexing work."""

    states: Int8[Array, "B H R C"]
    mask_mod: MaskMod | None
    seq_lengths: tuple[int, int]
    block_size: tuple[int, int]
    lists_follow_mod: bool  # whether the mask_mod alone defines the mask
    source: str | None = None  # the name of the mask_mod in messages; None: its own name


def block_count(length: int, block: int) -> int:
    """Number of blocks of size `block` that cover `length`."""
    return -(-length // block)


def run_of(position: Int32[Array, " N"], indptr: Int32[Array, " R_and_1"]) -> Int32[Array, " N"]:
    """The run of each position, where run r goes from ``indptr[r]`` to ``indptr[r + 1]``; R behind the last one.

    Unrolled, the search is one kernel of a GPU. As a loop, the default of JAX, each of its steps is several.

    >>> run_of(jnp.arange(5, dtype=jnp.int32), jnp.array([0, 2, 2, 4])).tolist()
    [0, 0, 2, 2, 3]
    """
    return jnp.searchsorted(indptr[1:], position, side="right", method="scan_unrolled").astype(jnp.int32)


PackedStates = tuple[BitRows, ...]
"""The blocks of each list as bits: partial and full ones of every row, then of every column."""

Widths = tuple[int, int, int, int]
"""Entries of a row of each table: partial and full key blocks, partial and full query blocks."""


@jax.jit
def lists_from_states(states: Int8[Array, "B H R C"]) -> BlockLists:
    """Lists the partial and the full blocks of every row and of every column, in ascending order, at full width.

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
def pack_states(states: Int8[Array, "B H R C"]) -> PackedStates:
    """Packs the matrix of states by rows and by columns."""
    batch, heads, rows, columns = states.shape
    flat = states.reshape(batch * heads * rows, columns)
    words = [pack(flat == state) for state in (PARTIAL, FULL)]
    turned = [transpose(x.reshape(batch * heads, rows, x.shape[1]), columns) for x in words]
    words += [x.reshape(batch * heads * columns, x.shape[2]) for x in turned]
    if words[0].shape[1] != words[2].shape[1]:
        return *_split(words[:2]), *_split(words[2:])
    return tuple(_split(words))


def _split(words: list[jax.Array]) -> list[BitRows]:
    """Counts the bits of several matrices at once: a cumulative sum takes 0.1 s to compile for a CPU."""
    ends = list(itertools.accumulate(len(x) for x in words))
    parts = (jnp.split(x, ends[:-1]) for x in BitRows.from_words(jnp.concatenate(words)))
    return [BitRows(*part) for part in zip(*parts, strict=True)]


@jax.jit
def entries_needed(packed: PackedStates) -> Int32[Array, " 4"]:
    """Entries that the most crowded row of each table needs, if its last one may begin a run."""
    return jnp.stack([jnp.max(bits.counts - jnp.maximum(bits.run() - 1, 0), initial=0) for bits in packed])


@jax.jit(static_argnames=("shape", "widths", "may_cut"))
def lists_of_width(
    packed: PackedStates, shape: tuple[int, int, int, int], widths: Widths, *, may_cut: bool = False
) -> BlockLists:
    """Lists of the given widths.

    Args:
      widths: Of the tables. A row that needs more entries than its table has loses blocks, unless `may_cut`.
      may_cut: Whether such a row may end in a run of partial blocks that covers all that it lists from some block on.
        It is walked where it lists nothing, too; so the mask_mod must be what hides those blocks.
    """
    batch, heads, *sides = shape
    tables = []
    for (partial, full), side, width in zip((packed[:2], packed[2:]), sides, (widths[:2], widths[2:]), strict=True):
        row_lists = _cut_lists(partial, full, width) if may_cut else _plain_lists(partial, full, width)
        tables += [x.reshape(batch, heads, side, *x.shape[1:]) for x in row_lists]
    return BlockLists(*tables)


def _plain_lists(partial: BitRows, full: BitRows, widths: tuple[int, int]) -> list[jax.Array]:
    return [x for bits, width in zip((partial, full), widths, strict=True) for x in (bits.counts, bits.first(width))]


def _cut_lists(partial: BitRows, full: BitRows, widths: tuple[int, int]) -> list[jax.Array]:
    """Cuts lists to the width: a row that needs more entries ends in a run of partial blocks from its `cut` on."""
    never = jnp.int32(np.iinfo(np.int32).max)
    fits, cut = jnp.bool_(True), never
    # There must be room for what lies before the cut: for its full blocks, and for its partial ones and the run.
    for bits, width, last in ((partial, widths[0], widths[0] - 1), (full, widths[1], widths[1])):
        fits &= bits.counts - jnp.maximum(bits.run() - 1, 0) <= width
        at = bits.nth(jnp.full((bits.counts.shape[0], 1), last, jnp.int32))[:, 0]
        cut = jnp.minimum(cut, jnp.where(bits.counts > last, at, never))
    cut = jnp.where(fits, never, cut)
    kept = partial.rank(cut)
    end = jnp.maximum(partial.last(), full.last()) + 1
    in_run = jnp.arange(widths[0], dtype=jnp.int32)[None] - kept[:, None]
    listed = partial.first(widths[0])
    listed = jnp.where(fits[:, None] | (in_run < 0), listed, jnp.minimum(cut[:, None] + in_run, end[:, None] - 1))
    count = jnp.where(fits, partial.counts, kept + end - cut)
    full_count = jnp.where(fits, full.counts, full.rank(cut))
    return [count, listed, full_count, full.first(widths[1])]


@jax.jit
def states_from_lists(lists: BlockLists) -> Int8[Array, "B H R C"]:
    """The matrix of states of the ``kv_`` lists, as wide as the ``q_`` lists are long."""
    columns = lists.q_num_blocks.shape[-1]
    partial = listed_blocks(lists.kv_num_blocks, lists.kv_indices, columns, runs=True)
    full = listed_blocks(lists.full_kv_num_blocks, lists.full_kv_indices, columns, runs=True)
    return join_states(partial, full)


def lists_of_rows(lists: BlockLists, first: Int32[Array, ""], rows: int) -> BlockLists:
    """The lists of some rows of blocks, which then count from 0.

    >>> lists = lists_from_states(jnp.array([[[[FULL, EMPTY], [PARTIAL, FULL]]]], jnp.int8))
    >>> states_from_lists(lists_of_rows(lists, jnp.int32(1), 1)).tolist()
    [[[[1, 2]]]]
    """
    of_rows = lambda x: jax.lax.dynamic_slice_in_dim(x, first, rows, 2)
    kept = BlockLists._make((*map(of_rows, lists[:4]), *lists[4:]))
    states = jnp.swapaxes(states_from_lists(kept), -1, -2)
    partial, full = _list_row(states == PARTIAL), _list_row(states == FULL)
    return BlockLists(*kept[:4], *partial, *full)


def join_states(partial: Bool[Array, "B H R C"], full: Bool[Array, "B H R C"]) -> Int8[Array, "B H R C"]:
    """The matrix of states with these partial and full blocks; a block in both is full."""
    return jnp.where(full, jnp.int8(FULL), jnp.where(partial, jnp.int8(PARTIAL), jnp.int8(EMPTY)))


@jax.jit(static_argnames=("columns", "runs"))
def listed_blocks(
    counts: Int[Array, "B H R"], indices: Int[Array, "B H R W"], columns: int, *, runs: bool = False
) -> Bool[Array, "B H R {columns}"]:
    """A boolean matrix of the listed blocks; entries past a count or outside the matrix are ignored.

    With `runs`, a row with more blocks than entries continues from the last entry, block by block.
    """
    batch, heads, rows, width = indices.shape
    valid = jax.lax.broadcasted_iota(jnp.int32, indices.shape, 3) < counts[..., None]
    valid &= (indices >= 0) & (indices < columns)
    flat = jnp.where(valid, indices, columns).reshape(batch * heads * rows, width)
    row = jnp.arange(batch * heads * rows, dtype=jnp.int32)[:, None]
    listed = jnp.zeros((batch * heads * rows, columns), jnp.bool_).at[row, flat].set(True, mode="drop")
    listed = listed.reshape(batch, heads, rows, columns)
    if not runs or width >= columns:
        return listed
    column, last = jnp.arange(columns, dtype=jnp.int32)[None, None, None], indices[..., -1:]
    return listed | ((column > last) & (column <= last + counts[..., None] - width))


@jax.jit(static_argnames=("seq_lengths", "block_size"))
def demote_tails(
    states: Int8[Array, "B H R C"], seq_lengths: tuple[int, int], block_size: tuple[int, int]
) -> Int8[Array, "B H R C"]:
    """Makes full blocks that reach past a length partial, because kernels mask elements in partial blocks only."""
    inside = inside_blocks(seq_lengths, block_size)[None, None]
    return jnp.where((states == FULL) & ~inside, jnp.int8(PARTIAL), states)


def inside_blocks(seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> Bool[Array, "R C"]:
    """Blocks that lie wholly within the lengths."""
    sides = [
        (jnp.arange(block_count(length, block), dtype=jnp.int32) + 1) * block <= length
        for length, block in zip(seq_lengths, block_size, strict=True)
    ]
    return sides[0][:, None] & sides[1][None, :]


# --- widths of tables: as the sequence, as its most crowded row, or as the user says


def is_compact(lengths: tuple[int, int], block_size: tuple[int, int], max_blocks: int | None) -> bool:
    """True if the tables of a mask are, or may be, narrower than its lengths."""
    blocks = [-(-length // size) for length, size in zip(lengths, block_size, strict=True)]
    return max_blocks is not None or max(blocks) > WIDE


def block_lists(
    states: Int8[Array, "B H R C"], *, follow_mod: bool, max_blocks: int | None = None, whole: int = 0
) -> BlockLists:
    """Lists the blocks of a matrix of states.

    Args:
      follow_mod: Whether the mask_mod alone defines the mask, so that a row may list blocks which it hides.
      max_blocks: Entries of a row of each table. None: as many as the axis has blocks up to `WIDE`; beyond, as many as
        the most crowded row needs, or `TRACED_WIDTH` where values are unknown.
      whole: Blocks along the longer axis of a mask of which `states` are parts: what counts for `WIDE` then.
    """
    rows, columns = states.shape[2:]
    blocks = (columns, columns, rows, rows)
    if 0 in states.shape or (max_blocks is None and max(whole, *blocks) <= WIDE):
        return lists_from_states(states)
    packed = pack_states(states)
    if isinstance(states, Tracer):
        width = (max_blocks or TRACED_WIDTH) if follow_mod else max(blocks)
        return lists_of_width(packed, states.shape, _widths([width] * 4, blocks), may_cut=follow_mod)
    needed = np.asarray(entries_needed(packed)).tolist()
    if max_blocks is None:
        return lists_of_width(packed, states.shape, _widths(map(_rounded, needed), blocks))
    most = max(needed)
    if most > max_blocks:
        row, listed = _KINDS[needed.index(most)]
        raise ValueError(
            f"`max_blocks` is {max_blocks}, but a {row} of this mask needs {most} entries for its {listed} (blocks in "
            f"sequence at the end of a row take one entry). Pass `max_blocks={most}` or more, or None for tables as "
            "wide as the most crowded row."
        )
    return lists_of_width(packed, states.shape, _widths([max_blocks] * 4, blocks))


def _widths(widths: Sequence[int] | map[int], blocks: Widths) -> Widths:
    """At least one entry, and at most one for each block."""
    first, second, third, fourth = (max(1, min(pair)) for pair in zip(widths, blocks, strict=True))
    return first, second, third, fourth


def _rounded(needed: int) -> int:
    """The next power of two, so that few widths occur."""
    return max(LEAST_WIDTH, 1 << (needed - 1).bit_length())
