"""Loads, stores and atomic additions: an index of a ref as pointers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import JaxprEqn, Literal, Var

from pallas_kernels.triton.compiler.emit.emitter import Emitter, Rule, UnknownPrimitiveError
from pallas_kernels.triton.compiler.emit.text import Value, axes_of, number_of
from pallas_kernels.types import aval_of

_MAX_INT32_SIZE = 1 << 31  # elements of an array that int32 can count


def _get(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """A load; `jflex_mask_load`, where it follows, takes its line back."""
    aval, (out,) = aval_of(eqn.outvars[0]), eqn.outvars
    dtype = np.dtype(aval.dtype)
    pointer = _pointer(eqn, ins, 1)
    emitter.loads[out] = len(emitter.lines), pointer
    return [emitter.let("load", emitter.dialect.load(pointer, dtype), aval.shape, dtype)]


def _mask_load(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """The load before it, which was made for this mask."""
    line, pointer = emitter.loads.pop(cast(Var, eqn.invars[0]))
    _, mask = ins
    del emitter.lines[line]
    where, other = emitter.dialect.mask(emitter.tensor(mask)), number_of(eqn.params["other"], ins[0].dtype).text
    return emitter.out(eqn, emitter.dialect.load(f"{pointer}, mask={where}, other={other}", ins[0].dtype), "load")


def _mask_store(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Mask of the store that follows."""
    emitter.masks[eqn.outvars[0]] = ins[1]
    return ins[:1]


def _swap(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """A store; what was there before is never used in a kernel."""
    pointer, value, dtype = _pointer(eqn, ins, 2), ins[1], ins[0].dtype
    mask = None if isinstance(eqn.invars[1], Literal) else emitter.masks.pop(eqn.invars[1], None)
    masked = "" if mask is None else f", mask={emitter.dialect.mask(emitter.tensor(mask))}"
    emitter.put(f"tl.store({pointer}, {emitter.dialect.stored(emitter.tensor(value), dtype)}{masked})")
    return [value]


def _addupdate(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    pointer, value = _pointer(eqn, ins, 2), emitter.tensor(ins[1])
    emitter.put(f'tl.atomic_add({pointer}, {emitter.dialect.stored(value, ins[0].dtype)}, sem="relaxed")')
    return []


def _pointer(eqn: JaxprEqn, ins: list[Value], first: int) -> str:
    """The pointers that an equation reads or writes; its index begins at operand `first`."""
    known = {id(v): x for v, x in zip(eqn.invars, ins, strict=True)}
    read = lambda x: known[id(x)] if id(x) in known else number_of(getattr(x, "val", x))
    transforms = jax.tree.unflatten(eqn.params["tree"], eqn.invars[first:])
    ref = ins[0]
    if len(transforms) > 1 or not all(hasattr(x, "indices") for x in transforms):
        raise UnknownPrimitiveError(f"the primitive `{eqn.primitive.name}` with more than one index")
    if transforms:
        indices, arrays = transforms[0].indices, len(transforms[0].int_indexer_shape)
    else:
        indices, arrays = [pl.ds(0, size) for size in ref.shape], 0
    offset = _offset(indices, arrays, ref.shape, read)
    return f"{ref.text} + {offset}" if offset else ref.text


def _offset(indices: Sequence[Any], arrays: int, shape: tuple[int, ...], read: Callable[[Any], Value]) -> str:
    """Offset of an index from a pointer; its first `arrays` axes are of arrays, the others of slices."""
    slices = [x for x in indices if isinstance(x, pl.Slice)]
    rank, axis, terms = arrays + len(slices), arrays, []
    wide = math.prod(shape) >= _MAX_INT32_SIZE
    for i, index in enumerate(indices):
        stride = math.prod(shape[i + 1 :])
        if isinstance(index, pl.Slice):
            start, text = read(index.start), f"tl.arange(0, {index.size}){axes_of(rank, [axis])}"
            text, axis = text if start.text == "0" else f"({start.text} + {text})", axis + 1
        else:
            value = read(index)
            text = value.text + (axes_of(rank, range(len(value.shape))) if value.shape and slices else "")
            if value.text == "0":
                continue
        text = f"{text}.to(tl.int64)" if wide and not text.isdigit() else text
        terms.append(text if stride == 1 else f"{text} * {stride}")
    return " + ".join(terms) if len(terms) < 2 else f"({' + '.join(terms)})"


RULES: dict[str, Rule] = {
    "addupdate": _addupdate,
    "get": _get,
    "jflex_mask_load": _mask_load,
    "jflex_mask_store": _mask_store,
    "swap": _swap,
}
