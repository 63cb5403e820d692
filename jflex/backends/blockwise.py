"""Walking the blocks of a mask one at a time, as the `xla` backend does.

A *unit* is one row of blocks of the lists: a block of queries for one entry of the lists' batch and heads. What the lists
share (batch size 1, or one head for all) is computed together in one unit; what they do not is walked unit by unit, so
that exactly the listed blocks are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jflex.backends.base import Inputs
from jflex.block_lists import FULL, PARTIAL, BlockLists, block_count, demote_tails, lists_from_kinds
from jflex.problem import Problem
from jflex.trace import TracedMod

# Tiles where no mask says otherwise. Measured on 2 cores, float32, S 2048, H 4, D 64 (benchmarks/cpu.py): 256 x 1024 runs
# forward and backward as fast as larger ones, and holds less.
_DENSE_TILE = (256, 1024)


class Unit(NamedTuple):
    """One row of blocks: where it starts in batch, key heads, group and rows, and which lists are its own."""

    start: tuple[Any, Any, Any]
    row: Any
    lists: tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Walk:
    """The blocks of one problem, and in which pieces they are visited.

    Attributes:
      problem: The problem.
      lists: Of the BlockMask, or of a dense mask.
      size: Queries and keys in a block.
    """

    problem: Problem
    lists: BlockLists
    size: tuple[int, int]

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs) -> Walk:
        """Takes the lists of the mask, or makes those of a dense one."""
        if inputs.lists is not None:
            return cls(problem, inputs.lists, problem.blocks.size)
        tiles = problem.config.forward
        size = _DENSE_TILE if tiles is None else (tiles.block_q, tiles.block_kv)
        size = min(size[0], problem.T), min(size[1], problem.S)
        lengths = (problem.T, problem.S)
        kind = FULL if problem.mask is None else PARTIAL
        kinds = jnp.full((1, 1, *(block_count(n, block) for n, block in zip(lengths, size, strict=True))), kind, jnp.int8)
        return cls(problem, lists_from_kinds(demote_tails(kinds, lengths, size)), size)

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
        p = self.problem
        return p.B if self.list_batch == 1 else 1, *((p.Hkv, p.group) if self.list_heads == 1 else (1, 1))

    @property
    def units(self) -> int:
        """How many there are."""
        return self.list_batch * self.list_heads * self.rows

    def unit(self, number: jax.Array) -> Unit:
        """The unit of this number."""
        row, rest = number % self.rows, number // self.rows
        head, batch = rest % self.list_heads, rest // self.list_heads
        group = self.problem.group
        zero = jnp.zeros_like(row)
        heads = (zero, zero) if self.list_heads == 1 else (head // group, head % group)
        return Unit((batch, *heads), row, (batch, head))

    def indices(self, unit: Unit, column: jax.Array) -> tuple[jax.Array, ...]:
        """b, h, q_idx and kv_idx of a block, shaped to broadcast over [batch, key head, group, queries, keys]."""
        batch, key_heads, group = self.together
        b = unit.start[0] + jnp.arange(batch, dtype=jnp.int32)
        key_head = unit.start[1] + jnp.arange(key_heads, dtype=jnp.int32)
        member = unit.start[2] + jnp.arange(group, dtype=jnp.int32)
        h = key_head[:, None] * self.problem.group + member[None, :]
        q_idx = unit.row * self.size[0] + jnp.arange(self.size[0], dtype=jnp.int32)
        kv_idx = column * self.size[1] + jnp.arange(self.size[1], dtype=jnp.int32)
        return b, h, jnp.minimum(q_idx, self.problem.T - 1), jnp.minimum(kv_idx, self.problem.S - 1)

    def visible(self, unit: Unit, column: jax.Array, operands: Sequence[jax.Array]) -> jax.Array:
        """Which elements of a partial block count, [batch, key head, group, queries, keys] or broadcast to it."""
        q_idx = unit.row * self.size[0] + jnp.arange(self.size[0], dtype=jnp.int32)
        kv_idx = column * self.size[1] + jnp.arange(self.size[1], dtype=jnp.int32)
        inside = (q_idx < self.problem.T)[:, None] & (kv_idx < self.problem.S)[None, :]
        inside = inside[None, None, None]
        if self.problem.mask is None:
            return inside
        mask = self.problem.mask
        return inside & over_block(lambda *scalars: mask(operands, *scalars), (), self.indices(unit, column))

    def queries(self, x: jax.Array, unit: Unit) -> jax.Array:
        """The rows of one unit, of an array [B, Hkv, group, T, ...]."""
        start = (*unit.start, unit.row * self.size[0], *[jnp.zeros_like(unit.row)] * (x.ndim - 4))
        return lax.dynamic_slice(x, start, (*self.together, self.size[0], *x.shape[4:]))

    def keys(self, x: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
        """A block of an array [B, Hkv, S, ...]."""
        return lax.dynamic_slice(x, self._key_start(unit, column), (*self.together[:2], self.size[1], x.shape[3]))

    def add_keys(self, x: jax.Array, block: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
        """Adds to a block of an array [B, Hkv, S, ...], in place under jit."""
        return lax.dynamic_update_slice(x, self.keys(x, unit, column) + block, self._key_start(unit, column))

    def _key_start(self, unit: Unit, column: jax.Array) -> tuple[jax.Array, ...]:
        return (unit.start[0], unit.start[1], column * self.size[1], jnp.zeros_like(column))

    def over_columns(self, unit: Unit, carry: Any, step: Callable[[Any, jax.Array, bool], Any]) -> Any:
        """Folds ``step(carry, column, is_partial)`` over the blocks that the unit visits."""
        lists = self.lists
        at = (*unit.lists, unit.row)
        for counts, indices, is_partial in ((lists.kv_num_blocks, lists.kv_indices, True),
                                            (lists.full_kv_num_blocks, lists.full_kv_indices, False)):
            here = lax.dynamic_slice(indices, (*at, jnp.zeros_like(unit.row)), (1, 1, 1, indices.shape[3]))[0, 0, 0]
            count = lax.dynamic_slice(counts, at, (1, 1, 1))[0, 0, 0]
            last = block_count(self.problem.S, self.size[1]) - 1
            body = lambda i, c, here=here, is_partial=is_partial: step(c, jnp.clip(here[i], 0, last), is_partial)
            carry = lax.fori_loop(jnp.int32(0), count, body, carry)
        return carry

    def assemble(self, x: jax.Array) -> jax.Array:
        """Puts what the units gave, [units, batch, key head, group, queries, ...], together: [B, Hkv, group, T, ...]."""
        p, rest = self.problem, x.shape[5:]
        heads = (1, 1) if self.list_heads == 1 else (p.Hkv, p.group)
        x = x.reshape(self.list_batch, *heads, self.rows, *self.together, self.size[0], *rest)
        order = (0, 4, 1, 5, 2, 6, 3, 7, *range(8, x.ndim))
        return x.transpose(order).reshape(p.B, p.Hkv, p.group, self.rows * self.size[0], *rest)[:, :, :, : p.T]


def over_block(function: Callable[..., Any], blocks: Sequence[jax.Array], indices: Sequence[jax.Array]) -> Any:
    """Evaluates a function of scalars on blocks [batch, key head, group, queries, keys] and the indices of `Walk.indices`."""
    index_axes = ((0, None, None, None), (None, 0, None, None), (None, 0, None, None), (None, None, 0, None),
                  (None, None, None, 0))
    for axes in reversed(index_axes):
        function = jax.vmap(function, in_axes=(*(0 for _ in blocks), *axes))
    return function(*blocks, *indices)


def evaluate(mod: TracedMod, operands: Sequence[jax.Array], score: jax.Array, indices: Sequence[jax.Array]) -> jax.Array:
    """A score mod on a block of scores."""
    return over_block(lambda s, *scalars: mod(operands, s, *scalars), (score,), indices)
