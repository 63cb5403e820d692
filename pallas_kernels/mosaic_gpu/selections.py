"""Selections of elements of accumulators by predicates, in inline PTX: masks, limits of columns, and dropout."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plg
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.mosaic_gpu.inline_ptx import TILE_COLUMNS, array, inline, map_registers, ptx, with_registers, word
from pallas_kernels.types import RegisterLayout


def mask_scores(layout: RegisterLayout, s: jax.Array, visible: Sequence[jax.Array]) -> jax.Array:
    """`s` where all of these are true, -inf elsewhere.

    LLVM turns ``select(a & b, s, -inf)`` into two selects, which compete for the pipe of the comparisons: documents
    under a causal mask at head size 64 took 0.674 ms so, and 0.646 with this PTX (H200, jax 0.11.2, bf16, S 16384).
    """
    both = "".join(f"and.pred shown, shown, ${i}; " for i in range(3, 2 + len(visible)))
    text = "{ .reg .pred shown; mov.pred shown, $2; " + both + "selp.f32 $0, $1, 0fff800000, shown; }"
    constraints = ",".join(["=f,f", *["b"] * len(visible)])

    return _selected(text, constraints, layout, s, *visible)


def keep_between(s: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
    """`s` in columns from `first` on and before `end`, int32 [rows], -inf elsewhere; in the layout of accumulators.

    A thread makes a word for 32 of its elements of a row, of which ptxas loads predicates, seven at once: one selection
    for each element, where two comparisons take two instructions more.
    """
    pairs = (s.shape[0], TILE_COLUMNS)
    column = plg.broadcasted_iota(jnp.int32, pairs, 1, layout=plg.Layout.WGMMA)
    limits = (lax.broadcast_in_dim(x, pairs, (0,)) - column for x in (first, end))

    def run(_, tile, *limits):
        new, words, element = np.empty_like(tile.registers), {}, ir.F32Type.get()
        for at, register in np.ndenumerate(tile.registers):
            part, where = at[1] // 16, (at[0], 0, *at[2:])
            if (part, where) not in words:
                ends = [vector.extract(x.registers[where], [], [0]) for x in limits]
                words[part, where] = ptx(word(), ends, _WORD_BETWEEN.replace("$part", str(32 * part)), "=r,r,r")
            bits = [1 << (2 * (at[1] % 16) + i) for i in range(2)]
            values = [
                ptx(element, [vector.extract(register, [], [i]), words[part, where]], _KEEP_BIT % bit, "=f,f,r")
                for i, bit in enumerate(bits)
            ]
            new[at] = vector.from_elements(register.type, values)
        return with_registers(tile, new)

    types, result = (plg.Layout.WGMMA,) * 3, array(s.shape, s.dtype, plg.Layout.WGMMA)
    return inline(run, types, s, *limits, result=result)


# A thread holds two of eight columns: so many of its elements are before a column.
_COUNT = "shr.s32 {0}, {1}, 3; and.b32 few, {1}, 7; min.s32 few, few, 2; shl.b32 {0}, {0}, 1; add.s32 {0}, {0}, few; "
_WORD_BETWEEN = (
    "{ .reg .s32 from, to, few; "
    + _COUNT.format("from", "$1")
    + _COUNT.format("to", "$2")
    + "sub.s32 from, from, $part; sub.s32 to, to, $part; max.s32 from, from, 0; sub.s32 to, to, from; "
    + "max.s32 to, to, 0; bmsk.clamp.b32 $0, from, to; }"
)
_KEEP_BIT = (
    "{ .reg .pred kept; .reg .b32 bit; and.b32 bit, $2, %d; setp.ne.s32 kept, bit, 0; "
    "selp.f32 $0, $1, 0fff800000, kept; }"
)


def keep_from(layout: RegisterLayout, x: jax.Array, number: jax.Array, least: int) -> jax.Array:
    """`x` where the uint32 `number` is at least `least`, 0 elsewhere.

    Comparison and selection are one piece of PTX, since a thread has 7 predicates: of all comparisons before all
    selections, ptxas packs the results into registers, and unpacks them. To pack them by hand while the GEMMs run took
    longer too: 4.79 ms for 4.48 (H200, jax 0.11.2, bf16, dropout, causal, S 16384, head size 128).
    """
    text = f"{{ .reg .pred kept; setp.ge.u32 kept, $2, {least}; selp.f32 $0, $1, 0f00000000, kept; }}"

    return _selected(text, "=f,f,r", layout, x, number)


def _selected(text: str, constraints: str, layout: RegisterLayout, x: jax.Array, *others: jax.Array) -> jax.Array:
    """Applies PTX to each element of a float32 array, ``$1``, and of the other arrays, from ``$2`` on."""

    def run(tile: mgpu.FragmentedArray, *arrays: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        new, element = np.empty_like(tile.registers), ir.F32Type.get()
        for at, register in np.ndenumerate(tile.registers):
            kind = ir.VectorType(register.type)
            at_each = [y.registers[at] for y in (tile, *arrays)]
            parts = lambda i, vectors=at_each: [vector.extract(y, [], [i]) for y in vectors]
            values = [ptx(element, parts(i), text, constraints) for i in range(kind.shape[0])]
            new[at] = vector.from_elements(kind, values)
        return with_registers(tile, new)

    return map_registers(run, layout, x, *others)
