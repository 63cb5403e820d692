"""Inline PTX and MLIR: element functions, loads and barriers that Pallas has no lowering for in Mosaic GPU.

Only this module, `global_rows` and `selections` need MLIR. A warp group holds arrays in registers, in a layout that
says which thread has which element; element-wise functions keep the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from pallas_kernels.types import Ref, RegisterLayout


def ptx(
    result: ir.Type, operands: Sequence[ir.Value], text: str, constraints: str, *, side_effects: bool = False
) -> ir.Value:
    """Inline PTX with a result."""
    return cast("ir.Value", llvm.inline_asm(result, operands, text, constraints, has_side_effects=side_effects))


def run_ptx(operands: Sequence[ir.Value], text: str, constraints: str) -> None:
    """Inline PTX for its effect on memory."""
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, operands, text, f"{constraints},~{{memory}}", has_side_effects=True)


def word(bits: int = 32) -> ir.IntegerType:
    """The type of words of so many bits."""
    return ir.IntegerType.get_signless(bits)


def address_at(base: ir.Value, offset: ir.Value) -> ir.Value:
    """An address in global memory, by an offset in bytes."""
    return llvm.getelementptr(base.type, base, [offset], [-(2**31)], word(8), llvm.GEPNoWrapFlags.none)


def inline(
    function: Callable[..., object], arg_types: Sequence[object], *args: object, result: object = None
) -> jax.Array:
    """Calls ``function(context, *registers)`` inside of a kernel; `result` declares the array that it returns."""
    return cast("Callable[..., jax.Array]", plg.inline_mgpu(arg_types=tuple(arg_types), return_type=result)(function))(
        *args
    )


def array(shape: tuple[int, ...], dtype: DTypeLike, layout: RegisterLayout) -> plg.ShapeDtypeStruct:
    """Declares a result in registers."""
    return plg.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout)


def map_registers(function: Callable[..., mgpu.FragmentedArray], layout: RegisterLayout, *args: jax.Array) -> jax.Array:
    """Applies a function of Mosaic GPU's register arrays, all of one shape and layout."""
    result = array(args[0].shape, args[0].dtype, layout)
    return inline(lambda _, *registers: function(*registers), (layout,) * len(args), *args, result=result)


def exp2(layout: RegisterLayout, x: jax.Array) -> jax.Array:
    """The SFU's exponential, ``ex2.approx`` (relative error 2 ** -22); results below 2 ** -126 are 0."""
    return map_registers(lambda r: r.exp2(approx=True), layout, x)


def weights(layout: RegisterLayout, s: jax.Array, log2_scale: float, row_max_log2: jax.Array) -> jax.Array:
    """``2 ** (log2_scale * s - row_max_log2)``: one FMA and one ``ex2.approx`` for each element."""
    return map_registers(lambda r, c: r._pointwise(math.fma, log2_scale, -c).exp2(approx=True), layout, s, row_max_log2)


def tanh(layout: RegisterLayout, x: jax.Array) -> jax.Array:
    """The SFU's tanh, ``tanh.approx`` (relative error 2 ** -11)."""
    return map_registers(lambda r: r.tanh(approx=True), layout, x)


def logistic(layout: RegisterLayout, exponent: jax.Array) -> jax.Array:
    """``1 / (1 + 2 ** exponent)`` by two SFU functions (relative error 2 ** -21); 0 below 2 ** -126."""
    return map_registers(lambda r: _reciprocal(r.exp2(approx=True) + 1.0), layout, exponent)


