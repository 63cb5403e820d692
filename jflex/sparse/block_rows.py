"""`BlockSparseRows`: one description of what a BlockMask, a page table and sparse rows of blocks have in common."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Int32

from jflex._check.arguments import checked_block_size, checked_positive, checked_size
from jflex.block_mask.lists import block_count, run_of
from jflex.block_mask.mask import BlockMask, BlockSize, create_block_mask
from jflex.mods.compose import and_masks
from jflex.mods.types import MaskMod
from jflex.paged.batch import PagedBatch
from jflex.sparse.from_indices import block_mask_from_indices
from jflex.types import AnyArray

Blocks = int | Int[AnyArray, " blocks_and_1"]
"""One size for all blocks (the last may be shorter), or where each block begins and the last ends."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockSparseRows:
    """Block-sparse rows (BSR, of FlashInfer): which blocks of keys each block of queries attends to, in which order.

    Blocks of queries and of keys may have any sizes. It is a pytree, for all heads of one sequence of queries and one
    of keys: make one with `from_indptr`, `from_block_mask` or `from_paged_batch`. Attention over it is that of the
    forms that kernels run, with any mods: `flex_attention` with `to_block_mask`, or over a cache `paged_attention` with
    `to_paged_batch`.

    Attributes:
      indptr: The key blocks of query block ``r`` are ``indices[indptr[r] : indptr[r + 1]]``.
      indices: Their numbers; entries from ``indptr[R]`` on are not used.
      q_indptr: The queries of query block ``r`` are those from ``q_indptr[r]`` up to ``q_indptr[r + 1]``.
      kv_indptr: Likewise for the keys of a key block.
      kv_lengths: How many keys of its blocks, in the order of `indices`, each query block attends to; None: all.
      seq_lengths: ``(Q_LEN, KV_LEN)``. Queries and keys past the last block are in none.
      block_size: Of queries and of keys; None where sizes differ.

    References:
      Ye et al. 2025, FlashInfer, arXiv:2501.01005, section 3.1.

    >>> rows = BlockSparseRows.from_indptr([0, 1, 3], [0, 1, 0], 6, 8, q_blocks=[0, 2, 6], kv_blocks=4)
    >>> print(rows.to_block_mask(block_size=2))
    BlockMask(shape=(1, 1, 6, 8), block_size=(2, 2), sparsity=16.67%)
    batch 0, head 0
    ████    |
    ████████|
    ████████|
    """

    indptr: Int32[Array, " R_and_1"]
    indices: Int32[Array, " N"]
    q_indptr: Int32[Array, " R_and_1"]
    kv_indptr: Int32[Array, " C_and_1"]
    kv_lengths: Int32[Array, " R"] | None
    seq_lengths: tuple[int, int] = dataclasses.field(metadata={"static": True})
    block_size: tuple[int | None, int | None] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_indptr(
        cls,
        indptr: Int[AnyArray, " R_and_1"] | list[int],
        indices: Int[AnyArray, " N"] | list[int],
        Q_LEN: int,
        KV_LEN: int,
        *,
        q_blocks: Blocks | list[int],
        kv_blocks: Blocks | list[int],
        kv_lengths: Int[AnyArray, " R"] | list[int] | None = None,
    ) -> BlockSparseRows:
        """Makes rows of blocks from plain arrays.

        Args:
          indptr: Where the key blocks of each query block begin in `indices`, ascending from 0, and where the last end.
          indices: Key blocks, each once for a query block, in any order.
          q_blocks: The size of all query blocks, or where each begins, ascending, and where the last ends.
          kv_blocks: Likewise of key blocks.
          kv_lengths: How many keys of its blocks each query block attends to, from the first one on. None: all.

        Raises:
          TypeError: An array is not of integers, or a length is not an integer.
          ValueError: Numbers of blocks do not match; or, if values are known, an array does not ascend, or ends beyond
            its length; or a block does not exist, or is listed twice for one query block. Traced values are not
            checked: blocks that do not exist are dropped, and none may be listed twice.
        """
        lengths = checked_size(Q_LEN, "Q_LEN"), checked_size(KV_LEN, "KV_LEN")
        starts, numbers = _vector("indptr", indptr), _vector("indices", indices)
        queries, q_size = _boundaries("q_blocks", q_blocks, lengths[0])
        keys, kv_size = _boundaries("kv_blocks", kv_blocks, lengths[1])
        shown = None if kv_lengths is None else _vector("kv_lengths", kv_lengths)
        rows = queries.shape[0] - 1
        if starts.shape[0] != rows + 1 or (shown is not None and shown.shape[0] != rows):
            raise ValueError(
                f"`q_blocks` make {rows} query blocks, so `indptr` must have {rows + 1} entries, and `kv_lengths` "
                f"{rows}. Got {starts.shape[0]} and {None if shown is None else shown.shape[0]}."
            )
        _check_ascends("indptr", starts, numbers.shape[0], "`indices`")
        _check_numbers(starts, numbers, keys.shape[0] - 1)
        return cls(starts, numbers, queries, keys, shown, lengths, (q_size, kv_size))

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> BlockSparseRows:
        """The blocks that a BlockMask lists, partial and full ones, in ascending order.

        Its mask_mod is not part of them: pass `block_mask.mask_mod` to `to_block_mask`.

        Args:
          block_mask: Of one batch entry and one head, or for all.

        Returns:
          The rows. Under ``jit``, `indices` are as many as there are blocks at all, since their number is not known.

        Raises:
          ValueError: The mask has lists for several batch entries or heads.
        """
        if block_mask.shape[:2] != (1, 1):
            raise ValueError(
                f"`block_mask` must have one batch entry and one head. Got {block_mask.shape[0]} and "
                f"{block_mask.shape[1]}. Select one, as `block_mask[0, 0]`."
            )
        listed = block_mask.to_dense()[0, 0] > 0
        counts = listed.sum(axis=1, dtype=jnp.int32)
        indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        size = listed.size if isinstance(listed, Tracer) else int(indptr[-1])
        indices = jnp.nonzero(listed, size=size, fill_value=0)[1].astype(jnp.int32)
        (queries, _), (keys, _) = (
            _boundaries("", size, length)
            for size, length in zip(block_mask.block_size, block_mask.seq_lengths, strict=True)
        )
        return cls(indptr, indices, queries, keys, None, block_mask.seq_lengths, block_mask.block_size)

    @classmethod
    def from_paged_batch(cls, batch: PagedBatch, num_tokens: int, *, num_pages: int, page_size: int) -> BlockSparseRows:
        """The requests of a batch as query blocks, and the pages of a cache as key blocks.

        Args:
          num_pages: P of the cache.

        Returns:
          The rows, of ``P * page_size`` keys: the slots of the cache. Mods of a BlockMask made of them get slots, not
          positions; those of `paged_attention` get positions.

        Raises:
          ValueError: The batch has trees; or, if values are known, as `from_indptr`.
        """
        if batch.ancestors is not None:
            raise ValueError("`batch.ancestors` must be None: a tree hides single keys, which rows of blocks do not.")
        width = batch.max_pages
        table, lengths = jnp.asarray(batch.page_table), jnp.asarray(batch.kv_lengths)
        counts = jnp.clip(-(-lengths // page_size), 0, width)
        indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        entry = jnp.arange(width, dtype=jnp.int32)[None]
        size = table.size if isinstance(indptr, Tracer) else int(indptr[-1])
        at = jnp.where(entry < counts[:, None], indptr[:-1, None] + entry, size)
        indices = jnp.full(size, -1, jnp.int32).at[at].set(table, mode="drop")
        return cls.from_indptr(
            indptr, indices, num_tokens, num_pages * page_size, q_blocks=batch.qo_indptr, kv_blocks=page_size,
            kv_lengths=lengths,
        )  # fmt: skip

    def first_keys(self) -> Int32[Array, "R C"]:
        """Number of keys in the blocks that a query block lists before each one; -1 for a block not listed."""
        rows, columns, entries = len(self.q_indptr) - 1, len(self.kv_indptr) - 1, len(self.indices)
        table = jnp.full((rows, columns), -1, jnp.int32)
        if not table.size or not entries:
            return table
        entry = jnp.arange(entries, dtype=jnp.int32)
        row = run_of(entry, self.indptr)
        exists = (row < rows) & (self.indices >= 0) & (self.indices < columns)
        row, column = jnp.minimum(row, rows - 1), jnp.clip(self.indices, 0, columns - 1)
        sizes = jnp.where(exists, jnp.diff(self.kv_indptr)[column], 0)
        before = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
        first = before - before[self.indptr[row]]
        return table.at[jnp.where(exists, row, rows), column].max(first, mode="drop")

    def to_block_mask(self, mask_mod: MaskMod | None = None, *, block_size: BlockSize | None = None) -> BlockMask:
        """Converts to a BlockMask, for `flex_attention`; under ``jit``, too.

        If blocks of queries and of keys have one size each, and there are no `kv_lengths`, it lists these blocks, and
        nothing is evaluated for single elements but `mask_mod`. Else blocks do not lie on one grid, and its mask_mod
        looks up the blocks of a query and of a key: every element of the mask is evaluated once, a bounded number at a
        time, to find the blocks of the grid in which all, some or no elements are visible.

        Args:
          mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, also applied; without ``b`` and ``h``.
          block_size: Of the BlockMask. None: that of the rows, or 128 where sizes differ.

        Returns:
          The mask, of batch size 1 and one head.

        Raises:
          TypeError: `mask_mod` is not a mask_mod.
          ValueError: As `create_block_mask`.
        """
        sizes = [128 if size is None else size for size in self.block_size]
        sizes_requested = (sizes[0], sizes[1]) if block_size is None else checked_block_size(block_size)
        table = self.first_keys()
        if sizes_requested == self.block_size and self.kv_lengths is None:
            column = jax.lax.broadcasted_iota(jnp.int32, table.shape, 1)
            indices = jnp.where(table >= 0, column, -1)[None, None]
            return block_mask_from_indices(indices, *self.seq_lengths, block_size=sizes_requested, mask_mod=mask_mod)
        elements = self._mask_of_elements(table)
        both = elements if mask_mod is None else and_masks(elements, mask_mod)
        return create_block_mask(both, None, None, *self.seq_lengths, block_size=sizes_requested)

    def to_paged_batch(self, *, max_pages: int | None = None) -> PagedBatch:
        """Converts to a batch for `paged_attention`: query blocks are requests, and key blocks are pages.

        Args:
          max_pages: Width of the page table. None: of the longest row, or of all pages if values are not known.

        Returns:
          The batch. To mods, the queries of a request are the last of its keys, in the order of `indices`.

        Raises:
          ValueError: Key blocks are not pages of one size; or, if values are known, one of them is block 0, which a
            cache reserves, or a row has more than `max_pages`.
        """
        page_size = self.block_size[1]
        if page_size is None or self.seq_lengths[1] % page_size:
            raise ValueError(
                f"`kv_blocks` must be pages of one size. Got {self.seq_lengths[1]} keys in blocks of "
                f"{'different sizes' if page_size is None else page_size}. Attend to key and value arrays with "
                "`flex_attention` and `to_block_mask()`, which takes any blocks."
            )
        counts = jnp.diff(self.indptr)
        lengths = counts * page_size if self.kv_lengths is None else jnp.clip(self.kv_lengths, 0, counts * page_size)
        width = self._page_table_width(max_pages, counts)
        entry = jnp.arange(width, dtype=jnp.int32)[None]
        at = jnp.minimum(self.indptr[:-1, None] + entry, max(0, len(self.indices) - 1))
        pages = self.indices[at] if len(self.indices) else jnp.zeros_like(at)
        return PagedBatch(self.q_indptr, lengths, jnp.where(entry < counts[:, None], pages, 0))

    def _page_table_width(self, max_pages: int | None, counts: Int32[Array, " R"]) -> int:
        if isinstance(counts, Tracer) or isinstance(self.indices, Tracer):
            return len(self.kv_indptr) - 1 if max_pages is None else checked_positive(max_pages, "max_pages")
        longest = int(counts.max(initial=1))
        width = longest if max_pages is None else checked_positive(max_pages, "max_pages")
        if width < longest:
            raise ValueError(f"`max_pages` must be at least {longest}, the pages of the longest row. Got {max_pages}.")
        if np.any(np.asarray(self.indices)[: int(self.indptr[-1])] == 0):
            raise ValueError(
                "`indices` must not list key block 0: page 0 of a cache holds no tokens. Number pages from 1."
            )
        return width

    def _mask_of_elements(self, table: Int32[Array, "R C"]) -> MaskMod:
        """True if a query's block lists the block of a key, and the key lies within its length."""
        q_length, kv_length = self.seq_lengths
        # A last row and column for queries and keys in no block.
        table = jnp.pad(table, ((0, 1), (0, 1)), constant_values=-1)
        position = jnp.arange(max(1, q_length), dtype=jnp.int32), jnp.arange(max(1, kv_length), dtype=jnp.int32)
        row, column = run_of(position[0], self.q_indptr), run_of(position[1], self.kv_indptr)
        if self.kv_lengths is None:
            return lambda b, h, q_idx, kv_idx: table[row[q_idx], column[kv_idx]] >= 0
        offset, length = position[1] - self.kv_indptr[column], jnp.pad(self.kv_lengths, (0, 1))

        def visible(b, h, q_idx, kv_idx):
            first = table[row[q_idx], column[kv_idx]]
            return (first >= 0) & (first + offset[kv_idx] < length[row[q_idx]])

        return visible


def _vector(name: str, values: AnyArray | list[int]) -> Int32[Array, " N"]:
    array = values if isinstance(values, jax.Array) else np.asarray(values, None if np.size(values) else np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers. Got {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"`{name}` must have one axis. Got shape {array.shape}.")
    if isinstance(array, np.ndarray):  # no wide integer may wrap around to a small one
        array = np.clip(array.astype(np.int64), -1, np.iinfo(np.int32).max)
    return jnp.asarray(array, jnp.int32)


def _boundaries(name: str, blocks: Blocks | list[int], length: int) -> tuple[Int32[Array, " blocks_and_1"], int | None]:
    """Boundaries of blocks, and their common size, if they have one."""
    if isinstance(blocks, int | np.integer):
        size = checked_positive(blocks, name)
        return jnp.asarray(np.minimum(np.arange(block_count(length, size) + 1) * size, length), jnp.int32), size
    boundaries = _vector(name, blocks)
    if not boundaries.shape[0]:
        raise ValueError(f"`{name}` must have an entry more than there are blocks. Got none.")
    _check_ascends(name, boundaries, length, "the sequence")
    return boundaries, None


def _check_ascends(name: str, array: Int32[Array, " N"], end: int, sequence: str) -> None:
    if isinstance(array, Tracer):
        return
    known = np.asarray(array)
    if known[0] != 0 or np.any(np.diff(known) < 0) or known[-1] > end:
        raise ValueError(
            f"`{name}` must ascend from 0 and end within {end}, the length of {sequence}. Got {known.tolist()}."
        )


def _check_numbers(indptr: Int32[Array, " R_and_1"], indices: Int32[Array, " N"], columns: int) -> None:
    if isinstance(indptr, Tracer) or isinstance(indices, Tracer):
        return
    starts = np.asarray(indptr)
    for row, numbers in enumerate(np.split(np.asarray(indices)[: starts[-1]], starts[1:-1])):
        wrong = numbers[(numbers < 0) | (numbers >= columns)]
        if wrong.size:
            raise ValueError(
                f"`indices` must lie between 0 and {columns - 1}, the last key block. Got {wrong[0]} for query block "
                f"{row}."
            )
        if len(np.unique(numbers)) < len(numbers):
            raise ValueError(
                f"`indices` list a key block twice for query block {row}: {numbers.tolist()}. List it once."
            )
