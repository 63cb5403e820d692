"""Jaxprs as bytes: programs of mods in pickles, for the version of JAX that traced them.

A jaxpr holds Python functions of JAX, which cannot be pickled. Here primitives are stored by name, and bound again
while JAX traces the program anew.
"""

from __future__ import annotations

import functools
import pickle
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives
from jax.typing import ArrayLike

from jflex.mods.fingerprint import Open, aval_of, open_jaxpr


class _Number(NamedTuple):
    """A literal: its value, and whether JAX may change its dtype."""

    value: np.ndarray
    is_weak: bool


class _Equation(NamedTuple):
    """An equation; values of the program are numbered."""

    primitive: str
    params: dict[str, object]
    inputs: tuple[int | _Number, ...]
    outputs: tuple[int, ...]


class _Program(NamedTuple):
    """A jaxpr. Constants have the first numbers, arguments the next."""

    constants: tuple[np.ndarray, ...]
    arguments: tuple[tuple[tuple[int, ...], np.dtype, bool], ...]  # shape, dtype, whether it is weak
    equations: tuple[_Equation, ...]
    results: tuple[int | _Number, ...]


def store_program(jaxpr: core.ClosedJaxpr) -> bytes:
    """The bytes of a program."""
    return pickle.dumps(_stored(open_jaxpr(jaxpr)))


def load_program(stored: bytes) -> core.ClosedJaxpr:
    """The program of these bytes, by the version of JAX that stored it.

    >>> program = jax.make_jaxpr(lambda x: jax.numpy.where(x > 1, x, 0.5))(np.float32(2))
    >>> core.jaxpr_as_fun(load_program(store_program(program)))(np.float32(0))
    [Array(0.5, dtype=float32)]
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _traced(pickle.loads(stored))


@functools.cache
def _primitives() -> dict[str, core.Primitive]:
    return {x.name: x for x in vars(primitives).values() if isinstance(x, core.Primitive)}


def _stored(opened: Open) -> _Program:
    jaxpr, numbers = opened.jaxpr, dict[core.Var, int]()
    for v in (*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)):
        numbers[v] = len(numbers)

    def read(v: core.Var | core.Literal) -> int | _Number:
        if not isinstance(v, core.Literal):
            return numbers[v]
        return _Number(np.asarray(v.val, aval_of(v).dtype), bool(getattr(v.aval, "weak_type", False)))

    equations = (
        _Equation(
            _name(eqn),
            {key: _param(eqn, x) for key, x in eqn.params.items()},
            tuple(map(read, eqn.invars)),
            tuple(numbers[v] for v in eqn.outvars),
        )
        for eqn in jaxpr.eqns
    )
    arguments = ((aval_of(v).shape, aval_of(v).dtype, bool(getattr(v.aval, "weak_type", False))) for v in jaxpr.invars)
    constants = tuple(map(np.asarray, opened.consts))
    return _Program(constants, tuple(arguments), tuple(equations), tuple(map(read, jaxpr.outvars)))


def _name(eqn: core.JaxprEqn) -> str:
    if _primitives().get(eqn.primitive.name) is not eqn.primitive:
        raise TypeError(f"primitive `{eqn.primitive.name}` has no public name")
    return eqn.primitive.name


def _param(eqn: core.JaxprEqn, value: object) -> object:
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        return _stored(open_jaxpr(value))
    if type(value) is tuple:
        return tuple(_param(eqn, x) for x in value)
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"primitive `{eqn.primitive.name}` holds a Python function") from error
    return value


def _traced(program: _Program) -> core.ClosedJaxpr:
    avals = [jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak) for shape, dtype, is_weak in program.arguments]
    constants = tuple(map(jax.numpy.asarray, program.constants))

    def run(*args: jax.Array) -> list[jax.Array]:
        values = dict(enumerate((*constants, *args)))
        read = lambda x: _number(x) if isinstance(x, _Number) else values[x]
        for name, params, inputs, outputs in program.equations:
            primitive = _primitives()[name]
            params = {key: _loaded(x) for key, x in params.items()}
            outs = primitive.bind(*map(read, inputs), **primitive.get_bind_params(params))
            values.update(zip(outputs, outs if primitive.multiple_results else [outs], strict=True))
        return [jax.numpy.asarray(read(x)) for x in program.results]

    return jax.make_jaxpr(run)(*avals)


def _number(x: _Number) -> ArrayLike:
    return x.value.item() if x.is_weak else x.value[()]


def _loaded(value: object) -> object:
    if isinstance(value, _Program):
        return _traced(value)
    return tuple(map(_loaded, value)) if type(value) is tuple else value
