"""Rows of a tile in global memory, at lines of their own: threads gather and scatter their elements by inline PTX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plg
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.inline_ptx import (
    AXIS_OF_8_ROWS,
    TILE_COLUMNS,
    address_at,
    array,
    inline,
    ptx,
    run_ptx,
    word,
)
from pallas_kernels.types import Ref

_TILE = plg.Layout.WGMMA
PIECE = 8  # elements that a thread copies at once


def load_rows(ref: Ref, line: jax.Array) -> jax.Array:
    """Gathers rows of 16-bit elements from global memory, in the layout of wgmma accumulators: [rows, columns].

    `ref` is seen as lines of its last axis, a multiple of `TILE_COLUMNS`; `line` is that of each row, in range.
    """
    columns, pairs = ref.shape[-1], (line.shape[0], TILE_COLUMNS)
    column = plg.broadcasted_iota(jnp.int32, pairs, 1, layout=_TILE)

    def run(_, source, lines, first):
        wide = word(64)
        pair_type = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(ref.dtype)))
        base, bytes_of_line = mgpu.utils.memref_ptr(source), arith.constant(wide, columns * 2)
        parts = [np.empty_like(lines.registers) for _ in range(0, columns, TILE_COLUMNS)]
        for where, register in np.ndenumerate(lines.registers):
            number, at = (vector.extract(x, [], [0]) for x in (register, first.registers[where]))
            offset = arith.muli(arith.extsi(wide, number), bytes_of_line)
            offset = arith.addi(offset, arith.muli(arith.extsi(wide, at), arith.constant(wide, 2)))
            address = address_at(base, offset)
            for i, part in enumerate(parts):
                pair = ptx(word(), [address], f"ld.global.nc.b32 $0, [$1+{i * TILE_COLUMNS * 2}];", "=r,l")
                part[where] = llvm.bitcast(pair_type, pair)
        return type(lines)(_registers=np.concatenate(parts, axis=1), _layout=lines.layout, _is_signed=None)

    types, result = (plg.RefType(), _TILE, _TILE), array((line.shape[0], columns), ref.dtype, _TILE)
    return inline(run, types, ref, lax.broadcast_in_dim(line, pairs, (0,)), column, result=result)


def copy_rows(ref: Ref, line: jax.Array, target: Ref) -> None:
    """Copies rows of 16-bit elements to a swizzled tile of shared memory, 16 bytes at a time (``cp.async``).

    `ref` is seen as lines of its last axis; `line` has the line of each row, in range. Four threads share a row. The
    copies are done after `wait_for_copies`.
    """
    rows, size = target.shape
    swizzle, pieces = smem.swizzle_of(size, 2), size // PIECE
    row, columns = (plg.broadcasted_iota(jnp.int32, (rows, TILE_COLUMNS), axis, layout=_TILE) for axis in (0, 1))
    thread = lax.div(columns, jnp.int32(2))  # of the row
    begin = lax.rem(row, jnp.int32(8)) * swizzle  # of the row in a swizzled tile of 8

    def offset_of(step: int) -> jax.Array:
        """Offset of a piece in the first row of this thread, in bytes."""
        tile, piece = lax.div(thread + step, jnp.int32(swizzle // 16)), lax.rem(thread + step, jnp.int32(swizzle // 16))
        column = (piece * 16) ^ (lax.shift_right_logical(begin, jnp.int32(3)) & (swizzle - 16))
        return (lax.div(row, jnp.int32(8)) * (size * 2 // swizzle) + tile) * (8 * swizzle) + begin + column

    steps = range(0, pieces, 4)

    def run(_, source, target, lines, threads, *offsets):
        wide, base = word(64), mgpu.utils.memref_ptr(source)
        first = lambda x, where=(0,) * lines.registers.ndim: vector.extract(x.registers[where], [], [0])
        tile, column = llvm.ptrtoint(word(), mgpu.utils.memref_ptr(target)), arith.extsi(wide, first(threads))
        column = arith.muli(column, arith.constant(wide, 16))
        for where in np.ndindex(lines.registers.shape):
            offset = arith.muli(arith.extsi(wide, first(lines, where)), arith.constant(wide, size * 2))
            address = address_at(base, arith.addi(offset, column))
            row_offset = (64 * where[0] + 8 * where[AXIS_OF_8_ROWS]) * size * 2
            for step, piece in zip(steps, offsets, strict=True):
                copy = f"cp.async.cg.shared.global [$0+{row_offset}], [$1+{16 * step}], 16;"
                text = f"{{ .reg .pred exists; setp.lt.s32 exists, $2, {pieces - step}; @exists {copy} }}"
                run_ptx([arith.addi(tile, first(piece)), address, first(threads)], text, "r,l,r")

    types = (plg.RefType(), plg.RefType(smem.transforms(swizzle, 2)), *[_TILE] * (2 + len(steps)))
    inline(run, types, ref, target, lax.broadcast_in_dim(line, row.shape, (0,)), thread, *map(offset_of, steps))


def wait_for_copies() -> None:
    """Waits until the copies of this thread have arrived."""
    inline(lambda _: run_ptx([], "cp.async.wait_all;", ""), ())


def store_rows(ref: Ref, line: jax.Array, first: int, x: jax.Array) -> None:
    """Stores rows of a tile to global memory, at columns from `first` on; a row with a line of -1 is not stored.

    Args:
      ref: [..., columns], seen as lines of its last axis.
      line: int32 [rows], the line of each row.
      first: The first column, even.
      x: [rows, size] in the layout of wgmma accumulators, in the dtype of `ref`.
    """
    size, pairs = ref.dtype.itemsize, (x.shape[0], TILE_COLUMNS)
    column = plg.broadcasted_iota(jnp.int32, pairs, 1, layout=_TILE)
    store, constraint = ("st.global.v2.f32", "ff") if size == 4 else ("st.global.b32", "r")

    def run(_, target, lines, columns, tile):
        wide, base = word(64), mgpu.utils.memref_ptr(target)
        bytes_of_line, bytes_of_element = arith.constant(wide, ref.shape[-1] * size), arith.constant(wide, size)
        addresses = {}
        for where, register in np.ndenumerate(tile.registers):
            row = (where[0], 0, *where[2:])
            if row not in addresses:
                number = vector.extract(lines.registers[row], [], [0])
                offset = arith.muli(
                    arith.extsi(wide, vector.extract(columns.registers[row], [], [0])), bytes_of_element
                )
                offset = arith.addi(offset, arith.muli(arith.extsi(wide, number), bytes_of_line))
                addresses[row] = number, address_at(base, offset)
            number, address = addresses[row]
            values = [vector.extract(register, [], [i]) for i in range(2)]
            if size == 2:
                values = [llvm.bitcast(word(), register)]
            at = (first + TILE_COLUMNS * where[1]) * size
            source = "$2" if size == 2 else "{$2, $3}"
            text = f"{{ .reg .pred stored; setp.ge.s32 stored, $0, 0; @stored {store} [$1+{at}], {source}; }}"
            run_ptx([number, address, *values], text, ",".join(["r", "l", *constraint]))

    inline(run, (plg.RefType(), _TILE, _TILE, _TILE), ref, lax.broadcast_in_dim(line, pairs, (0,)), column, x)


def store_values(ref: Ref, at: jax.Array, x: jax.Array) -> None:
    """Stores float32 [rows] to elements of an array in global memory, by flat index; -1 stores nothing."""
    pairs = (x.shape[0], TILE_COLUMNS)
    column = plg.broadcasted_iota(jnp.int32, pairs, 1, layout=_TILE)
    index = jnp.where(column == 0, lax.broadcast_in_dim(at, pairs, (0,)), -1)  # one thread of a row

    def run(_, target, indices, values):
        wide, base = word(64), mgpu.utils.memref_ptr(target)
        for where, register in np.ndenumerate(values.registers):
            number = vector.extract(indices.registers[where], [], [0])
            address = address_at(base, arith.muli(arith.extsi(wide, number), arith.constant(wide, 4)))
            text = "{ .reg .pred stored; setp.ge.s32 stored, $0, 0; @stored st.global.f32 [$1], $2; }"
            operands = [number, address, vector.extract(register, [], [0])]
            run_ptx(operands, text, "r,l,f")

    inline(run, (plg.RefType(), _TILE, _TILE), ref, index, lax.broadcast_in_dim(x, pairs, (0,)))
