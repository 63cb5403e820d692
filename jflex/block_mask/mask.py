"""BlockMask: which blocks of queries attend to which blocks of keys, as lists that kernels walk.

A `BlockMask` splits a mask into blocks and lists, for every block of queries, the blocks of keys that it attends to:
*full* ones, where every element is visible, and *partial* ones, where the mask_mod decides for each element. A block in
neither list is skipped. An element is visible if its block is full, or if it is partial and the mask_mod is True.

After FlexAttention (Dong et al., 2024, https://arxiv.org/abs/2412.05496, section 4).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Int8, Int32

from jflex._check.arguments import checked_block_size, checked_positive, checked_shape, checked_size
from jflex._mesh import as_known, without_mesh
from jflex.block_mask import algebra, drawing
from jflex.block_mask.dense import elements_at
from jflex.block_mask.from_lists import states_from_given
from jflex.block_mask.indexing import AxisIndex, select
from jflex.block_mask.limits import with_limits
from jflex.block_mask.lists import BlockLists, BlockMatrix, block_lists, demote_tails, is_compact, states_from_lists
from jflex.block_mask.states import block_states, known_block_states
from jflex.mods.array_sizes import check_mask_shape
from jflex.mods.compose import BoundMask, noop_mask
from jflex.mods.dependence import uses_index
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import TracedMod, mod_requirements, trace_mask_mod
from jflex.mods.types import MaskMod

BlockSize = int | tuple[int, int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A block-sparse attention mask: a pytree that passes through ``jit``, ``vmap``, ``scan`` and ``device_put``.

    Make one with `create_block_mask`, or from lists of your own with `BlockMask.from_kv_blocks`.

    ``R`` and ``C`` count query blocks and key blocks. Batch and heads are 1 where all share one mask.

    Attributes:
      kv_num_blocks: Number of partial key blocks of each query block.
      kv_indices: Their indices, ascending; entries past the count are arbitrary, here and in every list. A table
        narrower than the number of blocks may have rows with more blocks than entries: the last entry begins a run.
      full_kv_num_blocks: Number of full key blocks of each query block.
      q_num_blocks: Number of query blocks of which a key block is a partial one; the backward pass walks these.
      full_q_num_blocks: Number of query blocks of which a key block is a full one.
      mask_operands: The arrays that the mask_mod closes over.
      traced: The program of the mask_mod, or None: then every element of a listed block is visible.
      seq_lengths: ``(Q_LEN, KV_LEN)``.
      block_size: Of queries and of keys.
      lists_follow_mod: Whether the mask_mod alone defines the mask. The lists of `from_kv_blocks` can mask more.

    >>> block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512)
    >>> print(block_mask)
    BlockMask(shape=(1, 1, 512, 512), block_size=(128, 128), sparsity=37.50%)
    batch 0, head 0
    ░░      |
    ██░░    |
    ████░░  |
    ██████░░|
    """

    kv_num_blocks: Int32[Array, "B H R"]
    kv_indices: Int32[Array, "B H R _"]
    full_kv_num_blocks: Int32[Array, "B H R"]
    full_kv_indices: Int32[Array, "B H R _"]
    q_num_blocks: Int32[Array, "B H C"]
    q_indices: Int32[Array, "B H C _"]
    full_q_num_blocks: Int32[Array, "B H C"]
    full_q_indices: Int32[Array, "B H C _"]
    mask_operands: tuple[jax.Array, ...]
    traced: TracedMod | None = dataclasses.field(metadata={"static": True})
    seq_lengths: tuple[int, int] = dataclasses.field(metadata={"static": True})
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})
    lists_follow_mod: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    @answers_keywords
    def from_kv_blocks(
        cls,
        kv_num_blocks: Int[ArrayLike, "B H R"],
        kv_indices: Int[ArrayLike, "B H R W"],
        full_kv_num_blocks: Int[ArrayLike, "B H R"] | None = None,
        full_kv_indices: Int[ArrayLike, "B H R W2"] | None = None,
        *,
        block_size: BlockSize = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
    ) -> BlockMask:
        """Makes a BlockMask from lists of key blocks, under ``jit`` as well as outside.

        Args:
          kv_num_blocks: Number of partial key blocks of each query block.
          kv_indices: Their indices, each once, in any order; entries past the count are ignored. ``W`` may be smaller
            than the number of key blocks.
          full_kv_num_blocks: Number of full key blocks of each query block: those where `mask_mod` is True everywhere.
            A full block that reaches past a length is listed as a partial one, since its padding must be masked.
          full_kv_indices: Their indices. Pass both ``full_`` arguments or neither.
          block_size: Of queries and keys, one number or a pair.
          mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, applied in partial blocks. None: listed blocks are full.
          seq_lengths: ``(Q_LEN, KV_LEN)``. None: as many whole blocks as the arrays have rows and columns.

        Returns:
          The mask, with ascending lists; see `create_block_mask` for the widths of the tables.

        Raises:
          TypeError: The lists are not integers, or `mask_mod` is not a mask_mod.
          ValueError: Shapes do not match one another or `seq_lengths`; a count or index is out of range; a block is
            listed twice. Traced values are not checked: a block index out of range is ignored, and a block in both
            lists is full.

        >>> counts, numbers = jnp.array([[[1, 2]]]), jnp.array([[[[0, 0], [1, 0]]]])
        >>> print(BlockMask.from_kv_blocks(counts, numbers, block_size=64))
        BlockMask(shape=(1, 1, 128, 128), block_size=(64, 64), sparsity=25.00%)
        batch 0, head 0
        ██  |
        ████|
        """
        block_size = checked_block_size(block_size)
        if seq_lengths is not None:
            q_length, kv_length = seq_lengths
            seq_lengths = (checked_size(q_length, "seq_lengths"), checked_size(kv_length, "seq_lengths"))
        arguments = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        states, seq_lengths = states_from_given(arguments, block_size, seq_lengths)
        if mask_mod is None:
            states = algebra.solid_states(states)
        return _assemble(BlockMatrix(states, mask_mod, seq_lengths, block_size, lists_follow_mod=False))

    @property
    def lists(self) -> BlockLists:
        """The eight arrays that kernels walk."""
        return BlockLists(*(getattr(self, name) for name in BlockLists._fields))

    @property
    def mask_mod(self) -> BoundMask | None:
        """The mask_mod, as a callable ``(b, h, q_idx, kv_idx) -> bool``; None if all of a listed block is visible."""
        return None if self.traced is None else BoundMask(self.traced, self.mask_operands)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, H, Q_LEN, KV_LEN)``; B and H are 1 where all share one mask."""
        return (*self.kv_num_blocks.shape[:-1], *self.seq_lengths)

    def numel(self) -> int:
        """Elements of the mask: the product of `shape`."""
        return math.prod(self.shape)

    def states(self) -> Int8[Array, "B H R C"]:
        """The matrix of block states: 0 empty, 1 partial, 2 full."""
        return states_from_lists(self.lists)

    def to_dense(self) -> Int32[Array, "B H R C"]:
        """The matrix of blocks: 1 where any element is visible or may be, else 0.

        >>> create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 384, 256).to_dense()[0, 0].tolist()
        [[1, 0], [1, 1], [1, 1]]
        """
        return (self.states() > 0).astype(jnp.int32)

    def to_elements(self) -> Bool[Array, "B H Q_LEN KV_LEN"]:
        """The mask of elements, dense: for references, pictures and tests of small masks."""
        q_idx, kv_idx = (jnp.arange(length, dtype=jnp.int32) for length in self.seq_lengths)
        return self._elements(q_idx, kv_idx)

    def sparsity(self) -> float:
        """The percentage of elements in skipped blocks; 0.0 for a mask without elements.

        Raises:
          TypeError: The lists are traced (under ``jit``), so their values are not known.

        >>> create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512).sparsity()
        37.5
        """
        if not drawing.is_concrete(self.lists):
            raise TypeError(
                "`BlockMask.sparsity()` is a Python number and needs the values of the lists, which are not known here "
                "(under `jit` or `vmap`). Call it outside, or compute with `block_mask.to_dense()`."
            )
        return drawing.sparsity(np.asarray(self.states()), self.seq_lengths, self.block_size)

    def __getitem__(self, index: AxisIndex | tuple[AxisIndex, ...]) -> BlockMask:
        """Selects batches, heads and query blocks; ``block_mask[b, h, q_block]``.

        Args:
          index: Up to three integers, slices or integer arrays with one axis, each for its own axis. An integer keeps
            the axis, with size 1. Negative ones count from the end. Traced ones are clamped.

        Returns:
          A mask over the selected query blocks, renumbered from 0, as is its mask_mod. If it is extended over queries,
          consecutive blocks continue the old mask; after blocks selected by an array or a step, no key is visible.

        Raises:
          IndexError: Too many indices, or one out of range.
          TypeError: One is neither integer, slice nor integer array.
          ValueError: A short last query block is selected before another one.

        >>> create_block_mask(lambda b, h, q, kv: q >= kv, 2, 4, 512, 512)[1, :2, -1].shape
        (1, 2, 128, 512)
        """
        return _assemble(select(self._matrix(), index))

    def with_lengths(self, q_len: int, kv_len: int) -> BlockMask:
        """Crops or extends the mask to other lengths; query 0 and key 0 keep their positions.

        Returns:
          What `create_block_mask` would make for these lengths. A mask made from lists keeps them, and beyond them has
          its mask_mod.

        Raises:
          TypeError: A length is not an integer.
          ValueError: A length is negative, or the mask would be extended and has no mask_mod to define the extension.

        >>> block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512)
        >>> block_mask.with_lengths(300, 1024).shape
        (1, 1, 300, 1024)
        """
        seq_lengths = (checked_size(q_len, "q_len"), checked_size(kv_len, "kv_len"))
        if seq_lengths == self.seq_lengths:
            return self
        if self.mask_mod is not None and self.lists_follow_mod:
            return self._remade(self.mask_mod, seq_lengths)
        if seq_lengths[0] <= self.seq_lengths[0] and seq_lengths[1] <= self.seq_lengths[1]:
            return _assemble(algebra.crop(self._matrix(), seq_lengths))
        if self.mask_mod is None:
            raise ValueError(
                f"`BlockMask.with_lengths` cannot extend this mask from {self.seq_lengths} to {seq_lengths}: it has no "
                "mask_mod to define the extension. Make the longer one with `create_block_mask` or "
                "`BlockMask.from_kv_blocks`."
            )
        inside = algebra.element_mod(self._matrix())
        return self._remade(algebra.ExtendedMask(inside, self.mask_mod, self.seq_lengths), seq_lengths)

    def __and__(self, other: BlockMask) -> BlockMask:
        """Visible where both masks are; lengths and block sizes must be equal, batch and heads equal or 1."""
        if not isinstance(other, BlockMask):
            return algebra.no_mask(other, "&")
        return _assemble(algebra.intersect(self._matrix(), other._matrix()))

    def __or__(self, other: BlockMask) -> BlockMask:
        """Visible where either mask is; lengths and block sizes must be equal, batch and heads equal or 1."""
        if not isinstance(other, BlockMask):
            return algebra.no_mask(other, "|")
        return _assemble(algebra.unite(self._matrix(), other._matrix()))

    def __invert__(self) -> BlockMask:
        """Visible where the mask is not."""
        return _assemble(algebra.invert(self._matrix()))

    def __str__(self) -> str:
        return self.to_string()

    __repr__ = __str__

    def to_string(self, grid_size: int | tuple[int, int] | None = (20, 20), limit: int = 4) -> str:
        """Draws the blocks: ``██`` full, ``░░`` partial, two spaces empty.

        Args:
          grid_size: Maximum rows and columns; a cell is full or empty if all of its blocks are, else partial.
            None: a cell for every block.
          limit: Maximum number of (batch, head) pictures.

        Returns:
          A line with shape, block size and sparsity, then the picture. Traced lists give a line alone.
        """
        return drawing.draw(self.lists, self.seq_lengths, self.block_size, grid_size, limit)

    def to_image(self, batch: int = 0, head: int = 0, zoom: tuple[slice, slice] | None = None) -> drawing.Figure:
        """Draws the blocks, and the elements of a slice, with matplotlib.

        Args:
          zoom: Slices of queries and of keys whose elements are drawn beside the blocks.

        Returns:
          A ``matplotlib.figure.Figure``; ``figure.savefig("mask.png")`` writes it.

        Raises:
          ImportError: matplotlib is not installed.
          IndexError: There is no such batch or head.
          TypeError: The lists are traced.
        """
        chosen = self[batch, head]  # also checks the numbers
        return drawing.to_figure(chosen.lists, chosen.seq_lengths, chosen.block_size, zoom, chosen._elements)

    def _elements(self, q_idx: Int32[Array, " Q"], kv_idx: Int32[Array, " KV"]) -> Bool[Array, "B H Q KV"]:
        """The dense mask of these queries and keys, at positions within the lengths."""
        traced, indices = self.traced or trace_mask_mod(noop_mask)[0], (q_idx, kv_idx)
        return elements_at(traced, self.mask_operands, self.states(), indices, self.seq_lengths, self.block_size)

    def _matrix(self) -> BlockMatrix:
        source = None if self.traced is None else self.traced.source
        return BlockMatrix(
            self.states(), self.mask_mod, self.seq_lengths, self.block_size, self.lists_follow_mod, source
        )

    def _remade(self, mask_mod: MaskMod, seq_lengths: tuple[int, int]) -> BlockMask:
        """Evaluates a mask_mod for other lengths; messages keep the name of the user's function."""
        shape = (*self.kv_num_blocks.shape[:2], *seq_lengths)
        check_mask_shape(mod_requirements(mask_mod, None), shape, "a BlockMask")
        states = block_states(*trace_mask_mod(mask_mod), shape, self.block_size)
        source = None if self.traced is None else self.traced.source
        matrix = BlockMatrix(states, mask_mod, seq_lengths, self.block_size, lists_follow_mod=True, source=source)
        return _assemble(matrix)


