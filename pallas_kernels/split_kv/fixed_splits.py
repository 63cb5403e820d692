"""Batch-invariant split-KV: splits of a constant number of keys, whose sums have the same bits whoever adds them.

A split begins at a multiple of `KEYS_OF_SPLIT`, counted in keys or, with lists of blocks, in keys of the listed tiles.
Splits are added in ascending order, so the result of a query follows from its keys and lists alone. One program may
compute all splits of a tile of queries, or one each, which a second kernel adds; which of both depends on the batch,
and changes no bit:

* Sums are held relative to a power of two, the exponent of the largest weight, rounded up. Rescaling by powers of two
  is exact, so adding a split rounds once, however a compiler contracts it.
* A split or a tile without visible keys adds zeros, so it does not matter which are skipped.

After He et al. 2025, "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab), on fixed split sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.config import Tiles
from pallas_kernels.softmax import mark
from pallas_kernels.spec import LN_2, AttentionSpec
from pallas_kernels.split_kv.planner import NUM_SMS
from pallas_kernels.triton.containment import Attended
from pallas_kernels.triton.forward import Attention, RowVectors, Walk
from pallas_kernels.triton.head_chunks import Columns, zero_values
from pallas_kernels.triton.plan import limits
from pallas_kernels.triton.scores import weights
from pallas_kernels.types import Index

MAX_PARTIALS = 8192  # partial results of all key heads: 270 MB with tiles of 64 rows and 128 columns
MAX_PROGRAMS = 8 * NUM_SMS  # of a grid-stride loop over splits: most of what the bounds allow does not exist
_LEAST = -127.0  # exponent of a factor that counts as 0


class Sums(NamedTuple):
    """Unnormalized sums over some splits."""

    exponent: jax.Array  # of the power of two that they are relative to, a whole number; -inf where nothing was visible
    row_sum: jax.Array  # sum of the weights; NaN marks a row (`pallas_kernels.softmax`)
    out: Columns  # sums of the weights times the values, in chunks of columns
    row_max: tuple[jax.Array, ...]  # the largest natural score, if it is one of ``spec.stats``

    @property
    def vectors(self) -> RowVectors:
        """All but `out`: what is stored of each row of a partial result."""
        return self.exponent, self.row_sum, *self.row_max


def tiles_of_split(tiles: Tiles) -> int:
    """Tiles of keys of a split."""
    return max(1, limits.KEYS_OF_SPLIT // tiles.block_kv)


def max_slots(heads: int) -> int:
    """The most partial results of each of so many key heads."""
    return max(1, MAX_PARTIALS // heads)


def within_slots(splits: jax.Array, copies: jax.Array, slots: int) -> jax.Array:
    """The splits of rows, int32 [rows]; 1 for those whose partial results would exceed the slots."""
    used = jnp.cumsum(jnp.where(splits > 1, splits * copies, 0))
    return jnp.where(used > slots, jnp.minimum(splits, 1), splits)


def attend(attention: Attention, walk_of: Callable[[Index], Walk], first: Index, end: Index) -> Sums:
    """The sums over the splits from `first` to `end`, one past the last, each by its own walk."""

    def one(i: Index, sums: Sums) -> Sums:
        split_attention = attention._replace(walk=walk_of(i))
        return add(sums, _of_state(split_attention, split_attention.state()))

    return lax.fori_loop(first, end, one, _nothing(attention))


def repair(
    attention: Attention, walk_of: Callable[[Index], Walk], first: Index, end: Index
) -> tuple[Columns, RowVectors, Attended]:
    """The result over splits from cleared values, and the rows that must keep their output, as `Attention.repair`."""

    def one(i: Index, carry: tuple[Sums, Attended]) -> tuple[Sums, Attended]:
        split_attention = attention._replace(walk=walk_of(i))
        state, attended = split_attention.repaired_state(carry[1])
        return add(carry[0], _of_state(split_attention, state, marked=False)), attended

    start = _nothing(attention), Attended.none(attention.rows)
    sums, attended = lax.fori_loop(first, end, one, start)
    return *finish(attention.spec, sums), attended


def _nothing(attention: Attention) -> Sums:
    spec, rows = attention.prepared.spec, attention.rows
    full = lambda x: jnp.full((rows,), x, jnp.float32)
    exponent = full(0.0 if spec.normalize == "none" else -jnp.inf)
    zeros = zero_values(spec, rows)
    return Sums(exponent, full(0.0), zeros, tuple(full(-jnp.inf) for _ in spec.stats))


def _of_state(attention: Attention, state: softmax.SoftmaxState, *, marked: bool = True) -> Sums:
    """The sums of one split, relative to a power of two."""
    spec, log2_scale = attention.prepared.spec, attention.prepared.log2_scale
    marks = mark(*state.out) if marked and spec.needs_marks else None
    marked_sum = lambda x: x if marks is None else x + marks
    if spec.normalize == "none":
        return Sums(jnp.zeros_like(state.row_max), marked_sum(jnp.zeros_like(state.row_max)), state.out, ())
    exponent = -jnp.floor(-(state.row_max * log2_scale))
    finite = lambda x: jnp.where(exponent == -jnp.inf, 0.0, x)
    factor = weights(spec, finite(state.row_max), log2_scale, finite(exponent))
    row_max = tuple(state.row_max * (log2_scale * LN_2) for _ in spec.stats)
    return Sums(exponent, marked_sum(state.row_sum * factor), tuple(x * factor[:, None] for x in state.out), row_max)


def add(a: Sums, b: Sums) -> Sums:
    """The sums over the splits of both; rounds once."""
    exponent = jnp.maximum(a.exponent, b.exponent)
    finite = jnp.where(exponent == -jnp.inf, 0.0, exponent)
    factor_a, factor_b = _power_of_two(a.exponent - finite), _power_of_two(b.exponent - finite)
    spread = lambda x: x[:, None] if x.ndim else x
    out = tuple(x * spread(factor_a) + y * spread(factor_b) for x, y in zip(a.out, b.out, strict=True))
    row_max = tuple(jnp.maximum(x, y) for x, y in zip(a.row_max, b.row_max, strict=True))
    return Sums(exponent, a.row_sum * factor_a + b.row_sum * factor_b, out, row_max)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Two to the power of a whole number of at most 0, exactly; 0 below 2 ** -126."""
    biased = jnp.maximum(exponent, _LEAST).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def finish(spec: AttentionSpec, sums: Sums) -> tuple[Columns, RowVectors]:
    """Epilogue: output, in chunks of columns, lse and ``spec.stats``, as `Attention.attend` returns them."""
    if spec.normalize == "none":
        return tuple(x * spec.kept_scale for x in sums.out), (sums.row_sum,)
    empty = sums.row_sum == 0.0
    row_sum = jnp.where(empty, 1.0, sums.row_sum)
    lse = jnp.where(empty, -jnp.inf, (sums.exponent + jnp.log(row_sum) / LN_2) * LN_2)
    factor = spec.kept_scale / row_sum
    out = tuple(x * (factor[:, None] if factor.ndim else factor) for x in sums.out)
    return out, (lse, *sums.row_max)
