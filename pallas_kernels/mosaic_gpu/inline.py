"""Element functions and loads that Pallas does not lower for Mosaic GPU by itself, written in its own dialects.

The one place that needs MLIR. Arrays are held by a warp group in registers, in a layout that says which thread has
which element; a function of elements keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plg
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref


def of_elements(function: Callable[..., Any], layout: Any, *args: jax.Array) -> jax.Array:
    """Applies a function of Mosaic GPU's register arrays, all of one shape and layout."""
    shape = args[0].shape

    @plg.inline_mgpu(
        arg_types=(layout,) * len(args),
        return_type=plg.ShapeDtypeStruct(shape, args[0].dtype, layout=layout),
    )
    def apply(_, *registers):
        return function(*registers)

    return apply(*args)


def exp2(layout: Any, x: jax.Array) -> jax.Array:
    """The hardware's exponential (relative error 2 ** -22); results below 2 ** -126 are 0."""
    return of_elements(lambda r: r.exp2(approx=True), layout, x)


def weights(layout: Any, s: jax.Array, unit: float, shift: jax.Array) -> jax.Array:
    """``2 ** (unit * s - shift)``, by one multiply-add and the hardware's exponential."""
    return of_elements(lambda r, c: r._pointwise(math.fma, unit, -c).exp2(approx=True), layout, s, shift)


def tanh(layout: Any, x: jax.Array) -> jax.Array:
    """The hardware's tanh (relative error 2 ** -11)."""
    return of_elements(lambda r: r.tanh(approx=True), layout, x)


def from_library(name: str, layout: Any, x: jax.Array, *others: jax.Array) -> jax.Array:
    """A function of MLIR's ``math`` dialect, which becomes one of CUDA's device library."""
    return of_elements(lambda r, *rest: r._pointwise(getattr(math, name), *rest), layout, x, *others)


def load_elements(ref: Any, index: jax.Array, layout: Any, dtype: Any) -> jax.Array:
    """Elements of an array of one dimension in global memory; every index must be in range."""

    @plg.inline_mgpu(
        arg_types=(plg.RefType(), layout),
        return_type=plg.ShapeDtypeStruct(index.shape, dtype, layout=layout),
    )
    def load(_, source, numbers):
        signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
        element = lambda i, _: memref.load(source, [arith.index_cast(ir.IndexType.get(), i)])
        return numbers.foreach(element, create_array=True, is_signed=signed)

    return load(ref, index)  # pyright: ignore[reportCallIssue]  (what it decorates takes a context first)


def hardware_barrier(operation: str, number: jax.Array, threads: int) -> None:
    """``bar.arrive`` or ``bar.sync`` of one of the 16 barriers that the hardware numbers.

    Threads that wait sleep there; at barriers in shared memory they ask again and again.
    """

    @plg.inline_mgpu(arg_types=(plg.Layout.WG_SPLAT,))
    def run(_, which):
        text = f"bar.{operation} $0, {threads};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [which.registers[()]], text, "r", has_side_effects=True)

    run(number)  # pyright: ignore[reportCallIssue]
