"""A jaxpr as text that is equal for equal programs: the key of caches.

``str(jaxpr)`` does not serve: it holds addresses of functions and names of the user's variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import ArrayLike

_NAMES = frozenset({
    "name", "debug_info", "ctx_mesh", "out_sharding", "in_shardings", "out_shardings", "inline", "compiler_options_kvs",
    "donated_invars", "keep_unused",
})  # fmt: skip


class Open(NamedTuple):
    """A jaxpr and its constants, from any of JAX's types for them."""

    jaxpr: core.Jaxpr
    consts: Sequence[ArrayLike]


def open_jaxpr(x: core.ClosedJaxpr | core.Jaxpr) -> Open:
    """Opens a ``ClosedJaxpr`` (JAX <= 0.10) or a ``Jaxpr`` with constants (JAX >= 0.11)."""
    return Open(getattr(x, "jaxpr", x), tuple(getattr(x, "consts", ())))  # pyright: ignore[reportArgumentType]  (by version)


def aval_of(v: core.Var | core.Literal) -> ShapedArray:
    """The abstract value (shape and dtype) of a variable."""
    return cast(ShapedArray, v.aval)  # JAX declares an aval without shape and dtype


def sub_jaxpr(eqn: core.JaxprEqn) -> Open | None:
    """The body of a call-like equation."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return open_jaxpr(eqn.params[key])
    return None


def fingerprint(jaxpr: core.ClosedJaxpr, *, differentiable: bool) -> str:
    """Describes a program by its structure.

    Args:
      differentiable: Whether rules of ``jax.custom_jvp`` and ``jax.custom_vjp`` belong to the program. They are Python
        functions, different objects in each trace, so the program of the derivative is compared instead.
    """
    text = _describe_jaxpr(open_jaxpr(jaxpr))
    if differentiable and "custom_" in text:
        text += "\n" + _describe_derivative(jaxpr)
    return text


def _describe_derivative(jaxpr: core.ClosedJaxpr) -> str:
    avals = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in open_jaxpr(jaxpr).jaxpr.invars]
    floats = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]

    def derivative(*args):
        def of_floats(*xs):
            merged = dict(enumerate(args)) | dict(zip(floats, xs, strict=True))
            return core.jaxpr_as_fun(jaxpr)(*merged.values())[0]

        out, pull = jax.vjp(of_floats, *(args[i] for i in floats))
        return pull(jnp.ones_like(out))

    try:
        return _describe_jaxpr(open_jaxpr(jax.make_jaxpr(derivative)(*avals)))
    except (ValueError, NotImplementedError):  # a while loop, say: without derivative, rules do not matter
        return "not differentiable"


def _describe_jaxpr(opened: Open) -> str:
    names: dict[core.Var, str] = {}
    jaxpr = opened.jaxpr

    def read(v: core.Var | core.Literal) -> str:
        if isinstance(v, core.Literal):
            return f"{np.asarray(v.val).tolist()!r}:{aval_of(v).dtype}"
        return names[v]

    def write(v: core.Var) -> str:
        names[v] = f"v{len(names)}"
        return f"{names[v]}:{v.aval.str_short()}{'~' if getattr(v.aval, 'weak_type', False) else ''}"

    lines = ["(" + " ".join(map(write, (*jaxpr.constvars, *jaxpr.invars))) + ")"]
    for eqn in jaxpr.eqns:
        outs = " ".join(map(write, eqn.outvars))
        params = " ".join(f"{k}={_describe(v)}" for k, v in sorted(eqn.params.items()) if k not in _NAMES)
        lines.append(f"{outs} = {eqn.primitive.name}[{params}] {' '.join(map(read, eqn.invars))}")
    lines.append("-> " + " ".join(map(read, jaxpr.outvars)))
    if opened.consts:  # of a `jit` inside of a branch, say; those of the mod itself have become operands
        lines.append("with " + " ".join(f"{np.shape(c)}{np.asarray(c).tobytes()!r}" for c in opened.consts))
    return "\n".join(lines)


def _describe(value: Any) -> str:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return "{" + _describe_jaxpr(open_jaxpr(value)) + "}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return "(" + ",".join(map(_describe, value)) + ")"
    if (callable(value) or hasattr(value, "call_wrapped")) and not isinstance(value, (type, np.dtype)):
        return "function"
    return repr(value)


def bind(eqn: core.JaxprEqn, values: Sequence[ArrayLike]) -> list[jax.Array]:
    """Applies the primitive of an equation to values."""
    meshes = (aval_of(v).sharding.mesh for v in eqn.outvars) if jax.sharding.get_abstract_mesh().empty else ()
    is_typed = any(mesh.explicit_axes for mesh in meshes)
    params = {name: _without_mesh(x) for name, x in eqn.params.items()} if is_typed else eqn.params
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _without_mesh(parameter: Any) -> Any:
    """A parameter of an equation that was traced in a mesh with explicit axes, as outside of any mesh."""
    if type(parameter) in (tuple, list):
        return type(parameter)(map(_without_mesh, parameter))
    if isinstance(parameter, jax.sharding.Sharding | jax.sharding.AbstractMesh):
        return None if isinstance(parameter, jax.sharding.Sharding) else jax.sharding.get_abstract_mesh()
    if not hasattr(parameter, "eqns") and not hasattr(parameter, "jaxpr"):
        return parameter
    jaxpr, consts = open_jaxpr(parameter)

    def run(*args: jax.Array) -> list[ArrayLike]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda v: known_literal(v) if isinstance(v, core.Literal) else env[v]
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, bind(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    types = map(aval_of, jaxpr.invars)
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types))


def known_literal(literal: core.Literal) -> Any:
    """The value of a literal without the mesh of an enclosing `jax.shard_map`, which JAX 0.11 keeps in it."""
    known = np.asarray(literal.val, aval_of(literal).dtype)
    return known.item() if aval_of(literal).weak_type else known
