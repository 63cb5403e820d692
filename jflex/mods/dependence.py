"""Uses of the indices in a mod's program: on which its result depends, and faults that show before a call computes.

* An array that is indexed by an index of the call itself, ``slopes[h]`` or ``ids[b, q_idx]``, must be long enough: JAX
  clamps an index beyond the end, so that a shorter one would repeat its last element in silence. An axis of size 1 is
  broadcast, as in a mask [B, 1, T, S]. Computed indices (``jnp.minimum(h, 3)``), other modes of indexing
  (`jax.numpy.take`), branches and loops are not checked.
* An integer to a negative power is 0 in JAX, so ``2 ** -(h + 1)`` is. JAX expands the power by repeated squaring; it is
  recognized by the sequence of primitives that `jax.numpy.power` leaves, except in loops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jflex.mods.array_sizes import Axis, Requirement
from jflex.mods.batchable import CALLS
from jflex.mods.fingerprint import Open, aval_of, open_jaxpr, sub_jaxpr
from pallas_kernels.program.ir import RANGES, Bounds
from pallas_kernels.spec import Mod

_INDEX_POSITIONS = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}
_ELEMENTS = {"b": "batch entry", "h": "query head", "q_idx": "query", "kv_idx": "key"}
_SAME_SHAPE = frozenset({"convert_element_type", "copy", "pvary", "pcast"})
_KEEP = _SAME_SHAPE | {"squeeze", "reshape", "broadcast_in_dim"}
_POSITIONS: Bounds = (0, 1 << 30)
_ANY: Bounds = (-(1 << 63), 1 << 63)


def uses_index(traced: Mod, index: str) -> bool:
    """True if the result of a mask_mod can depend on one of its indices: ``"b"``, ``"h"``, ``"q_idx"`` or ``"kv_idx"``.

    Loops and branches count as using whatever enters them.

    >>> from jflex.mods.trace import trace_mask_mod
    >>> traced, _ = trace_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - h >= kv_idx)
    >>> uses_index(traced, "h"), uses_index(traced, "b")
    (True, False)
    """
    jaxpr = open_jaxpr(traced.jaxpr).jaxpr
    return _INDEX_POSITIONS[index] in used_inputs(jaxpr, [True])


def used_inputs(jaxpr: core.Jaxpr, outputs_used: Sequence[bool]) -> set[int]:
    """Indices of the inputs of a jaxpr on which the used outputs can depend."""
    live = {v for v, want in zip(jaxpr.outvars, outputs_used, strict=True) if want and not isinstance(v, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outputs = [v in live for v in eqn.outvars]
        if not any(outputs):
            continue
        inner = sub_jaxpr(eqn)
        inputs = range(len(eqn.invars))
        if inner is not None and len(inner.jaxpr.invars) == len(eqn.invars) and eqn.primitive.name in ("jit", "pjit"):
            inputs = used_inputs(inner.jaxpr, outputs)
        live |= {eqn.invars[i] for i in inputs if not isinstance(eqn.invars[i], core.Literal)}
    return {i for i, v in enumerate(jaxpr.invars) if v in live}


def index_requirements(program: core.ClosedJaxpr, role: str, source: str) -> tuple[Requirement, ...]:
    """The requirements on a call of the arrays that a mod indexes by its arguments."""
    walk = _IndexWalk(source, _ELEMENTS | {"h": "key head"} if role in ("key", "value") else _ELEMENTS)
    walk.run(open_jaxpr(program), [_Index((axis,)) for axis in _axes_of(role)])
    return tuple(walk.required.values())


def check_integer_powers(program: core.ClosedJaxpr, role: str, source: str) -> None:
    """Raises ValueError for a power of an integer that may be negative; arguments as of `index_requirements`."""
    if not _has_powers(open_jaxpr(program)):
        return
    walk = _BoundsWalk()
    walk.run(open_jaxpr(program), [_POSITIONS] * len(_axes_of(role)))
    if walk.may_be_negative:
        raise ValueError(
            f"`{role}_mod` cannot raise an integer to a power that may be negative, for which JAX gives 0: {source} "
            "does. Raise a float, as in `2.0 ** -(h + 1)` or `jnp.exp2`. Or make the power unsigned, or "
            "`jnp.maximum(power, 0)`."
        )


def _axes_of(role: str) -> tuple[Axis, ...]:
    """The indices that are the last arguments of a mod."""
    if role in ("score", "mask"):
        return ("b", "h", "q_idx", "kv_idx")
    return ("b", "h", "kv_idx") if role in ("key", "value") else ("b", "h", "q_idx")


_Known = TypeVar("_Known")


class _Walk(Generic[_Known]):
    """Interprets a program on what is known of its values; None if nothing is."""

    def run(self, opened: Open, args: Sequence[_Known | None]) -> list[_Known | None]:
        """Interprets the equations; `args` are the last arguments."""
        arguments = opened.jaxpr.invars[len(opened.jaxpr.invars) - len(args) :]
        env: dict[core.Var, _Known | None] = dict(zip(arguments, args, strict=True))
        read = lambda v: self.literal(v) if isinstance(v, core.Literal) else env.get(v)
        for eqn in opened.jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            out, inner = self.equation(eqn, ins), sub_jaxpr(eqn) if eqn.primitive.name in CALLS else None
            outs = [out] if inner is None or out is not None else self.run(inner, ins)
            env.update(zip(eqn.outvars, outs, strict=False))
        self.visit(opened.jaxpr, env)
        return [read(v) for v in opened.jaxpr.outvars]

    def literal(self, literal: core.Literal) -> _Known | None:
        """Interprets a constant."""
        return None

    def equation(self, eqn: core.JaxprEqn, ins: Sequence[_Known | None]) -> _Known | None:
        """Interprets an equation of one result; a call with no result here is entered."""
        raise NotImplementedError

    def visit(self, jaxpr: core.Jaxpr, env: Mapping[core.Var, _Known | None]) -> None:
        """Called with the values of a program, and of each that it calls."""


class _Index(NamedTuple):
    """An integer array that holds indices of the call."""

    # the index that each component of the last axis is, None for none; one stands for all elements
    axes: tuple[Axis | None, ...]
    is_compared: bool = False  # whether the array holds whether that index is negative


class _IndexWalk(_Walk[_Index]):
    """Collects the requirements of arrays that are read at an index of the call."""

    def __init__(self, source: str, elements: Mapping[str, str]) -> None:
        self.source, self.elements = source, elements
        self.required: dict[tuple[str, str, int], Requirement] = {}

    def equation(self, eqn: core.JaxprEqn, ins: Sequence[_Index | None]) -> _Index | None:
        """Follows an index through casts, broadcasts, and the wrapping of negative ones, which it is not."""
        name, first = eqn.primitive.name, ins[0] if ins else None
        if name == "dynamic_slice":
            for axis, index in enumerate(ins[1:]):
                self._require(eqn, axis, None if index is None else index.axes[0])
        elif name == "gather" and eqn.params["mode"].name == "PROMISE_IN_BOUNDS" and ins[1] is not None:
            axes = ins[1].axes
            for component, axis in enumerate(eqn.params["dimension_numbers"].start_index_map):
                self._require(eqn, axis, axes[component if len(axes) > 1 else 0])
        elif name == "concatenate":
            return _joined(eqn, ins)
        elif first is None:
            return None
        elif name == "lt" and isinstance(eqn.invars[1], core.Literal) and eqn.invars[1].val == 0:
            return first._replace(is_compared=True)
        elif name == "select_n" and first.is_compared and ins[1] == first._replace(is_compared=False):
            return ins[1]
        elif name in _SAME_SHAPE or (name in _KEEP and len(first.axes) == 1):
            return first
        return None

    def _require(self, eqn: core.JaxprEqn, axis: int, index: Axis | None) -> None:
        array = aval_of(eqn.invars[0])
        size = array.shape[axis]
        if index is None or size == 1 or eqn.params["slice_sizes"][axis] != 1:
            return
        shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        on_axis = f" on axis {axis}" if len(array.shape) > 1 else ""
        rule = (
            f"An array that a mod indexes by `{index}` must hold an element for each {self.elements[index]}. "
            f"{self.source} indexes {shape}{on_axis}"
        )
        remedy = f"Pass an array for {{}}. To repeat the last element, index it by `jnp.minimum({index}, {size - 1})`."
        self.required[index, shape, axis] = Requirement(index, size, rule, remedy, is_exact=False)


def _joined(eqn: core.JaxprEqn, ins: Sequence[_Index | None]) -> _Index | None:
    """An index vector, from its components."""
    if eqn.params["dimension"] != len(aval_of(eqn.outvars[0]).shape) - 1:
        return None
    parts = []
    for index, v in zip(ins, eqn.invars, strict=True):
        parts += (None,) * aval_of(v).shape[-1] if index is None else index.axes * aval_of(v).shape[-1]
    return _Index(tuple(parts)) if len(parts) == aval_of(eqn.outvars[0]).shape[-1] else None


class _BoundsWalk(_Walk[Bounds]):
    """Bounds of integers, as if nothing wrapped; finds powers of integers that these do not prove to be at least 0."""

    def __init__(self) -> None:
        self.may_be_negative = False

    def literal(self, literal: core.Literal) -> Bounds | None:
        """The number itself."""
        value = np.asarray(literal.val)
        return (int(value), int(value)) if value.dtype.kind in "iu" else None

    def equation(self, eqn: core.JaxprEqn, ins: Sequence[Bounds | None]) -> Bounds | None:
        """Bounds of one result, by the rules of tile programs; enters the branches of a `lax.cond`."""
        for branch in eqn.params.get("branches", ()):
            self.run(open_jaxpr(branch), ins[1:])
        if len(eqn.outvars) != 1 or not jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.integer):
            return None
        if jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.unsignedinteger):
            return _POSITIONS
        name, called = eqn.primitive.name, eqn.params.get("name")
        operands = [_ANY if x is None else x for x in (ins[1:] if name == "select_n" else ins)]
        positive = [x for x in operands if x[0] >= 0]
        if name in _KEEP:
            return operands[0]
        if name == "and" and positive:
            return 0, min(high for _, high in positive)
        if called == "remainder" and operands[1][0] > 0:
            return 0, operands[1][1] - 1
        if called == "floor_divide" and len(positive) == 2:
            return RANGES["div"](*positive)
        return RANGES[name](*operands) if name in RANGES else None

    def visit(self, jaxpr: core.Jaxpr, env: Mapping[core.Var, Bounds | None]) -> None:
        """Compares the exponents of powers with 0."""
        for exponent in _exponents(jaxpr):
            bounds = self.literal(exponent) if isinstance(exponent, core.Literal) else env.get(exponent)
            self.may_be_negative |= (bounds or _ANY)[0] < 0


def _has_powers(opened: Open) -> bool:
    """True if a program raises integers to a power, in its calls and branches too."""
    calls = [sub_jaxpr(eqn) for eqn in opened.jaxpr.eqns if eqn.primitive.name in CALLS]
    branches = [open_jaxpr(x) for eqn in opened.jaxpr.eqns for x in eqn.params.get("branches", ())]
    return bool(_exponents(opened.jaxpr)) or any(_has_powers(x) for x in (*calls, *branches) if x is not None)


def _exponents(jaxpr: core.Jaxpr) -> list[core.Var | core.Literal]:
    """The exponents of powers: a power is recognized by its sequence of primitives."""
    names, (sequence, at, operand) = [eqn.primitive.name for eqn in jaxpr.eqns], _power()
    starts = (i for i in range(len(names) - len(sequence) + 1) if names[i : i + len(sequence)] == sequence)
    return [jaxpr.eqns[start + at].invars[operand] for start in starts]


@functools.cache
def _power() -> tuple[list[str], int, int]:
    """The primitives of a power of integers, and where the exponent enters: the equation and its operand."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = open_jaxpr(jax.make_jaxpr(lambda x, exponent: jnp.power(x, exponent))(index, index)).jaxpr
    equation = next(i for i, eqn in enumerate(jaxpr.eqns) if jaxpr.invars[1] in eqn.invars)
    operand = jaxpr.eqns[equation].invars.index(jaxpr.invars[1])
    return [eqn.primitive.name for eqn in jaxpr.eqns], equation, operand
