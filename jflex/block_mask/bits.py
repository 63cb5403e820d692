"""Rows of booleans as bits: how many are set, which is the nth, where the last ones are; without a sort.

A row of n booleans takes n / 8 bytes, where a sort of their indices takes 4 n bytes and a compare of each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from jflex._mesh import vary, varying_axes

_BITS = 32


def pack(listed: Bool[Array, "N C"]) -> UInt32[Array, "N W"]:
    """Packs rows of booleans into words: column ``32 i + j`` becomes bit j of word i.

    >>> pack(jnp.array([[False, True, True, False, True]])).tolist()
    [[22]]
    """
    rows, columns = listed.shape
    words = max(1, -(-columns // _BITS))
    padded = jnp.pad(listed, ((0, 0), (0, words * _BITS - columns))).reshape(rows, words, _BITS)
    values = jnp.left_shift(jnp.uint32(1), jnp.arange(_BITS, dtype=jnp.uint32))
    return jnp.sum(jnp.where(padded, values[None, None], jnp.uint32(0)), axis=2, dtype=jnp.uint32)


def transpose(words: UInt32[Array, "B N W"], columns: int) -> UInt32[Array, "B {columns} V"]:
    """The bits of the transposed matrices, by swaps of halves of 32 x 32 bits (Warren, Hacker's Delight, section 7-3).

    >>> transpose(pack(jnp.array([[False, True], [True, True]]))[None], 2).tolist()
    [[[2], [3]]]
    """
    batch, rows, width = words.shape
    groups = max(1, -(-rows // _BITS))
    x = jnp.pad(words, ((0, 0), (0, groups * _BITS - rows), (0, 0)))
    for half in (16, 8, 4, 2, 1):
        x = x.reshape(batch * groups, _BITS // (2 * half), 2, half, width)
        low, high, by = x[:, :, 0], x[:, :, 1], jnp.uint32(half)
        mask = jnp.uint32(0xFFFFFFFF // ((1 << half) + 1))  # the low half of each 2 * half bits
        swapped = (jnp.right_shift(low, by) ^ high) & mask
        x = jnp.stack([low ^ jnp.left_shift(swapped, by), high ^ swapped], axis=2)
    x = x.reshape(batch, groups, _BITS, width).transpose(0, 3, 2, 1)
    return x.reshape(batch, width * _BITS, groups)[:, :columns]


def nth_of_word(word: UInt32[Array, "*K"], n: Int32[Array, "*K"]) -> Int32[Array, "*K"]:
    """The position of the nth set bit (from 0) of a word; 31 if it has fewer.

    >>> nth_of_word(jnp.uint32([22, 22]), jnp.int32([0, 2])).tolist()
    [1, 4]
    """
    position = jnp.zeros_like(n)
    for width in (16, 8, 4, 2, 1):
        part = jnp.right_shift(word, position.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        below = lax.population_count(part).astype(jnp.int32)
        position, n = jnp.where(n >= below, position + width, position), jnp.where(n >= below, n - below, n)
    return position


def last_where(
    holds: Callable[[Int32[Array, "*K"]], Bool[Array, "*K"]], last: int, like: Int32[Array, "*K"]
) -> Int32[Array, "*K"]:
    """The last number up to `last` for which something holds that holds from 0 on; a number for each of `like`.

    >>> last_where(lambda x: x * x <= jnp.int32([9, 30]), 100, jnp.zeros(2, jnp.int32)).tolist()
    [3, 5]
    """

    def search(i: jax.Array, reached: jax.Array) -> jax.Array:
        further = jnp.minimum(reached + jnp.right_shift(jnp.int32(1 << last.bit_length()), i + 1), last)
        return jnp.where(holds(further), further, reached)

    # A loop: unrolled, such a search in a table takes XLA seconds to compile.
    return lax.fori_loop(jnp.int32(0), last.bit_length(), search, vary(jnp.zeros_like(like), varying_axes(holds(like))))


class BitRows(NamedTuple):
    """Rows of bits, with counts.

    >>> rows = BitRows.from_words(pack(jnp.array([[False, True, True, False, True]])))
    >>> rows.counts.tolist(), rows.first(2).tolist(), rows.last().tolist(), rows.run().tolist()
    ([3], [[1, 2]], [4], [1])
    """

    words: UInt32[Array, "N W"]  # packed bits, as `pack` returns them
    before: Int32[Array, "N W"]  # how many are set in the words before each one
    counts: Int32[Array, " N"]  # how many are set in each row

    @classmethod
    def from_words(cls, words: UInt32[Array, "N W"]) -> BitRows:
        """Counts the bits."""
        each = lax.population_count(words).astype(jnp.int32)
        through = jnp.cumsum(each, axis=1, dtype=jnp.int32)
        return cls(words, through - each, through[:, -1])

    def first(self, width: int) -> Int32[Array, "N {width}"]:
        """The first columns that are set, in order; 0 where a row has fewer."""
        n = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (self.words.shape[0], width))
        return jnp.where(n < self.counts[:, None], self.nth(n), 0)

    def nth(self, n: Int32[Array, "N K"]) -> Int32[Array, "N K"]:
        """The columns of the nth set bits (from 0) of each row; any column if the row has fewer."""
        at_most = lambda word: jnp.take_along_axis(self.before, word, axis=1) <= n
        word = last_where(at_most, self.words.shape[1] - 1, n)  # before which at most n are set
        before, bits = (jnp.take_along_axis(x, word, axis=1) for x in (self.before, self.words))
        return word * _BITS + nth_of_word(bits, n - before)

    def rank(self, column: Int32[Array, " N"]) -> Int32[Array, " N"]:
        """Number of columns before this one that are set in each row; the column may lie past the last one."""
        word = jnp.minimum(column // _BITS, self.words.shape[1] - 1)[:, None]
        before, bits = (jnp.take_along_axis(x, word, axis=1)[:, 0] for x in (self.before, self.words))
        return before + lax.population_count(bits & _bits_below(column - word[:, 0] * _BITS)).astype(jnp.int32)

    def last(self) -> Int32[Array, " N"]:
        """The last column that is set in each row; -1 without any."""
        return _highest(self.words)

    def run(self) -> Int32[Array, " N"]:
        """Length of the run of set columns that ends at the last set one of each row."""
        last = self.last()
        first = jnp.arange(self.words.shape[1], dtype=jnp.int32) * _BITS
        return last - _highest(~self.words & _bits_below(last[:, None] - first[None]))


def _bits_below(bit: Int32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """The bits of a word below this one: none for a negative number, all from 32 on."""
    inside = jnp.clip(bit, 0, _BITS - 1).astype(jnp.uint32)
    return jnp.where(bit >= _BITS, jnp.uint32(0xFFFFFFFF), jnp.left_shift(jnp.uint32(1), inside) - jnp.uint32(1))


def _highest(words: UInt32[Array, "N W"]) -> Int32[Array, " N"]:
    """The highest column that is set; -1 without any."""
    first = jnp.arange(words.shape[1], dtype=jnp.int32)[None] * _BITS
    column = first + (_BITS - 1) - lax.clz(words).astype(jnp.int32)
    return jnp.max(jnp.where(words == 0, -1, column), axis=1)
