"""Split-KV merge: combines the partial results of a row of queries, one for each split of its keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.softmax import LEAST_EXPONENT
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import language
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.types import A, Index, Ref


class Partials(NamedTuple, Generic[A]):
    """Partial results of splits: refs to out [slots, heads, rows, Dv], lse and stats [slots, heads, rows], float32."""

    out: A
    lse: A
    stats: tuple[A, ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[A]) -> Partials[A]:
        """From out, lse and stats."""
        out, lse, *stats = arrays
        return cls(out, lse, tuple(stats))


PARTIALS_PER_WARP = 16  # read at once: 64 registers of a thread at 128 columns
MAX_FEW_ROWS = 132  # up to which the merge needs more warps in a program to fill the GPU


def partials_at_once(max_splits: int, rows: int) -> tuple[int, int]:
    """How many partial results a merge program reads at once, and its warps.

    Args:
      max_splits: Splits that a row may have.
      rows: How many rows there may be to merge: if few, each of them may have many splits.
    """
    run = min(1 << (max_splits - 1).bit_length(), PARTIALS_PER_WARP if rows > MAX_FEW_ROWS else 4 * PARTIALS_PER_WARP)
    return max(run, 2), max(1, run // PARTIALS_PER_WARP)


def merge_row(
    spec: AttentionSpec, partials: Partials[Ref], run: int, slot: Index, count: Index, at: tuple[Index, Index]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Output [Dv], in chunks of columns, and lse and ``spec.stats`` of one row.

    Without a softmax, outputs add up, and the lse is 0.

    Args:
      spec: The spec.
      partials: The partial results.
      run: How many are read at once, a power of two.
      slot: The first of the row; the others follow.
      count: How many there are; with none, the row is fully masked.
      at: Head and row.
    """
    size = partials.out.shape[-1]
    zeros = tuple(jnp.zeros((width,), jnp.float32) for _, width in chunks(size))
    scalar = lambda x: jnp.full((), x, jnp.float32)
    stats = tuple(scalar(_START[name]) for name in spec.stats)
    start = _Row(scalar(-jnp.inf), jnp.zeros((), jnp.float32), zeros, stats)
    runs = lax.div(count + (run - 1), run)
    row = lax.fori_loop(0, runs, functools.partial(_accumulate, spec, partials, run, (slot, count), at), start)
    if spec.normalize == "none":  # each lse is 0, so each weight 1; or NaN, which marks the row
        return row.sums, (jnp.where(row.max == -jnp.inf, 0.0, row.max),)
    empty = row.sum == 0.0
    safe = jnp.where(empty, 1.0, row.sum)
    columns = tuple(x / safe for x in row.sums)
    lse = jnp.where(empty, -jnp.inf, row.max + jnp.log(safe))
    final = {"max": lambda x: x, "entropy": lambda x: x / safe + jnp.log(safe)}
    stats = (final[name](x) for name, x in zip(spec.stats, row.stats, strict=True))
    return columns, (lse, *stats)


class _Row(NamedTuple):
    """The merge of some partial results.

    Attributes:
      max: The largest lse.
      sum: Sum of the weights ``exp(lse - max)``.
      sums: Sums of the weights times the outputs, in chunks of columns.
      stats: For each of ``spec.stats``: the largest score; the sum of the weights times the entropy of each minus the
        logarithm of its weight, of terms that are not negative.
    """

    max: jax.Array
    sum: jax.Array
    sums: tuple[jax.Array, ...]
    stats: tuple[jax.Array, ...]


_START = {"max": -jnp.inf, "entropy": 0.0}  # of the row, and of what does not exist


def _accumulate(
    spec: AttentionSpec,
    partials: Partials[Ref],
    run: int,
    slots: tuple[Index, Index],
    at: tuple[Index, Index],
    n: Index,
    row: _Row,
) -> _Row:
    """Rescales the weighted sums of a row, and adds a run of partial results."""
    (first_slot, count), size = slots, partials.out.shape[-1]
    i = n * run + lax.broadcasted_iota(jnp.int32, (run,), 0)
    exists, slot = i < count, first_slot + jnp.minimum(i, count - 1)
    lse = language.load(spec.route, partials.lse.at[(slot, *at)], mask=exists, other=-jnp.inf)
    new_max = jnp.maximum(row.max, jnp.max(lse))
    safe_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    weight, alpha = jnp.exp(lse - safe_max), jnp.exp(row.max - safe_max)
    added = []
    for (first, width), x in zip(chunks(size), row.sums, strict=True):
        column = first + lax.broadcasted_iota(jnp.int32, (run, width), 1)
        slot_of, mask = (jnp.broadcast_to(y[:, None], column.shape) for y in (slot, exists))
        values = language.load(
            spec.route, partials.out.at[(slot_of, *at, column)], mask=(column < size) & mask, other=0.0
        )
        added.append(x * alpha + jnp.sum(values * weight[:, None], axis=0))
    row_sum, stats = row.sum * alpha + jnp.sum(weight), []
    for name, ref, x in zip(spec.stats, partials.stats, row.stats, strict=True):
        values = language.load(spec.route, ref.at[(slot, *at)], mask=exists, other=_START[name])
        if name == "max":
            stats.append(jnp.maximum(x, jnp.max(values)))
        else:
            rescaled = (x - row.sum * _finite(row.max - safe_max)) * alpha
            stats.append(rescaled + jnp.sum(weight * (values - _finite(lse - safe_max))))
    return _Row(new_max, row_sum, tuple(added), tuple(stats))


def _finite(log_of_weight: jax.Array) -> jax.Array:
    """Logarithms of weights; of a weight of 0 a finite one, because 0 times -inf is NaN."""
    return jnp.maximum(log_of_weight, LEAST_EXPONENT)
