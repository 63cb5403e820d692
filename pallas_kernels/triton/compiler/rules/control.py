"""Loops and branches."""

from __future__ import annotations

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from pallas_kernels.program.build import scan_layout
from pallas_kernels.triton.compiler.emit.emitter import Emitter, Rule, UnknownPrimitiveError
from pallas_kernels.triton.compiler.emit.text import Value, number_of
from pallas_kernels.types import aval_of

_INT32 = np.dtype("int32")


def _loop(
    emitter: Emitter,
    body: Jaxpr,
    consts: list[Value],
    first: list[Value],
    bounds: tuple[Value, Value],
    counter: int | None,
    end: int | None = None,
) -> list[Value]:
    """A ``for`` between bounds; `counter` and `end` number the carried values that are its counter and its end."""
    others = [i for i in range(len(first)) if i not in (counter, end)]
    carried = [emitter.let("carry", emitter.tensor(first[i]), first[i].shape, first[i].dtype) for i in others]
    count = Value(emitter.name("i"), (), _INT32)
    emitter.put(f"for {count.text} in tl.range({bounds[0].text}, {bounds[1].text}):")

    def values_at(count: Value) -> list[Value]:
        values = {end: bounds[1], counter: count, **dict(zip(others, carried, strict=True))}
        return [values[i] for i in range(len(first))]

    def emit_body() -> None:
        if (line := emitter.dialect.counter(count.text)) is not None:
            emitter.put(line)
        outs = emitter.block(body, [*consts, *values_at(count)])
        changed = [(old, outs[i]) for i, old in zip(others, carried, strict=True) if old.text != outs[i].text]
        names = {x.text for x in carried}
        # One that becomes another is kept apart until all of them change.
        kept = [
            new if new.text not in names else emitter.let("next", new.text, new.shape, new.dtype) for _, new in changed
        ]
        for (old, _), new in zip(changed, kept, strict=True):
            emitter.put(f"{old.text} = {emitter.tensor(new)}")

    emitter.body(emit_body)
    return values_at(bounds[1])


def _while(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """A `lax.fori_loop` whose bounds are known at run time: ``while i < end``, with ``i + 1`` carried on."""
    test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    tested, constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, first = ins[tested : tested + constants], ins[tested + constants :]
    low, high = _counted(test, body, tested, constants)
    return _loop(emitter, body, consts, first, (first[low], first[high]), low, high)


def _counted(test: Jaxpr, body: Jaxpr, tested: int, constants: int) -> tuple[int, int]:
    """Numbers of the carried counter and of its end."""
    carry = body.invars[constants:]
    if len(test.eqns) == 1 and test.eqns[0].primitive.name == "lt":
        sides = [test.invars.index(v) - tested if not isinstance(v, Literal) else -1 for v in test.eqns[0].invars]
        low, high = sides
        if low >= 0 and high >= 0 and body.outvars[high] is carry[high] and _counts(body, constants, low):
            return low, high
    raise UnknownPrimitiveError("the primitive `while`, but for `lax.fori_loop`")


def _scan(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """A `lax.fori_loop` of a known number of steps."""
    params, body = eqn.params, eqn.params["jaxpr"].jaxpr
    consts, carried = scan_layout(params)
    if consts + carried != len(ins) or params["reverse"]:
        raise UnknownPrimitiveError("the primitive `scan`, but for `lax.fori_loop`")
    constants, first = ins[:consts], ins[consts:]
    counting = (i for i in range(carried) if first[i].is_number and _counts(body, consts, i))
    number = next(counting, None)
    start = 0 if number is None else int(first[number].text.strip("()"))
    return _loop(emitter, body, constants, first, (number_of(start), number_of(start + params["length"])), number)


def _counts(body: Jaxpr, consts: int, i: int) -> bool:
    """True if a loop adds one to the ith scalar that it carries."""
    number, new = body.invars[consts + i], body.outvars[i]
    is_one = lambda v: isinstance(v, Literal) and v.val == 1
    return not aval_of(number).shape and any(
        eqn.outvars[0] is new and eqn.primitive.name == "add" and eqn.invars[0] is number and is_one(eqn.invars[1])
        for eqn in body.eqns
    )


def _cond(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """The last branch is that of the largest index."""
    which, args = emitter.tensor(ins[0]), ins[1:]
    outs = [Value(emitter.name("branch"), aval_of(v).shape, np.dtype(aval_of(v).dtype)) for v in eqn.outvars]

    def body(branch: Jaxpr) -> None:
        for out, value in zip(outs, emitter.block(branch, args), strict=True):
            emitter.put(f"{out.text} = {emitter.tensor(value)}")

    branches = list(enumerate(eqn.params["branches"]))
    for n, branch in reversed(branches):
        emitter.put("else:" if n == 0 else f"{'if' if n == len(branches) - 1 else 'elif'} {which} >= {n}:")
        emitter.body(lambda branch=branch: body(branch.jaxpr))
    return outs


RULES: dict[str, Rule] = {"cond": _cond, "scan": _scan, "while": _while}
