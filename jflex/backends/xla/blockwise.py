"""The block walk of the `xla` backend.

A *unit* is one row of blocks of the lists: a block of queries for one batch entry and head of the lists. If the lists
share a batch (size 1) or a head among all, one unit computes all of these together; so exactly the listed blocks are
computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jflex.backends.base import Inputs
from jflex.backends.lengths import bounded_inputs, with_lengths_as_mask
from jflex.backends.xla.narrow import read
from jflex.block_mask.lists import BlockLists, block_count
from pallas_kernels.spec import AttentionSpec

# Tiles without a BlockMask: the smallest of the fast ones. Milliseconds of CPU time on 2 cores,
# float32, S 2048, H 4, D 64, forward and (in brackets) forward with backward: 128 x 1024 64 (171), 256 x 512
# 54 (160), 256 x 1024 55 (158), 256 x 2048 86 (265), 512 x 512 55 (150), 512 x 1024 50 (167), 1024 x 1024 69 (177).
_DENSE_TILE = (256, 512)


# The axes of a block of scores: batch, key head, group, queries and keys. XLA on a CPU copies a GEMM operand unless its
# contracted axes come last in the left operand, or first in the right one. The forward pass contracts P V over the
# keys; of the backward GEMMs with P or dS, two contract over the queries, and the one over the keys has dS on the
# right. So neither copies a block of scores. CPU time of the backward pass on 2 cores, float32, S 2048, H 4, D 64:
# 110 ms with the keys first, 190 ms with the queries first.
QUERIES_FIRST, KEYS_FIRST = "bkgqs", "bksgq"
INDEX_OF_AXIS = {"b": 0, "k": 1, "g": 1, "q": 2, "s": 3}  # which of b, h, q_idx, kv_idx varies along an axis


R = TypeVar("R")
S = TypeVar("S")


class Unit(NamedTuple):
    """One row of blocks: its start in batch, key heads and group, its row, and the index of its lists."""

    start: tuple[jax.Array, jax.Array, jax.Array]
    row: jax.Array
    lists: tuple[jax.Array, jax.Array]


class Column(NamedTuple):
    """A block of keys: its number, a True that XLA cannot fold (see `jflex.backends.xla.narrow.read`), and its kind.

    A partial block is one of which the mask hides something; a bool says it of all blocks.
    """

    number: jax.Array
    exists: jax.Array
    is_partial: jax.Array | bool


@dataclasses.dataclass(frozen=True)
class Walk:
    """The blocks of one spec, and the units that visit them."""

    spec: AttentionSpec
    lists: BlockLists | None  # lists of the BlockMask; None to visit all blocks
    mask_operands: tuple[jax.Array, ...]
    size: tuple[int, int]  # queries and keys in a block
    order: str
    kv_lengths: jax.Array | None  # how many keys each batch entry has, or None

    @classmethod
    def from_inputs(cls, spec: AttentionSpec, inputs: Inputs, order: str) -> Walk:
        """Takes the lists of the BlockMask, if there is one."""
        size, kv_lengths = _dense_size(spec), inputs.kv_lengths
        if spec.kv_lengths:
            spec, inputs = with_lengths_as_mask(spec, size), bounded_inputs(spec, inputs, size)
        lists = inputs.lists
        if spec.blocks is not None and lists is not None:
            size = min(spec.blocks.size[0], spec.T), spec.blocks.size[1]  # no more queries than there are
            return cls(spec, lists, inputs.captured.mask, size, order, kv_lengths)
        return cls(spec, None, inputs.captured.mask, size, order, None)

    @property
    def list_batch(self) -> int:
        """Batch size of the lists."""
        return 1 if self.lists is None else self.lists.kv_num_blocks.shape[0]

    @property
    def list_heads(self) -> int:
        """Heads of the lists."""
        return 1 if self.lists is None else self.lists.kv_num_blocks.shape[1]

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return block_count(self.spec.T, self.size[0])

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return block_count(self.spec.S, self.size[1])

    @property
    def together(self) -> tuple[int, int, int]:
        """Batch entries, key heads and query heads of a key head that one unit computes."""
        p = self.spec
        key_heads, group = (p.Hkv, p.group) if self.list_heads == 1 else (1, 1)
        return p.B if self.list_batch == 1 else 1, key_heads, group

    @property
    def axes(self) -> str:
        """Axes of a block of scores."""
        return self.named(self.order)

    def named(self, axes: str) -> str:
        """Leaves out axes of size 1: XLA on a CPU copies blocks that have one."""
        absent = [axis for axis, size in zip("bkg", self.together, strict=True) if size == 1]
        return "".join(axis for axis in axes if axis not in absent)

    @property
    def is_partial(self) -> bool | None:
        """`Column.is_partial` of all blocks, if they are alike without running; None otherwise."""
        if self.lists is not None:
            return None
        if self.spec.mask_mod is not None:
            return True
        return None if self.spec.T % self.size[0] or self.spec.S % self.size[1] else False

    def over_units(self, carry: S, step: Callable[[S, Unit], S]) -> S:
        """Folds ``step(carry, unit)`` over all units."""
        units = self.list_batch * self.list_heads * self.rows
        return lax.fori_loop(jnp.int32(0), jnp.int32(units), lambda n, carry: step(carry, self._unit(n)), carry)

    def _unit(self, number: jax.Array) -> Unit:
        # lax.div and lax.rem: `//` and `%` would repair the sign of a number that has none.
        zero, row, column = jnp.zeros_like(number), number, jnp.zeros_like(number)
        rows, heads, group = (jnp.int32(size) for size in (self.rows, self.list_heads, self.spec.group))
        if self.list_batch * self.list_heads > 1:
            row, column = lax.rem(number, rows), lax.div(number, rows)
        if self.list_heads == 1:
            return Unit((column, zero, zero), row, (column, zero))
        batch, head = lax.div(column, heads), lax.rem(column, heads)
        return Unit((batch, lax.div(head, group), lax.rem(head, group)), row, (batch, head))

    def over_columns(self, unit: Unit, carry: S, step: Callable[[S, Column], S]) -> S:
        """Folds ``step(carry, column)`` over the blocks that the unit visits, in lists partial ones first.

        On a CPU in one loop, which compiles in 0.6 of the time of a loop for each kind of block. On a GPU, where a
        branch waits for the host, in two: 4.6 ms in place of 7.1 (causal, T 2048, 8 heads of 64, float32, H200).
        """
        if self.lists is None:
            count, column = self._all_columns(unit)
            return lax.fori_loop(jnp.int32(0), count, lambda i, carry: step(carry, column(i)), carry)
        partial, count, column = self._listed_columns(unit, self.lists)
        if self.spec.platform == "cpu":
            return lax.fori_loop(jnp.int32(0), count, lambda i, carry: step(carry, column(i)), carry)
        of_kind = lambda is_partial: lambda i, carry: step(carry, column(i)._replace(is_partial=is_partial))
        carry = lax.fori_loop(jnp.int32(0), partial, of_kind(True), carry)
        return lax.fori_loop(partial, count, of_kind(False), carry)

    def _all_columns(self, unit: Unit) -> tuple[jax.Array, Callable[[jax.Array], Column]]:
        count, last = jnp.int32(self.columns), jnp.int32(self.columns - 1)
        is_tail = unit.row == self.rows - 1 if self.spec.T % self.size[0] else jnp.zeros_like(unit.row, bool)

        def column(i: jax.Array) -> Column:
            if self.is_partial is not None:
                return Column(i, i < count, self.is_partial)
            return Column(i, i < count, is_tail | (i == last) if self.spec.S % self.size[1] else is_tail)

        return count, column

    def _listed_columns(
        self, unit: Unit, lists: BlockLists
    ) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], Column]]:
        """The numbers of partial blocks and of all blocks, and the blocks."""

        def entry(x: jax.Array, *i: jax.Array) -> jax.Array:  # clamped to the table
            at = (*unit.lists, unit.row, *i)
            return lax.dynamic_slice(x, at, (1,) * x.ndim, allow_negative_indices=False).reshape(())

        def block(indices: jax.Array, i: jax.Array) -> jax.Array:  # as `pallas_kernels.block_walk.block_at`
            return entry(indices, i) + jnp.maximum(i - (indices.shape[-1] - 1), 0)

        partial = entry(lists.kv_num_blocks)
        count = partial + entry(lists.full_kv_num_blocks)

        def column(i: jax.Array) -> Column:
            is_partial = i < partial
            number = jnp.where(is_partial, block(lists.kv_indices, i), block(lists.full_kv_indices, i - partial))
            return Column(jnp.clip(number, 0, self.columns - 1), i < count, is_partial)

        return partial, count, column

    def indices(self, unit: Unit, column: jax.Array) -> tuple[jax.Array, ...]:
        """b, h, q_idx and kv_idx of a block, each an array over the axes along which it varies."""
        p = self.spec
        sizes = dict(zip("bkg", self.together, strict=True))
        along = lambda start, axis: start + jnp.arange(sizes[axis], dtype=jnp.int32) if sizes[axis] > 1 else start
        b, key_head, member = (along(*pair) for pair in zip(unit.start, "bkg", strict=True))
        if sizes["k"] > 1 and sizes["g"] > 1:
            key_head, member = key_head[:, None], member[None]
        inside = lambda x, length, size: jnp.minimum(x, length - 1) if length % size else x
        q_idx, kv_idx = self._positions(unit, column)
        return b, key_head * p.group + member, inside(q_idx, p.T, self.size[0]), inside(kv_idx, p.S, self.size[1])

    def _positions(self, unit: Unit, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        starts = zip((unit.row, column), self.size, strict=True)
        q_idx, kv_idx = (number * size + jnp.arange(size, dtype=jnp.int32) for number, size in starts)
        return q_idx, kv_idx

    def visible(self, unit: Unit, column: jax.Array) -> jax.Array:
        """Visible elements of a partial block, in a shape that broadcasts to a block of scores."""
        (q_idx, kv_idx), p = self._positions(unit, column), self.spec
        along = lambda x, axes: jnp.expand_dims(x, tuple(n for n, axis in enumerate(self.axes) if axis not in axes))
        seen = jnp.ones((1,) * len(self.axes), bool)
        if p.mask_mod is not None:
            mask = functools.partial(p.mask_mod, self.mask_operands)
            seen = over_block(mask, (), self.indices(unit, column), self.axes)
        seen = seen & along(q_idx < p.T, "q") if p.T % self.size[0] else seen
        return seen & along(kv_idx < p.S, "s") if p.S % self.size[1] else seen

    def visible_if_partial(self, unit: Unit, column: Column) -> Callable[[], jax.Array] | None:
        """Evaluates `visible`, true in a full block; None if all blocks are full."""
        if column.is_partial is False:
            return None
        return lambda: self.visible(unit, column.number) | ~jnp.asarray(column.is_partial)

    def masked(self, unit: Unit, column: Column, function: Callable[[jax.Array | None], S]) -> S:
        """``function(visible)`` of a block, with None if all of it is visible.

        In one loop over all blocks it is a branch: what it computes takes no pass more in either.
        """
        partial = lambda: function(self.visible(unit, column.number))
        if isinstance(column.is_partial, bool):
            return partial() if column.is_partial else function(None)
        return lax.cond(column.is_partial, partial, lambda: function(None))

    def padded(self, x: jax.Array, layout: str) -> jax.Array:
        """An array with an axis of queries, [B, T, Hq, ...] or [B, Hq, T, ...], with zeros up to whole blocks."""
        pads = [(0, 0)] * x.ndim
        pads[1 if layout == "BTNH" else 2] = (0, self.rows * self.size[0] - self.spec.T)
        return jnp.pad(x, pads)

    def cropped(self, x: jax.Array, layout: str) -> jax.Array:
        """The reverse of `padded`."""
        return lax.slice_in_dim(x, 0, self.spec.T, axis=1 if layout == "BTNH" else 2)

    def queries(self, x: jax.Array, unit: Unit, layout: str) -> jax.Array:
        """The rows of one unit in a padded array, with the axes "bkgq" that blocks have, and others."""
        at, shape = self._part(x, unit, layout)
        part = lambda: lax.dynamic_slice(x, at, shape, allow_negative_indices=False)
        block = read(part, unit.row < self.rows, self.spec.platform)
        block = block if layout == "BNTH" else block.swapaxes(1, 2)
        return block.reshape(*(size for size in self.together if size > 1), *block.shape[2:])

    def set_queries(self, x: jax.Array, block: jax.Array, unit: Unit, layout: str) -> jax.Array:
        """Writes the rows of one unit, in place under jit."""
        at, shape = self._part(x, unit, layout)
        rows = shape if layout == "BNTH" else (shape[0], shape[2], shape[1], *shape[3:])
        block = block.reshape(rows)
        block = block if layout == "BNTH" else block.swapaxes(1, 2)
        return lax.dynamic_update_slice(x, block.astype(x.dtype), at, allow_negative_indices=False)

    def _part(self, x: jax.Array, unit: Unit, layout: str) -> tuple[tuple[jax.Array, ...], tuple[int, ...]]:
        batch, key_heads, group = self.together
        b, head, time = unit.start[0], unit.start[1] * self.spec.group + unit.start[2], unit.row * self.size[0]
        at, shape = (b, head, time), (batch, key_heads * group, self.size[0])
        if layout == "BTNH":
            at, shape = (b, time, head), (batch, self.size[0], key_heads * group)
        return (*at, *[jnp.zeros_like(unit.row)] * (x.ndim - 3)), (*shape, *x.shape[3:])

    def keys(self, x: jax.Array, unit: Unit, column: Column) -> jax.Array:
        """A block of key or value, "bksd" as blocks have it; zeros past the end and past the lengths.

        It is sliced from the unpadded array, so that blocks that no query visits cost nothing.
        """
        p, size = self.spec, min(self.size[1], self.spec.S)
        batch, heads, _ = self.together
        first = column.number * self.size[1]
        start = jnp.minimum(first, p.S - size) if p.S % self.size[1] else first
        zero = jnp.zeros_like(first)
        at = (unit.start[0] if p.Bkv > 1 else zero, unit.start[1], start, zero)
        shape = (batch if p.Bkv > 1 else 1, heads, size, x.shape[3])
        part = lambda: lax.dynamic_slice(x, self._turned(at), self._turned(shape), allow_negative_indices=False)
        block = read(part, column.exists, p.platform)
        block = block if p.layout == "BNTH" else block.swapaxes(1, 2)
        if p.S % self.size[1]:  # the slice of the last block begins too early: shift it
            block = jnp.pad(block, ((0, 0), (0, 0), (0, self.size[1]), (0, 0)))
            block = lax.dynamic_slice(block, (zero, zero, first - start, zero), (*shape[:2], self.size[1], shape[3]))
        block = jnp.broadcast_to(block, (batch, *block.shape[1:]))
        block = self._cleared(block, unit, first) if self.kv_lengths is not None else block
        return block.reshape(*(size for size in block.shape[:2] if size > 1), *block.shape[2:])

    def _turned(self, sizes: tuple[R, R, R, R]) -> tuple[R, R, R, R]:
        """Sizes or starts of axes [B, Hkv, S, D] in the layout of the call."""
        return sizes if self.spec.layout == "BNTH" else (sizes[0], sizes[2], sizes[1], sizes[3])

    def _cleared(self, block: jax.Array, unit: Unit, first: jax.Array) -> jax.Array:
        """Zeros keys beyond the lengths: NaN there would survive a weight of 0."""
        assert self.kv_lengths is not None
        lengths = lax.dynamic_slice(self.kv_lengths, (unit.start[0],), (block.shape[0],))[:, None, None, None]
        kv_idx = first + lax.broadcasted_iota(jnp.int32, block.shape, 2)
        return jnp.where(kv_idx < jnp.broadcast_to(lengths, block.shape), block, jnp.zeros_like(block))

    def zero_keys(self, size: int, dtype: DTypeLike) -> jax.Array:
        """Zeros for gradients of key or value, padded to whole blocks, for each batch entry."""
        p = self.spec
        return jnp.zeros(self._turned((p.B, p.Hkv, self.columns * self.size[1], size)), dtype)

    def add_keys(self, x: jax.Array, block: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
        """Adds a block "bksd" to a part of `zero_keys`, in place under jit."""
        at = self._turned((unit.start[0], unit.start[1], column * self.size[1], jnp.zeros_like(column)))
        block = block.reshape(*self.together[:2], *block.shape[-2:])
        block = block if self.spec.layout == "BNTH" else block.swapaxes(1, 2)
        before = lax.dynamic_slice(x, at, block.shape, allow_negative_indices=False)
        return lax.dynamic_update_slice(x, before + block, at, allow_negative_indices=False)

    def joined_keys(self, x: jax.Array) -> jax.Array:
        """Without padding, and summed over a shared batch."""
        p = self.spec
        x = lax.slice_in_dim(x, 0, p.S, axis=1 if p.layout == "BTNH" else 2)
        return x.sum(axis=0, keepdims=True) if p.Bkv < p.B else x


def _dense_size(spec: AttentionSpec) -> tuple[int, int]:
    """Queries and keys in a block without a BlockMask."""
    tiles = spec.config.forward
    size = _DENSE_TILE if tiles is None else (tiles.block_q, tiles.block_kv)
    if spec.config.batch_invariant:  # the longest entry of the batch may have chosen S
        return min(size[0], spec.T), size[1]
    return min(size[0], spec.T), min(size[1], spec.S)


def over_block(function: Callable[..., R], blocks: Sequence[jax.Array], indices: Sequence[jax.Array], axes: str) -> R:
    """Evaluates a function of scalars on blocks with these axes and the indices of `Walk.indices`."""
    for axis in reversed(axes):
        in_axes = (0 if number == INDEX_OF_AXIS[axis] else None for number in range(4))
        function = jax.vmap(function, in_axes=(*(0 for _ in blocks), *in_axes))
    return function(*blocks, *indices)
