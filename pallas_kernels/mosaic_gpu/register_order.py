"""Tiles of 64 rows in the order of registers: each thread of a warp group stores its elements as they are.

Rows of float32 sums would take an exchange between lanes for each store. XLA puts them in order later, as it scales and
casts them. The kernel of packed causal documents, 16384 tokens, took 794 us for 822 so (H100, jax 0.11.2, D 128).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plg
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic_gpu import inline_ptx, smem
from pallas_kernels.types import Ref

COLUMNS = 16  # of which a thread stores four elements of a row at once: 16 bytes
_STRIDE = smem.WARP_GROUP_THREADS * 16  # bytes from four elements of a thread to its next four
_LINE = 256  # elements of a line: TMA copies so many along an axis
# A tile of 64 rows: warps, 8 rows of a warp and those 8 below, 4 threads of a row, 2 columns of each in 8 of 16.
_ELEMENTS = {"columns": -1, "below": 2, "warp": 4, "row": 8, "thread": 4, "eight": 2, "column": 2}
_ROW, _COLUMN = ("warp", "below", "row"), ("columns", "eight", "thread", "column")


def shape(columns: int) -> tuple[int, int]:
    """The shape of 64 rows of so many columns, a multiple of `COLUMNS`."""
    return smem.WARP_GROUP_ROWS * columns // _LINE, _LINE


def store(ref: Ref, x: jax.Array) -> None:
    """Stores float32 [64, columns], in the layout of wgmma accumulators, to shared memory of `shape`."""

    def run(_, target, tile):
        address = _address_of_thread(target)
        for offset, four in _fours(tile):
            inline_ptx.run_ptx([address, *four], f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};", "r,f,f,f,f")

    inline_ptx.inline(run, (plg.RefType(), plg.Layout.WGMMA), ref, x)


def add(ref: Ref, x: jax.Array, adds: jax.Array) -> None:
    """Adds such an array to global memory of `shape` if `adds`, by atomic additions of 16 bytes.

    Without a copy in shared memory: H200, jax 0.11.2, bf16, S 16384, 16 heads, backward, us, two readings each, by TMA
    and so: D 192, Dv 128, causal 12054, 12723 and 11944, 12177; documents, D 128 1605, 1604 and 1642, 1643.
    """

    def run(_, target, tile, adds):
        offset = arith.extui(inline_ptx.word(64), _offset_of_thread())
        address = inline_ptx.address_at(mgpu.utils.memref_ptr(target), offset)
        for offset, four in _fours(tile):
            instruction = f"@adds red.relaxed.gpu.global.add.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
            text = f"{{ .reg .pred adds; setp.ne.s32 adds, $5, 0; {instruction} }}"
            inline_ptx.run_ptx([address, *four, adds.registers[()]], text, "l,f,f,f,f,r")

    types = (plg.RefType(), plg.Layout.WGMMA, plg.Layout.WG_SPLAT)
    inline_ptx.inline(run, types, ref, x, adds.astype(jnp.int32))


def _fours(tile: mgpu.FragmentedArray) -> Iterator[tuple[int, Sequence[ir.Value]]]:
    """The elements of this thread, four of a row at a time, and where they are stored: bytes from its first."""
    pairs = np.squeeze(tile.registers).reshape(-1, 2, 2)  # [columns / 16, 8 of 16, 8 rows], of two neighbors in a row
    for number, two in enumerate(pairs.swapaxes(1, 2).reshape(-1, 2).tolist()):
        yield number * _STRIDE, [vector.extract(x, [], [j]) for x in two for j in range(2)]


def load(ref: Ref) -> jax.Array:
    """Loads what `store` has stored."""
    size, layout = (smem.WARP_GROUP_ROWS, ref.shape[0] * _LINE // smem.WARP_GROUP_ROWS), plg.Layout.WGMMA

    def run(_, source):
        address, pairs = _address_of_thread(source), np.empty((size[1] // 8, 2), dtype=object)
        four, two = (ir.VectorType.get((n,), ir.F32Type.get()) for n in (4, 2))
        for number, (columns, below) in enumerate(np.ndindex(len(pairs) // 2, 2)):
            at = arith.addi(address, arith.constant(inline_ptx.word(), number * _STRIDE))
            x = llvm.load(four, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), at), alignment=16)
            for i in range(2):
                pairs[2 * columns + i, below] = vector.extract_strided_slice(two, x, [2 * i], [2], [1])
        tiled = layout.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=pairs.reshape(tiled.registers_shape(size)), _layout=tiled, _is_signed=None
        )

    return inline_ptx.inline(run, (plg.RefType(),), ref, result=inline_ptx.array(size, jnp.float32, layout))


def _address_of_thread(ref: ir.Value) -> ir.Value:
    """The address in shared memory of the first four elements of this thread."""
    return arith.addi(llvm.ptrtoint(inline_ptx.word(), mgpu.utils.memref_ptr(ref)), _offset_of_thread())


def _offset_of_thread() -> ir.Value:
    thread = arith.andi(mgpu.utils.thread_idx(), arith.constant(inline_ptx.word(), smem.WARP_GROUP_THREADS - 1))
    return arith.shli(thread, arith.constant(inline_ptx.word(), 4))


def to_rows(x: jax.Array) -> jax.Array:
    """Puts tiles [..., row tiles, column tiles, *shape] in order: [..., rows, columns].

    >>> to_rows(jnp.zeros((2, 3, 2, *shape(32)))).shape
    (2, 192, 64)
    """
    *batch, row_tiles, column_tiles, _, _ = x.shape
    axes = {name: len(batch) + 2 + i for i, name in enumerate(_ELEMENTS)}
    x = x.reshape(*batch, row_tiles, column_tiles, *_ELEMENTS.values())
    row, column = ([len(batch) + i, *(axes[name] for name in names)] for i, names in enumerate((_ROW, _COLUMN)))
    x = jnp.transpose(x, (*range(len(batch)), *row, *column))
    return x.reshape(*batch, row_tiles * smem.WARP_GROUP_ROWS, -1)
