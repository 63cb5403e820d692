"""Primitives that make, move, reduce and multiply tiles."""

from __future__ import annotations

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from pallas_kernels.triton.compiler.emit.emitter import Emitter, Rule, UnknownPrimitiveError
from pallas_kernels.triton.compiler.emit.text import Value, axes_of, is_float, number_of, of_shape, spread
from pallas_kernels.types import aval_of


def _iota(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    shape, axis, dtype = eqn.params["shape"], eqn.params["dimension"], np.dtype(eqn.params["dtype"])
    text = f"tl.arange(0, {shape[axis]})" + axes_of(len(shape), [axis])
    text = text if dtype == np.int32 else emitter.dialect.cast(text, dtype)
    return emitter.out(eqn, spread(text, [n if i == axis else 1 for i, n in enumerate(shape)], shape))


def _filled(emitter: Emitter, eqn: JaxprEqn, value: Value) -> list[Value]:
    """A scalar at every place of the output."""
    shape = aval_of(eqn.outvars[0]).shape
    return emitter.out(eqn, f"tl.full({of_shape(shape)}, {value.text}, {emitter.dialect.dtype(value.dtype)})", "full")


def _broadcast_in_dim(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Broadcasts an array; `broadcast_to` adds axes in front."""
    shape, value = aval_of(eqn.outvars[0]).shape, ins[0]
    kept = eqn.params.get("broadcast_dimensions", range(len(shape) - len(value.shape), len(shape)))
    if not value.shape:
        return _filled(emitter, eqn, value)
    sizes = [value.shape[kept.index(i)] if i in kept else 1 for i in range(len(shape))]
    return emitter.out(eqn, spread(value.text + axes_of(len(shape), kept), sizes, shape), "broadcast")


def _reshape(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    shape, value = aval_of(eqn.outvars[0]).shape, ins[0]
    if value.shape == shape:
        return ins[:1]
    if not value.shape:
        return _filled(emitter, eqn, value)
    if not shape:  # one element
        return emitter.out(eqn, _reduced(emitter, "sum", value, range(len(value.shape))), "element")
    return emitter.out(eqn, f"tl.reshape({value.text}, {of_shape(shape)})", "reshape")


def _transpose(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    return emitter.out(eqn, f"tl.permute({ins[0].text}, {of_shape(eqn.params['permutation'])})")


def _split(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """The two halves of a last axis of 2; nothing else is split in a kernel."""
    (value,), last = ins, len(ins[0].shape) - 1
    if value.shape[-1] != 2 or eqn.params.get("axis", last) != last:
        raise UnknownPrimitiveError(f"the primitive `{eqn.primitive.name}` of an array of shape {value.shape}")
    names = [emitter.name("part") for _ in eqn.outvars]
    emitter.put(f"{', '.join(names)} = tl.split({value.text})")
    inner = value.shape[:-1]
    halves = [Value(name, inner, value.dtype) for name in names]
    shape = aval_of(eqn.outvars[0]).shape
    if shape == inner:
        return halves
    return [emitter.let("part", f"tl.reshape({x.text}, {of_shape(shape)})", shape, value.dtype) for x in halves]


def _reduced(emitter: Emitter, name: str, value: Value, axes: range | tuple[int, ...]) -> str:
    """A reduction; of 16 bits in float32, in which Triton's functions give their results."""
    narrow = is_float(value.dtype) and value.dtype.itemsize == 2
    text, function = f"{value.text}.to(tl.float32)" if narrow else value.text, f"tl.{name}"
    if name in ("max", "min") and is_float(value.dtype):
        function = emitter.dialect.extreme(f"{name}imum")
    for axis in sorted(axes, reverse=True):
        text = f"{function}({text}, {axis})"
    return emitter.dialect.cast(text, value.dtype) if narrow else text


def _reduce(name: str) -> Rule:
    return lambda emitter, eqn, ins: emitter.out(
        eqn, _reduced(emitter, name, ins[0], eqn.params["axes"]), f"reduce_{name}"
    )


def _reduce_bool(name: str) -> Rule:
    def rule(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        value = ins[0]._replace(text=f"{ins[0].text}.to(tl.int32)", dtype=np.dtype("int32"))
        return emitter.out(eqn, f"{_reduced(emitter, name, value, eqn.params['axes'])} != 0")

    return rule


def _cumsum(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    reverse = ", reverse=True" if eqn.params["reverse"] else ""
    return emitter.out(eqn, f"tl.cumsum({ins[0].text}, {eqn.params['axis']}{reverse})")


_EXACT = ("F32_F32_F32", "HIGHEST")
_ALGORITHMS = {"TF32_TF32_F32": "tf32", "TF32_TF32_F32_X3": "tf32x3", **dict.fromkeys(_EXACT, "ieee")}


def _dot_general(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    ((over_a,), (over_b,)), batch = eqn.params["dimension_numbers"]
    if batch != ((), ()):
        raise UnknownPrimitiveError("the primitive `dot_general` with batch axes")
    turned = [
        f"tl.trans({x.text})" if turn else x.text for x, turn in zip(ins, (over_a == 0, over_b == 1), strict=True)
    ]
    precision = _input_precision(emitter, eqn, ins[0].dtype)
    return emitter.out(eqn, f'tl.dot({turned[0]}, {turned[1]}, input_precision="{precision}")', "dot")


def _input_precision(emitter: Emitter, eqn: JaxprEqn, dtype: np.dtype) -> str:
    """TF32 for float32 by default, as in Pallas' Triton."""
    if dtype != np.float32:
        return "ieee"  # products of 16 bits are exact
    precision = eqn.params["precision"]
    precision = precision[0] if isinstance(precision, tuple) else precision
    if precision is None or precision in (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.DotAlgorithmPreset.DEFAULT):
        input_precision = "tf32"
    elif precision.name in _ALGORITHMS:
        input_precision = _ALGORITHMS[precision.name]
    else:
        raise UnknownPrimitiveError(f"the primitive `dot_general` with precision {precision.name}")
    return input_precision if emitter.dialect.tf32 else "ieee"


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast_to": _broadcast_in_dim,
    "cumsum": _cumsum,
    "dot_general": _dot_general,
    "expand_dims": _reshape,
    "iota": _iota,
    "num_programs": lambda emitter, eqn, _: [number_of(emitter.grid[eqn.params["axis"]])],
    "program_id": lambda emitter, eqn, _: [emitter.program_id(eqn.params["axis"])],
    "reduce_and": _reduce_bool("min"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_or": _reduce_bool("max"),
    "reduce_sum": _reduce("sum"),
    "reshape": _reshape,
    "split": _split,
    "squeeze": _reshape,
    "transpose": _transpose,
    "unstack": _split,
}
