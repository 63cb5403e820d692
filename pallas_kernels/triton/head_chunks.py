"""Rows of a head in a Triton kernel: loads, stores and dot products in one or two chunks of columns.

Triton's tiles are powers of two. Other head sizes are held as two chunks: 80 as 64 and 16, 96 as 64 and 32, 192 as 128
and 64. So they cost about what their size says, in shared memory, registers and MMAs, and not what the next power of
two would.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.program.vectors.vectors import Chunk, VectorProgram
from pallas_kernels.spec import LATENT_TILE, AttentionSpec
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Ref

MIN_DOT_SIZE = 16  # M, N and K of an MMA

Columns = tuple[jax.Array, ...]  # chunks of rows: [rows, width] each, zeros beyond the head size
Chunks = tuple[Chunk, ...]


def chunks(size: int) -> list[tuple[int, int]]:
    """First column and width of the chunks that hold a head size.

    >>> chunks(64), chunks(80), chunks(100)
    ([(0, 64)], [(0, 64), (64, 16)], [(0, 128)])
    """
    whole = _power_of_two(size)
    second = _power_of_two(size - whole // 2)
    return [(0, whole // 2), (whole // 2, second)] if whole // 2 + second < whole else [(0, whole)]


def key_chunks(spec: AttentionSpec) -> Chunks:
    """The chunks that hold keys and queries of a paged call; those of the values first, if keys hold these."""
    if not spec.values_in_keys:
        return _side_chunks(spec, spec.D, spec.vector_programs.key)
    rotated = (Chunk(spec.Dv + first, width) for first, width in chunks(spec.D - spec.Dv))
    return (*value_chunks(spec), *rotated)


def value_chunks(spec: AttentionSpec) -> Chunks:
    """The chunks that hold values and outputs: as a mod makes them, or tiles of columns that share a scale."""
    if spec.has_latent_tiles:
        pairs = [(0, 1), (1, 1)] if spec.holds_pairs(spec.Dv, None) else [(0, 0)]
        tiles = range(0, spec.Dv, LATENT_TILE)
        return tuple(Chunk(first + odd, LATENT_TILE >> halved, 1 + halved) for first in tiles for odd, halved in pairs)
    return _side_chunks(spec, spec.Dv, spec.vector_programs.value)


def plain_chunks(size: int) -> Chunks:
    """The chunks that hold keys or values of a paged call without a mod."""
    return tuple(Chunk(*chunk) for chunk in chunks(size))


def _side_chunks(spec: AttentionSpec, size: int, mod: VectorProgram | None) -> Chunks:
    """The chunks that hold keys or values, as a mod makes them, and the queries or outputs that go with them."""
    if mod is not None:
        return mod.chunks
    if spec.holds_pairs(size, mod):
        return tuple(Chunk(2 * first + odd, width, 2) for first, width in chunks(size // 2) for odd in (0, 1))
    return plain_chunks(size)


def _power_of_two(size: int) -> int:
    return max(MIN_DOT_SIZE, 1 << (size - 1).bit_length())


def load_rows(
    spec: AttentionSpec, ref: Ref, b: Index, h: Index, first: Index, rows: int, length: Index, *, may_end: bool
) -> Columns:
    """Loads rows of an array in the layout of the spec, eight bits widened to its dtype; zeros outside of the array.

    The array is [B, length, heads, size] or [B, heads, length, size]. With `may_end`, rows may reach past the end.
    """
    of_chunk = functools.partial(_index_of_rows, spec, ref, (b, h), (first, rows, length, may_end))
    indices = map(of_chunk, plain_chunks(ref.shape[3]))
    return tuple(widened(spec, runner_of(spec).load(ref.at[index], mask=mask)) for index, mask in indices)


def widened(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """Queries or keys of eight bits in the dtype of the spec, which holds each of their numbers; others as they are."""
    return x.astype(spec.dtype) if x.dtype.itemsize == 1 else x


def store_rows(
    spec: AttentionSpec, ref: Ref, b: Index, h: Index, first: Index, x: Columns, length: int, *, may_end: bool
) -> None:
    """Stores what `load_rows` would load."""
    for chunk, columns in zip(plain_chunks(ref.shape[3]), x, strict=True):
        index, mask = _index_of_rows(spec, ref, (b, h), (first, columns.shape[0], length, may_end), chunk)
        runner_of(spec).store(ref.at[index], columns.astype(ref.dtype), mask=mask)


def _index_of_rows(
    spec: AttentionSpec, ref: Ref, head: tuple[Index, Index], rows: tuple[Index, int, Index, bool], chunk: Chunk
) -> tuple[tuple[Any, ...], jax.Array | None]:
    """The index of a chunk of rows, and the mask of what is not padding, or None if nothing is."""
    first, count, length, may_end = rows
    b, h = (jnp.full((), x, jnp.int32) if isinstance(x, int) else x for x in head)  # the interpreter takes no plain int
    in_layout = lambda row: (b, row, h) if spec.layout == "BTNH" else (b, h, row)
    if not may_end and chunk.first + chunk.width <= ref.shape[3]:
        return (*in_layout(pl.ds(first, count)), pl.ds(chunk.first, chunk.width)), None
    row = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
    return _index_of_lines(ref, in_layout(row), row < length if may_end else None, chunk)


def load_lines(
    spec: AttentionSpec, ref: Ref, at: tuple[Index, ...], mask: jax.Array | None = None, pieces: Chunks | None = None
) -> Columns:
    """Loads rows of the last axis that are anywhere in an array, as `widened`; zeros outside of it and of a mask.

    Args:
      at: Indices of the other axes, each a scalar, [rows] or [rows, 1]. If all are scalars, what is loaded is [width].
      mask: Of the rows, a scalar or [rows].
      pieces: The chunks; by default the plain ones of the last axis.
    """
    indices = (_index_of_lines(ref, at, mask, piece) for piece in pieces or plain_chunks(ref.shape[-1]))
    return tuple(widened(spec, runner_of(spec).load(ref.at[index], mask=inside)) for index, inside in indices)


def store_lines(
    spec: AttentionSpec,
    ref: Ref,
    at: tuple[Index, ...],
    x: Columns,
    mask: jax.Array | None = None,
    pieces: Chunks | None = None,
) -> None:
    """Stores what `load_lines` would load."""
    for piece, columns in zip(pieces or plain_chunks(ref.shape[-1]), x, strict=True):
        index, inside = _index_of_lines(ref, at, mask, piece)
        runner_of(spec).store(ref.at[index], columns.astype(ref.dtype), mask=inside)


def _index_of_lines(
    ref: Ref, at: tuple[Index, ...], mask: jax.Array | None, piece: Chunk
) -> tuple[tuple[Index, ...], jax.Array]:
    """The index of a chunk of rows, and the mask of what is loaded."""
    shape = (*next((jnp.shape(x)[:1] for x in at if jnp.ndim(x)), ()), piece.width)
    column = piece.first + piece.step * lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    beside = lambda x: x[:, None] if jnp.ndim(x) == 1 else x
    index = tuple(jnp.broadcast_to(beside(x), shape) if jnp.ndim(x) else x for x in at)
    inside = column < ref.shape[-1]
    return (*index, column), inside if mask is None else beside(mask) & inside


def load_vector(
    spec: AttentionSpec,
    ref: Ref,
    at: tuple[Index, ...],
    first: Index,
    rows: int,
    length: int,
    other: float,
    *,
    may_end: bool,
) -> jax.Array:
    """Loads ``[rows]`` of the last axis of an array."""
    if not may_end:
        return runner_of(spec).load(ref.at[(*at, pl.ds(first, rows))])
    index = first + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    return runner_of(spec).load(ref.at[(*at, index)], mask=index < length, other=other)


def store_vector(
    spec: AttentionSpec, ref: Ref, at: tuple[Index, ...], first: Index, x: jax.Array, length: int, *, may_end: bool
) -> None:
    """Stores what `load_vector` would load."""
    if not may_end:
        runner_of(spec).store(ref.at[(*at, pl.ds(first, x.shape[0]))], x)
    else:
        index = first + lax.broadcasted_iota(jnp.int32, x.shape, 0)
        runner_of(spec).store(ref.at[(*at, index)], x, mask=index < length)


def zero_rows(rows: int, size: int) -> Columns:
    """A float32 accumulator of rows [rows, size]."""
    return tuple(jnp.zeros((rows, width), jnp.float32) for _, width in chunks(size))


def zero_values(spec: AttentionSpec, rows: int) -> Columns:
    """A float32 accumulator of outputs [rows, Dv], in the chunks of values."""
    return tuple(jnp.zeros((rows, width), jnp.float32) for _, width, _ in value_chunks(spec))


def qk_dot(spec: AttentionSpec, a: Columns, b: Columns) -> jax.Array:
    """``a @ b.T`` (QK^T and its like), float32 [rows of a, rows of b]."""
    return sum((_dot(spec, x, y, over=(1, 1)) for x, y in zip(a[1:], b[1:], strict=True)),
               start=_dot(spec, a[0], b[0], over=(1, 1)))  # fmt: skip


def pv_dot(spec: AttentionSpec, weights: jax.Array, rows: Columns) -> Columns:
    """``weights @ rows`` (PV and its like) in float32, with the weights rounded to the dtype of the rows."""
    may_select = spec.programs.score is not None or spec.dropout is not None or spec.normalize == "none"
    if may_select and rows[0].dtype.itemsize == 2:
        weights = runner_of(spec).opaque(weights)
    weights = weights.astype(rows[0].dtype)
    return tuple(_dot(spec, weights, x, over=(1, 0)) for x in rows)


def powers_of_two(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors of rows for float16, and their inverses, [rows, 1], from their largest magnitudes [rows].

    Powers of two that take the largest element near 2 ** 14: float16 ends at 2 ** 16, and holds what is 2 ** 28 times
    smaller than that with all of its bits. Of rows of zeros they are finite too.
    """
    top = 14
    # The biased exponent, within what makes both of them normal numbers.
    exponent = jnp.minimum(jnp.maximum(lax.bitcast_convert_type(largest, jnp.int32) >> 23, top + 1), 254)
    power = lambda biased: lax.bitcast_convert_type(biased << 23, jnp.float32)[:, None]
    return power(254 + top - exponent), power(exponent - top)


def add_rows(a: Columns, b: Columns) -> Columns:
    """The sum of two rows of chunks."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _dot(spec: AttentionSpec, a: jax.Array, b: jax.Array, *, over: tuple[int, int]) -> jax.Array:
    """MMA with a float32 accumulator, contracting axis ``over[0]`` of `a` with ``over[1]`` of `b`."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=spec.precision, preferred_element_type=jnp.float32)
