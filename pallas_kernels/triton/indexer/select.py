"""The k largest of each row: a search by bits for the k-th largest, and a compaction.

A program holds one part of a row in registers as integers in the order of their float32. It searches for the largest
integer that at least k elements reach, one bit after the other, and stores those elements in order of position: all
that are greater, and of equal ones the first. Of a row in several parts, k candidates of each remain, and so on, until
one part holds all of them. Then XLA sorts the k that are left. It sorts upwards, so memory holds ranks: the complements
of the integers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.triton.indexer.limits import MAX_PART
from pallas_kernels.triton.launch import Runner
from pallas_kernels.types import Index, Ref

LEAST = -(2**31)  # no greater than any element
MIN_PART = 16384  # elements of a program, where a row has several parts
ELEMENTS_PER_WARP = 1024
RUN_PER_WARP = 128  # elements that are compacted at once; with 512, 64 rows of 131,072 take 152 us for 139 (H100)


def select(runner: Runner, scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row of float32 [N, S] and their int32 positions, both [N, k]: bit for bit as `lax.top_k`.

    There are from 1 to S of them, and no more than `MAX_PART` / 2 if S is greater than `MAX_PART`.
    """
    ranks, positions = ~_ordered(lax.bitcast_convert_type(scores, jnp.int32)), None
    while positions is None or ranks.shape[1] > k:
        ranks, positions = _largest(runner, ranks, positions, k, _part_size(ranks.shape[1], k))
    ranks, positions = lax.sort((ranks, positions), dimension=1, is_stable=False, num_keys=2)
    return lax.bitcast_convert_type(_ordered(~ranks), jnp.float32), positions


def _ordered(x: jax.Array) -> jax.Array:
    """The bits of float32 as int32 in the order of `lax.top_k`, and back: -0.0 is less than 0.0, and NaN at the ends.

    Their order is that of signed integers, but reversed among those with a sign.
    """
    return x ^ ((x >> 31) & 0x7FFFFFFF)


def _part_size(length: int, k: int) -> int:
    """Elements of a program: of a row in several parts, at least twice as many as it selects."""
    power = lambda n: 1 << (n - 1).bit_length()
    return power(length) if length <= MAX_PART else min(MAX_PART, max(MIN_PART, 2 * power(k)))


def _warps(size: int) -> int:
    return max(1, size // ELEMENTS_PER_WARP)


class _Part(NamedTuple):
    """Elements that a program selects from."""

    length: int  # of the whole row
    size: int  # elements of the part, a power of two
    k: int  # how many are selected


def _largest(
    runner: Runner, ranks: jax.Array, positions: jax.Array | None, k: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Ranks of the k largest of each part of each row [N, parts * k], and their positions, in order of position."""
    rows, length = ranks.shape
    parts = pl.cdiv(length, size)
    spare = 1 if runner.is_interpreter else 0  # column, to which the interpreter stores what is masked
    shape = jax.ShapeDtypeStruct((rows, parts * k + spare), jnp.int32)
    largest, at = runner.launch(
        functools.partial(_kernel, runner, _Part(length, size, k), positions is not None),
        (ranks,) if positions is None else (ranks, positions),
        [shape, shape],
        name="jflex_indexer_select",
        grid=(parts, rows),
        tiles=Tiles(1, size, num_warps=_warps(size), num_stages=1),
    )
    return largest[:, : parts * k], at[:, : parts * k]


def _kernel(runner: Runner, part: _Part, has_positions: bool, ranks: Ref, *refs: Ref) -> None:
    *positions, out, out_positions = refs
    number, row = pl.program_id(0), pl.program_id(1)
    x, _ = _load(runner, part, ranks, row, number * part.size, part.size)
    threshold = _threshold(x, part.k)
    equal_ones = part.k - jnp.sum((x > threshold).astype(jnp.int32))  # how many of them are selected
    run = min(part.size, RUN_PER_WARP * _warps(part.size))

    def compact(i: Index, before: jax.Array) -> jax.Array:
        """Stores what is selected of a run of elements; loads them again, which needs fewer registers."""
        x, at = _load(runner, part, ranks, row, number * part.size + i * run, run)
        greater, equal = x > threshold, x == threshold
        # Both counts in one scan: 16 bits without a sign hold the elements of a part.
        ones = (greater.astype(jnp.int32) << 16) + equal.astype(jnp.int32)
        counts = before + jnp.cumsum(ones)
        equal_count = counts & 0xFFFF
        selected = greater | (equal & (equal_count <= equal_ones))
        to = number * part.k + lax.shift_right_logical(counts, 16) + jnp.minimum(equal_count, equal_ones) - 1
        if runner.is_interpreter:
            to = jnp.where(selected, to, out.shape[1] - 1)
        position = at
        if has_positions:
            exists = selected & (at < part.length)
            position = runner.load(positions[0].at[row, at], mask=exists)
        runner.store(out.at[row, to], ~x, mask=selected)
        runner.store(out_positions.at[row, to], position, mask=selected)
        return before + jnp.sum(ones)

    lax.fori_loop(0, part.size // run, compact, jnp.int32(0))


def _load(runner: Runner, part: _Part, ranks: Ref, row: Index, first: Index, count: int) -> tuple[jax.Array, jax.Array]:
    """Elements of a row, beyond its end the least integer, and their positions."""
    at = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
    if part.length % part.size == 0:
        return ~runner.load(ranks.at[row, at]), at
    return ~runner.load(ranks.at[row, at], mask=at < part.length, other=~LEAST), at


def _threshold(x: jax.Array, k: int) -> jax.Array:
    """An integer that at least k elements reach, and at most k exceed."""

    def goes_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        bit, _, reached = state
        return (bit >= 0) & (reached != k)  # as soon as exactly k reach it, no lower bit matters

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        bit, threshold, reached = state
        higher = threshold + (jnp.int32(1) << bit)  # the first wraps around, from -2 ** 31 to 0
        count = jnp.sum((x >= higher).astype(jnp.int32))
        enough = count >= k
        return bit - 1, jnp.where(enough, higher, threshold), jnp.where(enough, count, reached)

    start = jnp.int32(31), jnp.int32(LEAST), jnp.int32(x.size)
    return lax.while_loop(goes_on, step, start)[1]