@answers_keywords
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    *,
    block_size: BlockSize = 128,
    max_blocks: int | None = None,
) -> BlockMask:
    """Makes the BlockMask of a mask_mod: exact, inside or outside ``jit``, without a dense mask in memory.

    Interval arithmetic on the program of the mask_mod decides most blocks of causal masks, windows, documents, prefixes
    and padding, and of what ``&``, ``|`` and ``~`` make of them. Of the others elements are evaluated, a bounded number
    at a time. A mask_mod that computes with floats, or reads a dense mask, has every element evaluated. A mask_mod with
    the same program and captured arrays of the same shapes is not compiled again, whatever the values of the arrays.

    Tables of up to 1024 blocks are as wide as the sequence. Beyond, they are as wide as the most crowded row, so that
    a causal mask of 1,048,576 tokens takes 1.2 MB. Blocks in sequence at the end of a row take one entry. Inside
    ``jit``, the values of a traced mask are unknown: tables get `max_blocks` entries, or 128. A row that needs more
    ends in a run of partial blocks, which covers all that it attends to from there on: nothing is dropped, but the run
    is evaluated element by element, also where it attends to nothing. Pass more `max_blocks` if that takes long.

    Args:
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, True where a query attends to a key; called on int32 scalars; ``h``
        is the query head. Arrays that it closes over, also tracers, become `BlockMask.mask_operands`.
      B: Batch size, or None for one mask that all batch entries share.
      H: Query heads, or None for one mask that all heads share.
      Q_LEN: Number of queries; may be 0.
      KV_LEN: Number of keys; may be 0.
      block_size: Of queries and keys, one number or a pair. Lengths need not be multiples of it.
      max_blocks: Entries of a row of each index table, so that its shape does not follow from values. None: see above.

    Returns:
      The mask. A block is full if all of it is visible and it lies wholly within the lengths.

    Raises:
      TypeError: `mask_mod` is not a mask_mod, or a size is not an integer.
      ValueError: A size is negative; `mask_mod` branches in Python on its arguments; or it uses ``b`` while `B` is
        None, or ``h`` while `H` is None; or a mask was made for other sizes; or `max_blocks` is zero, or less
        than a row needs whose values are known.

    >>> documents = jnp.array([0] * 200 + [1] * 312)
    >>> def same_document(b, h, q_idx, kv_idx):
    ...     return documents[q_idx] == documents[kv_idx]
    >>> print(create_block_mask(same_document, None, None, 512, 512))
    BlockMask(shape=(1, 1, 512, 512), block_size=(128, 128), sparsity=25.00%)
    batch 0, head 0
    ██░░    |
    ░░░░░░░░|
      ░░████|
      ░░████|
    """
    shape = checked_shape(B, H, Q_LEN, KV_LEN)
    block_size = checked_block_size(block_size)
    max_blocks = None if max_blocks is None else checked_positive(max_blocks, "max_blocks")
    traced, operands = trace_mask_mod(mask_mod)
    for size, argument, index in ((B, "B", "b"), (H, "H", "h")):
        if size is None and uses_index(traced, index):
            raise ValueError(
                f"`{argument}` is None, which makes one mask for all, but the mask_mod {traced.source} uses `{index}`. "
                f"Pass `{argument}=` the number of {'batch entries' if index == 'b' else 'query heads'}."
            )
    check_mask_shape(mod_requirements(mask_mod, traced), shape, "a BlockMask")
    # Tables whose widths follow from values are made while tracing if they can be: then the values are known.
    known = is_compact(shape[2:], block_size, max_blocks) and not any(isinstance(x, Tracer) for x in operands)
    with as_known(known):
        states = (known_block_states if known else block_states)(traced, operands, shape, block_size)
        lists = block_lists(states, follow_mod=True, max_blocks=max_blocks)
    lists = without_mesh(lists) if known else lists
    traced, operands = with_limits((traced, operands), shape, lists)
    return BlockMask(*lists, operands, traced, shape[2:], block_size, lists_follow_mod=True)


def _assemble(mask: BlockMatrix) -> BlockMask:
    """Makes a BlockMask from a matrix of states, in which blocks past a length may be full."""
    traced, operands = (None, ()) if mask.mask_mod is None else trace_mask_mod(mask.mask_mod)
    shape = (*mask.states.shape[:2], *mask.seq_lengths)
    check_mask_shape(mod_requirements(mask.mask_mod, traced), shape, "a BlockMask")
    if traced is not None and mask.source is not None:
        traced = dataclasses.replace(traced, source=mask.source)
    states = demote_tails(mask.states, mask.seq_lengths, mask.block_size)
    lists = block_lists(states, follow_mod=mask.lists_follow_mod)
    return BlockMask(*lists, operands, traced, mask.seq_lengths, mask.block_size, mask.lists_follow_mod)
