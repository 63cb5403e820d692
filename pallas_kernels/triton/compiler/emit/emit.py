"""From the jaxpr of a kernel to Triton source.

`pl.pallas_call` leaves an equation with the jaxpr of the kernel, which works on refs to whole arrays. All sizes are
known, so they are numbers of the source, and a kernel takes nothing but pointers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from pallas_kernels.plan import Refusal
from pallas_kernels.triton.compiler.emit.dialect import Dialect
from pallas_kernels.triton.compiler.emit.emitter import Emitter, Rule, UnknownPrimitiveError, described
from pallas_kernels.triton.compiler.emit.text import Value
from pallas_kernels.triton.compiler.rules import arrays, control, elementwise, memory
from pallas_kernels.types import aval_of

_HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
# NaN counts, as in JAX: `tl.max` leaves it out.
_HELPERS = {
    f"_reduce_{name}": f"""

@triton.jit
def _{name}(a, b):
    return tl.{name}(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _reduce_{name}(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _{name})
"""
    for name in ("maximum", "minimum")
}

RULES: dict[str, Rule] = {**elementwise.RULES, **arrays.RULES, **memory.RULES, **control.RULES}


class Source(NamedTuple):
    """The source of a kernel, with what a launch must know."""

    text: str  # the source of a module
    name: str  # the kernel in it
    dtypes: tuple[str, ...]  # what its arguments point to: the inputs, then the outputs that are no memory of an input
    grid: tuple[int, int, int]  # programs along each axis, three


class Launched(NamedTuple):
    """A kernel as `pl.pallas_call` traced it."""

    name: str
    jaxpr: Jaxpr  # it takes refs to the inputs and then to the outputs
    grid: tuple[int, ...]  # programs along each axis
    shapes: tuple[tuple[int, ...], ...]  # of the whole arrays, inputs and outputs
    # for each of them the jaxpr from the indices of the grid to those of its block; None where the block is the whole
    # array
    block_index: tuple[ClosedJaxpr | None, ...]
    aliases: dict[int, int]  # for outputs in the memory of an input: which input
    inputs: int


def emit(launched: Launched, names: Sequence[str], dialect: Dialect) -> Source | Refusal:
    """Emits a kernel with these names of its arguments, inputs and outputs."""
    try:
        return _kernel(Emitter(dialect, RULES, launched.grid, names), launched, names)
    except UnknownPrimitiveError as error:
        return Refusal(f"its emitter has no rule for {error}, in kernel `{launched.name}`")


def _kernel(emitter: Emitter, launched: Launched, names: Sequence[str]) -> Source:
    """The source of a whole kernel."""
    inputs, avals = launched.inputs, [aval_of(v) for v in launched.jaxpr.invars]
    at = {inputs + output: argument for output, argument in launched.aliases.items()}
    unaliased = [n for n in range(len(names)) if n not in at]
    refs = []
    for n, (aval, index) in enumerate(zip(avals, launched.block_index, strict=True)):
        text = names[at.get(n, n)]
        if index is not None:
            text = _block(emitter, text, launched.shapes[n], aval.shape, index)
        refs.append(Value(text, aval.shape, np.dtype(aval.dtype)))
    emitter.block(launched.jaxpr, refs)
    parameters = [f"    {names[n]},  # {described(launched.shapes[n], avals[n].dtype)}" for n in unaliased]
    body = "\n".join(emitter.lines or ["    pass"])
    helpers = "".join(text for name, text in _HELPERS.items() if f"{name}(" in body)
    head = "\n".join([f"@triton.jit\ndef {launched.name}(", *parameters, "):"])
    grid = emitter.launch_grid
    dtypes = tuple(np.dtype(avals[n].dtype).name for n in unaliased)
    return Source(f"{_HEADER}{helpers}\n\n{head}\n{body}\n", launched.name, dtypes, grid)


def _block(emitter: Emitter, pointer: str, whole: tuple[int, ...], part: tuple[int, ...], index: ClosedJaxpr) -> str:
    """A pointer to the block of a program: of a whole array, but for leading axes, which `jax.vmap` adds."""
    at = emitter.block(index.jaxpr, [emitter.program_id(axis) for axis in range(len(emitter.grid))])
    outer = len(whole) - len(part)
    if tuple(whole[outer:]) != tuple(part) or any(x.text != "0" for x in at[outer:]):
        raise UnknownPrimitiveError(f"blocks {part} of an array {whole}")
    terms = [f"{x.text}.to(tl.int64) * {math.prod(whole[i + 1 :])}" for i, x in enumerate(at[:outer]) if x.text != "0"]
    return (
        pointer if not terms else emitter.let(pointer, f"{pointer} + {' + '.join(terms)}", part, np.dtype("int64")).text
    )
