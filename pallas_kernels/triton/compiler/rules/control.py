"""Loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from pallas_kernels.program.build import scan_layout
from pallas_kernels.triton.compiler.emit.emitter import Emitter, Rule, UnknownPrimitiveError
from pallas_kernels.triton.compiler.emit.text import Value, number_of
from pallas_kernels.types import aval_of

_INT32 = np.dtype("int32")


def _loop(
    emitter: Emitter, bounds: tuple[str, str], first: Sequence[Value], step: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """A ``for``: `step` takes the counter and what is carried, and gives what is carried on."""
    carried = [emitter.let("carry", emitter.tensor(x), x.shape, x.dtype) for x in first]
    counter = Value(emitter.name("i"), (), _INT32)
    emitter.put(f"for {counter.text} in tl.range({bounds[0]}, {bounds[1]}):")

    def body() -> None:
        if (line := emitter.dialect.counter(counter.text)) is not None:
            emitter.put(line)
        outs = step(counter, carried)
        changed = [(old, new) for old, new in zip(carried, outs, strict=True) if old.text != new.text]
        names = {x.text for x in carried}
        # One that becomes another is kept apart until all of them change.
        kept = [
            new if new.text not in names else emitter.let("next", new.text, new.shape, new.dtype) for _, new in changed
        ]
        for (old, _), new in zip(changed, kept, strict=True):
            emitter.put(f"{old.text} = {emitter.tensor(new)}")

    emitter.body(body)
    return carried


def _while(emitter: Emitter, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """A `lax.fori_loop` whose bounds are known at run time: ``while i < end``, with ``i + 1`` carried on."""
    test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    tested, constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, first = ins[tested : tested + constants], ins[tested + constants :]
    low, high = _counted(test, body, tested, constants)
    others = [i for i in range(len(first)) if i not in (low, high)]

    def step(counter: Value, carried: list[Value]) -> list[Value]:
        now = {low: counter, high: first[high], **dict(zip(others, carried, strict=True))}
        outs = emitter.block(body, [*consts, *(now[i] for i in range(len(first)))])
        return [outs[i] for i in others]

    last = _loop(emitter, (first[low].text, first[high].text), [first[i] for i in others], step)
    outs = {low: first[high], high: first[high], **dict(zip(others, last, strict=True))}
    return [outs[i] for i in range(len(first))]


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
    others = [i for i in range(carried) if i != number]

    def step(counter: Value, now: list[Value]) -> list[Value]:
        values: dict[int | None, Value] = {number: counter, **dict(zip(others, now, strict=True))}
        outs = emitter.block(body, [*constants, *(values[i] for i in range(carried))])
        return [outs[i] for i in others]

    end = start + params["length"]
    last = _loop(emitter, (str(start), str(end)), [first[i] for i in others], step)
    outs: dict[int | None, Value] = {number: number_of(np.int32(end)), **dict(zip(others, last, strict=True))}
    return [outs[i] for i in range(carried)]


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