def logistic_of_pairs(exponent: jax.Array, *, of_rows: bool) -> jax.Array:
    """``1 / (1 + 2 ** exponent)`` by three SFU functions for two elements, at least 2 ** -63 (relative error 2 ** -21).

    The denominators of a pair share a reciprocal: ``1 / a`` is ``b / (a * b)``. So a NaN of one element reaches both.
    H200, jax 0.11.2, bf16, sigmoid attention, causal, S 16384, TFLOP/s with pairs and without: forward 428 and 381,
    backward 442 and 425 at head size 64; 679 and 680, 573 and 539 at 128.

    Args:
      exponent: float32 [rows, columns], in the layout of wgmma accumulators.
      of_rows: Whether the elements of a pair are in one column, 8 rows apart; else they are neighbors in a row.
    """

    def run(r: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        denominators = (r.min(MAX_PAIRED_EXPONENT).exp2(approx=True) + 1.0).registers
        elements = lambda at: [vector.extract(denominators.item(at), [], [i]) for i in range(2)]
        new, kind = np.empty_like(denominators), denominators.flat[0].type
        for at in np.ndindex(new.shape):
            if not of_rows:
                new[at] = vector.from_elements(kind, _reciprocals(*elements(at)))
            elif at[AXIS_OF_8_ROWS] == 0:
                below = (*at[:AXIS_OF_8_ROWS], 1, *at[AXIS_OF_8_ROWS + 1 :])
                columns = zip(*map(_reciprocals, elements(at), elements(below)), strict=True)
                new[at], new[below] = (vector.from_elements(kind, column) for column in columns)
        return with_registers(r, new)

    return map_registers(run, plg.Layout.WGMMA, exponent)


def hide_range(layout: RegisterLayout, x: jax.Array) -> jax.Array:
    """Copies 32-bit integers by PTX, so that LLVM cannot know their range."""
    move = lambda x, _: ptx(word(), [x], "mov.b32 $0, $1;", "=r,r")
    return map_registers(lambda r: r.foreach(move, create_array=True, is_signed=r.is_signed), layout, x)


MAX_PAIRED_EXPONENT = 63.0  # (1 + 2 ** 63) ** 2 is below the largest float32
AXIS_OF_8_ROWS = 4  # of the registers of wgmma accumulators: a thread holds elements of two rows, 8 apart


def _reciprocal(r: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    return r._pointwise(r._lift_fast_instr(_RECIPROCAL))


def _reciprocals(a: ir.Value, b: ir.Value) -> list[ir.Value]:
    """``1 / a`` and ``1 / b`` by one SFU function."""
    inverse = ptx(ir.F32Type.get(), [arith.mulf(a, b)], f"{_RECIPROCAL} $0, $1;", "=f,f")
    return [arith.mulf(b, inverse), arith.mulf(a, inverse)]


_RECIPROCAL = "rcp.approx.ftz.f32"


def from_library(name: str, layout: RegisterLayout, x: jax.Array, *others: jax.Array) -> jax.Array:
    """A function of MLIR's ``math`` dialect, which lowers to one of CUDA's device library (libdevice)."""
    return map_registers(lambda r, *arrays: r._pointwise(getattr(math, name), *arrays), layout, x, *others)


def load_elements(ref: Ref, index: jax.Array, layout: RegisterLayout, dtype: np.dtype) -> jax.Array:
    """Gathers elements of a one-dimensional array in global memory; every index must be in range."""

    def run(_, source, numbers):
        element = lambda i, _: memref.load(source, [arith.index_cast(ir.IndexType.get(), i)])
        return numbers.foreach(element, create_array=True, is_signed=_is_signed(dtype))

    return inline(run, (plg.RefType(), layout), ref, index, result=array(index.shape, dtype, layout))


def _is_signed(dtype: np.dtype) -> bool | None:
    """True for signed integers, None for floating-point numbers."""
    return jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None


def load_strided(ref: Ref, index: jax.Array, dtype: np.dtype, step: int) -> jax.Array:
    """Gathers from a one-dimensional array in global memory, where neighboring columns of a tile are `step` apart.

    Each thread computes only the address of its first element of a row; the others are at constant offsets.
    """
    size = jnp.dtype(dtype).itemsize
    constraint, bits = {4: ("r", 32), 2: ("h", 16), 1: ("h", 16)}[size]

    def run(_, source, numbers):
        element = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
        base, bytes_of_element = mgpu.utils.memref_ptr(source), arith.constant(word(64), size)

        def at(address: ir.Value, columns: int) -> ir.Value:
            text = f"ld.global.nc.{'u8' if size == 1 else f'b{bits}'} $0, [$1+{columns * step * size}];"
            x = ptx(word(bits), [address], text, f"={constraint},l")
            return llvm.bitcast(element, arith.trunci(word(8), x) if size == 1 else x)

        registers = np.empty_like(numbers.registers)
        for where in np.ndindex(registers.shape):
            first = numbers.registers[(where[0], 0, *where[2:])]
            offset = arith.muli(arith.extsi(word(64), vector.extract(first, [], [0])), bytes_of_element)
            address = address_at(base, offset)
            pair = [at(address, TILE_COLUMNS * where[1] + i) for i in range(2)]
            registers[where] = vector.from_elements(ir.VectorType.get((2,), element), pair)
        return type(numbers)(_registers=registers, _layout=numbers.layout, _is_signed=_is_signed(dtype))

    types = (plg.RefType(), plg.Layout.WGMMA)
    return inline(run, types, ref, index, result=array(index.shape, dtype, plg.Layout.WGMMA))


def differ_in_warp(layout: RegisterLayout, x: jax.Array, y: jax.Array) -> jax.Array:
    """True if any element of the warp differs between two arrays: a scalar that may differ between warps."""

    def run(_, one, other):
        pairs = []
        for a, b in zip(one.registers.flat, other.registers.flat, strict=True):
            width = ir.VectorType(a.type).shape[0]
            pairs += [(vector.extract(a, [], [i]), vector.extract(b, [], [i])) for i in range(width)]
        tests = [f"setp.neu.or.f32 any, ${2 * i + 1}, ${2 * i + 2}, any;" for i in range(len(pairs))]
        vote = "vote.sync.any.pred any, any, 0xffffffff; selp.u32 $0, 1, 0, any;"
        text = " ".join(("{ .reg .pred any; setp.ne.u32 any, 0, 0;", *tests, vote, "}"))
        constraints = ",".join(["=r", *["f"] * (2 * len(pairs))])
        any_differs = ptx(word(), [x for pair in pairs for x in pair], text, constraints, side_effects=True)
        return mgpu.FragmentedArray.splat(any_differs, (), is_signed=True)

    return inline(run, (layout, layout), x, y, result=array((), jnp.int32, plg.Layout.WG_SPLAT(()))) != 0


def unknown_zero() -> jax.Array:
    """An int32 zero that the compilers do not know.

    An index that contains it is not loop-invariant: else LLVM computes the descriptors of all wgmma instructions of a
    loop before it, and spills them.
    """
    zero = lambda: ptx(word(), [], "mov.u32 $0, 0;", "=r", side_effects=True)
    splat = lambda _: mgpu.FragmentedArray.splat(zero(), (), is_signed=True)
    return inline(splat, (), result=array((), jnp.int32, plg.Layout.WG_SPLAT(())))


def hardware_barrier(operation: str, barrier: jax.Array, threads: int) -> None:
    """``bar.arrive`` or ``bar.sync`` of one of the 16 named barriers of a CTA.

    Threads that wait at a named barrier sleep; at an mbarrier in shared memory they poll.
    """
    run = lambda _, which: run_ptx([which.registers[()]], f"bar.{operation} $0, {threads};", "r")
    inline(run, (plg.Layout.WG_SPLAT,), barrier)


TILE_COLUMNS = 8  # of the pattern that repeats in the layout of wgmma accumulators; a thread holds two of a row


def continue_columns(layout: RegisterLayout, x: jax.Array, columns: int, sign: int) -> jax.Array:
    """Extends rows of consecutive numbers, of which the first `TILE_COLUMNS` are given, in steps of `sign`."""

    def run(_, start):
        repeated = [start._pointwise(arith.addf, float(sign * i)) for i in range(0, columns, TILE_COLUMNS)]
        return with_registers(start, np.concatenate([part.registers for part in repeated], axis=1))

    return inline(run, (layout,), x, result=array((x.shape[0], columns), x.dtype, layout))


def columns(layout: RegisterLayout, x: jax.Array, first: int, count: int) -> jax.Array:
    """Columns of a tile, a multiple of `TILE_COLUMNS` from a multiple on: registers that a thread has."""
    part = slice(first // TILE_COLUMNS, (first + count) // TILE_COLUMNS)
    run = lambda _, tile: with_registers(tile, tile.registers[:, part])
    return inline(run, (layout,), x, result=array((x.shape[0], count), x.dtype, layout))


def join_columns(layout: RegisterLayout, *parts: jax.Array) -> jax.Array:
    """The tile of these columns, side by side: the inverse of `columns`."""
    run = lambda _, *tiles: with_registers(tiles[0], np.concatenate([tile.registers for tile in tiles], axis=1))
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts))
    return inline(run, (layout,) * len(parts), *parts, result=array(shape, parts[0].dtype, layout))


def sum_columns(layout: RegisterLayout, x: jax.Array) -> jax.Array:
    """Row sums over every `TILE_COLUMNS`-th column: each thread sums its own registers of a row.

    The sums start in the middle: ptxas schedules each addition as early as it can, where it would wait for the
    exponential that was just issued.
    """

    def run(_, tile):
        count = tile.registers.shape[1]
        parts = [tile.registers[:, i : i + 1] for i in range(count)]
        result = parts.pop(count // 2).copy()
        for part in parts:
            for at in np.ndindex(result.shape):
                result[at] = arith.addf(result[at], part[at])
        return with_registers(tile, result)

    return inline(run, (layout,), x, result=array((x.shape[0], TILE_COLUMNS), x.dtype, layout))


def after_barrier(
    barrier: jax.Array, threads: int, layout: RegisterLayout, x: jax.Array, operation: str = "sync"
) -> jax.Array:
    """``bar.sync`` or ``bar.arrive``, and `x` as a value that depends on it.

    ptxas moves arithmetic across barriers, and sees through copies. So the value is selected by the upper half of the
    clock, which never gets to all ones.
    """
    return _tied(f"bar.{operation} $number, {threads}; {_NEVER}", _SELECTED, barrier, layout, x)


def unknown(layout: RegisterLayout, x: jax.Array) -> jax.Array:
    """`x` as a value that the compilers do not know, see `after_barrier`: they convert it no earlier than here."""
    return _tied(_NEVER, _SELECTED, jnp.int32(0), layout, x)


_NEVER = "mov.u32 word, %clock_hi; setp.eq.u32 never, word, -1;"
_SELECTED = "selp.f32 $to, 0f00000000, $of, never;"


def before_barrier(barrier: jax.Array, threads: int, layout: RegisterLayout, x: jax.Array) -> jax.Array:
    """``bar.arrive``, ordered after `x`, which must not be negative: a negative element would name another barrier."""
    return _tied(
        "setp.ne.u32 never, 0, 0;",
        "mov.b32 $to, $of; setp.lt.or.f32 never, $of, 0f00000000, never;",
        barrier,
        layout,
        x,
        after=f"selp.u32 word, 1, 0, never; add.u32 word, word, $number; bar.arrive word, {threads};",
    )


def _tied(
    before: str, each: str, barrier: jax.Array, layout: RegisterLayout, x: jax.Array, *, after: str = ""
) -> jax.Array:
    """Inline PTX over all 32-bit registers of an array: `each` computes ``$to`` from ``$of``."""

    def run(_, which, tile):
        registers, element = list(tile.registers.flat), ir.F32Type.get()
        width = registers[0].type.shape[0] * mgpu.utils.bitwidth(registers[0].type.element_type) // 32
        words = [llvm.bitcast(ir.VectorType.get((width,), element), register) for register in registers]
        values = [vector.extract(word, [], [i]) for word in words for i in range(width)]
        count = len(values)
        lines = [each.replace("$to", f"${i}").replace("$of", f"${count + i}") for i in range(count)]
        text = " ".join(("{ .reg .pred never; .reg .b32 word;", before, *lines, after, "}"))
        result = ptx(
            ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
            [*values, which.registers[()]],
            text.replace("$number", f"${2 * count}"),
            ",".join(["=f"] * count + ["f"] * count + ["r"]),
            side_effects=True,
        )
        values = [llvm.extractvalue(element, result, [i]) for i in range(count)]
        new = np.empty_like(tile.registers)
        for i, at in enumerate(np.ndindex(new.shape)):
            word = vector.from_elements(words[0].type, values[width * i : width * (i + 1)])
            new[at] = llvm.bitcast(registers[0].type, word)
        return with_registers(tile, new)

    return inline(run, (plg.Layout.WG_SPLAT, layout), barrier, x, result=array(x.shape, x.dtype, layout))


def with_registers(tile: mgpu.FragmentedArray, registers: np.ndarray) -> mgpu.FragmentedArray:
    """An array of these registers, in the layout of another."""
    return type(tile)(_registers=registers, _layout=tile.layout, _is_signed=tile.is_signed)


def atomic_increment(counter: Ref, into: Ref, at: jax.Array) -> None:
    """One thread atomically adds 1 to a counter in global memory, and stores the old value in shared memory.

    The atomic is relaxed: MLIR's own, with system-wide ordering, flushes the L1 cache.
    """
    text = "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"

    def run(_, source, target, offset):
        with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
            before = ptx(word(), [mgpu.utils.memref_ptr(source)], text, "=r,l,~{memory}", side_effects=True)
            memref.store(before, target, [arith.index_cast(ir.IndexType.get(), offset.registers[()])])

    inline(run, (plg.RefType(), plg.RefType(), plg.Layout.WG_SPLAT), counter, into, at)
