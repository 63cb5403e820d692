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

from jflex._call.kv_lengths import bounded_inputs, with_lengths_as_mask
from jflex.backends.base import Inputs
from jflex.backends.xla.narrow import read
from jflex.block_mask.lists import FULL, PARTIAL, BlockLists, block_count, demote_tails, lists_from_states
from pallas_kernels.spec import AttentionSpec, Mod

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
    """A block of keys: its number, and a True that XLA cannot fold (see `jflex.backends.xla.narrow.read`)."""

    number: jax.Array
    exists: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """The blocks of one spec, and the units that visit them.

    Attributes:
      spec: The spec; `kv_lengths` are part of its mask and lists.
      lists: Lists of the BlockMask, or of all blocks.
      mask_operands: The arrays that the mask captures.
      size: Queries and keys in a block.
      axes: Axes of a block of scores.
      kv_lengths: How many keys each batch entry has, or None.
    """

    spec: AttentionSpec
    lists: BlockLists
    mask_operands: tuple[jax.Array, ...]
    size: tuple[int, int]
    axes: str
    kv_lengths: jax.Array | None

    @classmethod
    def of(cls, spec: AttentionSpec, inputs: Inputs, axes: str) -> Walk:
        """Takes the lists of the BlockMask, or makes lists of all blocks."""
        size, kv_lengths = _dense_size(spec), inputs.kv_lengths
        if spec.kv_lengths:
            spec, inputs = with_lengths_as_mask(spec, size), bounded_inputs(spec, inputs, size)
        lists = inputs.lists
        if spec.blocks is not None and lists is not None:
            size = min(spec.blocks.size[0], spec.T), spec.blocks.size[1]  # no more queries than there are
            return cls(spec, lists, inputs.mask_operands, size, axes, kv_lengths)
        lengths = (spec.T, spec.S)
        state = FULL if spec.mask_mod is None else PARTIAL
        matrix = tuple(block_count(n, block) for n, block in zip(lengths, size, strict=True))
        states = jnp.full((1, 1, *matrix), state, jnp.int8)
        lists = lists_from_states(demote_tails(states, lengths, size))
        return cls(spec, lists, inputs.mask_operands, size, axes, None)

    @property
    def list_batch(self) -> int:
        """Batch size of the lists."""
        return self.lists.kv_num_blocks.shape[0]

    @property
    def list_heads(self) -> int:
        """Heads of the lists."""
        return self.lists.kv_num_blocks.shape[1]

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return self.lists.kv_num_blocks.shape[2]

    @property
    def together(self) -> tuple[int, int, int]:
        """Batch entries, key heads and query heads of a key head that one unit computes."""
        p = self.spec
        key_heads, group = (p.Hkv, p.group) if self.list_heads == 1 else (1, 1)
        return p.B if self.list_batch == 1 else 1, key_heads, group

    @property
    def units(self) -> int:
        """Number of units."""
        return self.list_batch * self.list_heads * self.rows

    def unit(self, number: jax.Array) -> Unit:
        """The unit with this number."""
        row, rest = number % self.rows, number // self.rows
        head, batch = rest % self.list_heads, rest // self.list_heads
        group = self.spec.group
        zero = jnp.zeros_like(row)
        heads = (zero, zero) if self.list_heads == 1 else (head // group, head % group)
        return Unit((batch, *heads), row, (batch, head))

    def indices(self, unit: Unit, column: jax.Array) -> tuple[jax.Array, ...]:
        """b, h, q_idx and kv_idx of a block, shaped to broadcast over [batch, key head, group, queries, keys]."""
        batch, key_heads, group = self.together
        b = unit.start[0] + jnp.arange(batch, dtype=jnp.int32)
        key_head = unit.start[1] + jnp.arange(key_heads, dtype=jnp.int32)
        member = unit.start[2] + jnp.arange(group, dtype=jnp.int32)
        h = key_head[:, None] * self.spec.group + member[None, :]
        q_idx = unit.row * self.size[0] + jnp.arange(self.size[0], dtype=jnp.int32)
        kv_idx = column * self.size[1] + jnp.arange(self.size[1], dtype=jnp.int32)
        return b, h, jnp.minimum(q_idx, self.spec.T - 1), jnp.minimum(kv_idx, self.spec.S - 1)

    def visible(self, unit: Unit, column: jax.Array) -> jax.Array:
        """Which elements of a partial block are visible, in a shape that broadcasts to a block of scores."""
        q_idx = unit.row * self.size[0] + jnp.arange(self.size[0], dtype=jnp.int32)
        kv_idx = column * self.size[1] + jnp.arange(self.size[1], dtype=jnp.int32)
        along = lambda x, axis: jnp.expand_dims(x, tuple(n for n, a in enumerate(self.axes) if a != axis))
        inside = along(q_idx < self.spec.T, "q") & along(kv_idx < self.spec.S, "s")
        if self.spec.mask_mod is None:
            return inside
        mask = functools.partial(self.spec.mask_mod, self.mask_operands)
        return inside & over_block(mask, (), self.indices(unit, column), self.axes)

    def queries(self, x: jax.Array, unit: Unit) -> jax.Array:
        """The rows of one unit in an array [B, Hkv, group, T, ...]."""
        start = (*unit.start, unit.row * self.size[0], *[jnp.zeros_like(unit.row)] * (x.ndim - 4))
        part = lambda: lax.dynamic_slice(x, start, (*self.together, self.size[0], *x.shape[4:]))
        return read(part, unit.row < self.rows, self.spec.platform)

    def keys(self, x: jax.Array, unit: Unit, column: Column, *, is_partial: bool) -> jax.Array:
        """A block of key or value as [B, Hkv, S, ...]; zeros past the end and, in a partial block, past the lengths.

        It is sliced from the unpadded array, so that blocks that no query visits cost nothing.
        """
        p, size = self.spec, min(self.size[1], self.spec.S)
        batch, heads, _ = self.together
        first = column.number * self.size[1]
        start = jnp.minimum(first, p.S - size)
        at = (unit.start[0] if p.Bkv > 1 else jnp.zeros_like(first), unit.start[1], start, jnp.zeros_like(first))
        shape = (batch if p.Bkv > 1 else 1, heads, size, x.shape[3])
        turn = lambda t: t if p.layout == "BNTH" else (t[0], t[2], t[1], t[3])
        block = read(lambda: lax.dynamic_slice(x, turn(at), turn(shape)), column.exists, p.platform)
        block = block if p.layout == "BNTH" else block.swapaxes(1, 2)
        if p.S % self.size[1]:  # the slice of the last block begins too early: shift it
            block = jnp.pad(block, ((0, 0), (0, 0), (0, self.size[1]), (0, 0)))
            zero = jnp.zeros_like(first)
            block = lax.dynamic_slice(block, (zero, zero, first - start, zero), (*shape[:2], self.size[1], shape[3]))
        block = jnp.broadcast_to(block, (batch, *block.shape[1:]))
        return self._cleared(block, unit, first) if is_partial and self.kv_lengths is not None else block

    def _cleared(self, block: jax.Array, unit: Unit, first: jax.Array) -> jax.Array:
        """Zeros keys beyond the lengths: NaN there would survive a weight of 0."""
        assert self.kv_lengths is not None
        lengths = lax.dynamic_slice(self.kv_lengths, (unit.start[0],), (block.shape[0],))[:, None, None, None]
        kv_idx = first + lax.broadcasted_iota(jnp.int32, block.shape, 2)
        return jnp.where(kv_idx < jnp.broadcast_to(lengths, block.shape), block, jnp.zeros_like(block))

    def add_keys(self, x: jax.Array, block: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
        """Adds to a block in an array [B, Hkv, S padded to blocks, ...], in place under jit."""
        at = (unit.start[0], unit.start[1], column * self.size[1], jnp.zeros_like(column))
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, at, block.shape) + block, at)

    def over_columns(self, unit: Unit, carry: S, step: Callable[[S, Column, bool], S]) -> S:
        """Folds ``step(carry, column, is_partial)`` over the blocks that the unit visits."""
        from pallas_kernels.block_walk import block_at

        lists, last = self.lists, block_count(self.spec.S, self.size[1]) - 1
        at = (*unit.lists, unit.row)
        for counts, indices, is_partial in (
            (lists.kv_num_blocks, lists.kv_indices, True),
            (lists.full_kv_num_blocks, lists.full_kv_indices, False),
        ):
            here = lax.dynamic_slice(indices, (*at, jnp.zeros_like(unit.row)), (1, 1, 1, indices.shape[3]))[0, 0, 0]
            count = lax.dynamic_slice(counts, at, (1, 1, 1))[0, 0, 0]
            at_i = lambda i, here=here: jnp.clip(block_at(here, (), i, last + 1), 0, last)
            columns = lambda i, at_i=at_i, count=count: Column(at_i(i), i < count)
            body = lambda i, c, columns=columns, is_partial=is_partial: step(c, columns(i), is_partial)
            carry = lax.fori_loop(jnp.int32(0), count, body, carry)
        return carry

    def assemble(self, x: jax.Array) -> jax.Array:
        """Joins the results of units [units, batch, key head, group, queries, ...] to [B, Hkv, group, T, ...]."""
        p, rest = self.spec, x.shape[5:]
        heads = (1, 1) if self.list_heads == 1 else (p.Hkv, p.group)
        x = x.reshape(self.list_batch, *heads, self.rows, *self.together, self.size[0], *rest)
        order = (0, 4, 1, 5, 2, 6, 3, 7, *range(8, x.ndim))
        return x.transpose(order).reshape(p.B, p.Hkv, p.group, self.rows * self.size[0], *rest)[:, :, :, : p.T]


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


def evaluate(
    mod: Mod, operands: Sequence[jax.Array], score: jax.Array, indices: Sequence[jax.Array], axes: str
) -> jax.Array:
    """A score mod on a block of scores."""
    return over_block(lambda s, *scalars: mod(operands, s, *scalars), (score,), indices, axes)
