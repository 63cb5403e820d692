"""Widths of the tables of a BlockMask: as the sequence, as its most crowded row, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int8

from jflex.block_mask.lists import BlockLists, Widths, entries_needed, lists_from_states, lists_of_width, pack_states

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
    _check(needed, max_blocks)
    return lists_of_width(packed, states.shape, _widths([max_blocks] * 4, blocks))


def _widths(widths: Sequence[int] | map[int], blocks: Widths) -> Widths:
    """At least one entry, and at most one for each block."""
    first, second, third, fourth = (max(1, min(pair)) for pair in zip(widths, blocks, strict=True))
    return first, second, third, fourth


def _rounded(needed: int) -> int:
    """The next power of two, so that few widths occur."""
    return max(LEAST_WIDTH, 1 << (needed - 1).bit_length())


def _check(needed: list[int], max_blocks: int) -> None:
    most = max(needed)
    if most > max_blocks:
        row, listed = _KINDS[needed.index(most)]
        raise ValueError(
            f"`max_blocks` is {max_blocks}, but a {row} of this mask needs {most} entries for its {listed} (blocks in "
            f"sequence at the end of a row take one entry). Pass `max_blocks={most}` or more, or None for tables as "
            "wide as the most crowded row."
        )
