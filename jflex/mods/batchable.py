"""Rewrites a mod's program for `jax.vmap` and XLA: branches to selects, sums of products to contractions.

For everything that evaluates a mod in plain JAX (the `xla` and `reference` backends, block masks, dense masks). The
kernels take the program as it was traced.

* `jax.vmap` of a `cond` with a batched predicate broadcasts the operands of its branches, captured arrays among them:
  a bias [B, H, T, S] to one copy for each score. So both branches are evaluated, and a select chooses.
* XLA's CPU compiler passes a sum of products to YNNPACK as a GEMM. If both factors are broadcast, some shapes give
  wrong results or read out of bounds. Of 150 random products of 2 to 4 axes, both factors broadcast, 7, 7 and 10 were
  wrong with jaxlib 0.10.2, 0.11.2 and 0.12.0.1. A contraction (`dot_general`) of the factors before broadcasting was
  never wrong (360, 210 and 360 products); of broadcast factors it is no safer than the sum.
  `jax.lax.optimization_barrier` between product and sum helps from 0.11.2 on only. `jax.lax.reduce_precision` to the
  same precision, which XLA does not recognize as a no-op, helps everywhere, but turns the sum into a plain loop (50 ms
  instead of 0.8 ms for 256 x 512 x 64): it is used where no contraction is possible.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from jflex.mods.fingerprint import Open, aval_of, bind, open_jaxpr, sub_jaxpr

CALLS = frozenset({"jit", "pjit", "closed_call", "eval_jaxpr", "checkpoint", "remat2", "remat"})
VIEWS = frozenset({"dynamic_slice", "gather", "squeeze", "reshape", "slice", "transpose", "rev"})
SMALL = 64  # values; an operand of which a mod reads more at once is differentiated as a whole
_REWRITTEN = frozenset({"cond", "reduce_sum"})
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
}
_MULTIPLIES = frozenset({"mul", "dot_general", "square", "integer_pow", "div"})
_KEEPS = VIEWS | {"broadcast_in_dim", "convert_element_type", "neg", "copy", "concatenate", "pad"}


def batchable(jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Rewrites a program for `jax.vmap`; the program itself if nothing needs rewriting."""
    opened = open_jaxpr(jaxpr)
    if not _needs_rewriting(opened.jaxpr):
        return jaxpr
    avals = [
        jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in opened.jaxpr.invars
    ]

    def rewritten(*args: jax.Array) -> list[ArrayLike]:
        return [_used(x) for x in _run(opened, [_Value(x) for x in args])]

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(rewritten)(*avals)


class Factored(NamedTuple):
    """One result of a program, as a scalar times an array."""

    scale: jax.Array | None  # the scalar, float32; None for an array that is not such a product
    array: jax.Array
    depends: frozenset[int]  # indices of the arguments of the program on which `array` depends


def factored(function: Callable[..., Sequence[jax.Array]], *args: jax.Array) -> list[Factored]:
    """Calls a function of scalars, rewritten for `jax.vmap`, and factors its results.

    The cotangent of a vector that a mod reads is mostly that of the score times another vector, which depends on fewer
    indices. Kept apart, they take the memory of a block of scores and of a row, and a GEMM sums their product.
    """
    opened = open_jaxpr(jax.make_jaxpr(function)(*args))
    values = _run(opened, [_Value(x, frozenset({i})) for i, x in enumerate(args)])
    results = []
    for value in values:
        product, x = value.product, jnp.asarray(value.x)
        if x.ndim == 0 or product is None or not (product.scales and product.factors):
            results.append(Factored(None, guarded(x) if value.multiplied and x.ndim else x, value.depends))
        else:
            factor = multiplied([x.x for x in product.factors], jnp.float32)
            depends = frozenset().union(*(x.depends for x in product.factors))
            results.append(Factored(multiplied(product.scales, jnp.float32), factor, depends))
    return results


class _Product(NamedTuple):
    """An array as a product of scalars and of arrays of its shape."""

    scales: tuple[ArrayLike, ...]
    factors: tuple[_Value, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """A value while a program is rewritten."""

    x: ArrayLike
    depends: frozenset[int] = frozenset()
    product: _Product | None = None  # its factors, if known
    multiplied: bool = False
    spread: bool = False  # whether it may be broadcast: then a contraction of it is no safer than a sum
    gates: tuple[ArrayLike, ...] = ()  # the predicates of the branches that it entered


def _used(value: _Value) -> ArrayLike:
    """A value after its gates.

    Its cotangent is 0 in a branch that is not taken, as under `lax.cond`, even if a derivative is infinite there: else
    0 times infinity would be NaN, which a select after the branch does not stop.
    """
    x = value.x
    if value.gates and _is_floating(x) and math.prod(jnp.shape(x)) <= SMALL:
        for taken in value.gates:
            x = jnp.where(taken, x, lax.stop_gradient(x))
    return x


def _is_floating(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _run(opened: Open, args: Sequence[_Value]) -> list[_Value]:
    """Evaluates a program on values."""
    env = {v: _Value(x) for v, x in zip(opened.jaxpr.constvars, opened.consts, strict=True)}
    env |= dict(zip(opened.jaxpr.invars, args, strict=True))
    read = lambda v: _Value(v.val) if isinstance(v, core.Literal) else env[v]
    for eqn in opened.jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in opened.jaxpr.outvars]


def _equation(eqn: core.JaxprEqn, ins: list[_Value]) -> Sequence[_Value]:
    name = eqn.primitive.name
    depends = frozenset().union(*(x.depends for x in ins))
    inner = sub_jaxpr(eqn) if name in CALLS else None
    if inner is not None:
        return _run(inner, ins)
    if name == "cond" and not eqn.effects:
        return _selected(eqn, ins, depends)
    if name in VIEWS and ins[0].gates:  # maybe of a captured array: gate the values read, not the array
        return [_Value(x, depends, gates=ins[0].gates) for x in bind(eqn, [ins[0].x, *map(_used, ins[1:])])]
    ins = [dataclasses.replace(x, x=_used(x), gates=()) for x in ins]
    if name == "reduce_sum" and _is_floating(ins[0].x):
        return [_Value(_sum(eqn, ins[0]), depends)]
    outs = bind(_with_bodies(eqn), [x.x for x in ins])
    if len(outs) != 1:
        return [_Value(x, depends) for x in outs]
    multiplied = name in _MULTIPLIES or (name in _KEEPS and any(x.multiplied for x in ins))
    spread = name == "broadcast_in_dim" or (not name.startswith("reduce_") and any(x.spread for x in ins))
    return [_Value(outs[0], depends, _product(eqn, ins), multiplied, spread)]


def _selected(eqn: core.JaxprEqn, ins: list[_Value], depends: frozenset[int]) -> list[_Value]:
    """Evaluates all branches; the index selects among their results."""
    index, branches = _used(ins[0]), []
    for number, branch in enumerate(eqn.params["branches"]):
        entering = [_Value(x.x, x.depends, gates=(*x.gates, index == number)) for x in ins[1:]]
        branches.append([_used(x) for x in _run(open_jaxpr(branch), entering)])
    results = []
    for var, *outs in zip(eqn.outvars, *branches, strict=True):
        outs = [jnp.asarray(x, aval_of(var).dtype) for x in outs]
        chosen = outs[-1]
        for number in reversed(range(len(outs) - 1)):
            chosen = lax.select_n(index == number, chosen, outs[number])
        results.append(_Value(chosen, depends))
    return results


def _product(eqn: core.JaxprEqn, ins: Sequence[_Value]) -> _Product | None:
    """The result of an equation as a product of scalars and arrays; None if it is not one."""
    name, aval, first = eqn.primitive.name, aval_of(eqn.outvars[0]), ins[0] if ins else None
    if first is None or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    if name == "broadcast_in_dim" and jnp.ndim(first.x) == 0:
        return _Product((first.x,), ())
    if name == "convert_element_type" and _is_floating(first.x):
        return first.product
    if name == "neg" and first.product is not None:
        return _Product((-1.0, *first.product.scales), first.product.factors)
    if name == "mul" or (name == "dot_general" and any(jnp.ndim(x.x) == 0 for x in ins)):
        one, other = (_parts(x, aval.shape) for x in ins)
        if one is not None and other is not None:
            return _Product(one.scales + other.scales, one.factors + other.factors)
    return None


def _parts(value: _Value, shape: tuple[int, ...]) -> _Product | None:
    if jnp.ndim(value.x) == 0:
        return _Product((value.x,), ())
    if value.product is not None:
        return value.product
    return _Product((), (value,)) if jnp.shape(value.x) == shape else None


def _sum(eqn: core.JaxprEqn, value: _Value) -> jax.Array:
    """A sum; a sum of products becomes a contraction."""
    axes, dtype, product = eqn.params["axes"], aval_of(eqn.outvars[0]).dtype, value.product
    known = product is not None and product.factors and not any(x.spread for x in product.factors)
    if product is None or not known or not axes or dtype.itemsize < 4:
        return bind(eqn, [guarded(jnp.asarray(value.x)) if value.multiplied else value.x])[0]
    *others, last = [jnp.asarray(x.x).astype(dtype) for x in product.factors]
    if not others:
        out = jnp.sum(guarded(last) if product.factors[0].multiplied else last, axes)
    else:
        kept = tuple(i for i in range(last.ndim) if i not in axes)
        dimensions = ((axes, axes), (kept, kept))
        out = lax.dot_general(
            multiplied(others, dtype), last, dimensions, precision="highest", preferred_element_type=dtype
        )
    return multiplied([out, *product.scales], dtype)


def guarded(x: jax.Array) -> jax.Array:
    """Guards values against XLA, which would turn a sum of them into a GEMM."""
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def multiplied(xs: Sequence[ArrayLike], dtype: DTypeLike) -> jax.Array:
    """The product of scalars and arrays."""
    return functools.reduce(jnp.multiply, [jnp.asarray(x, dtype) for x in xs])


def _with_bodies(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """The equation with the bodies of loops and of custom derivatives rewritten."""
    if eqn.primitive.name not in _BODIES:
        return eqn
    params = {key: batchable(x) if key in _BODIES[eqn.primitive.name] else x for key, x in eqn.params.items()}
    return eqn.replace(params=params)


def _needs_rewriting(jaxpr: core.Jaxpr) -> bool:
    def inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
        keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", *_BODIES.get(eqn.primitive.name, ()))
        return [
            open_jaxpr(eqn.params[key]).jaxpr
            for key in keys
            if hasattr(eqn.params.get(key), "eqns") or hasattr(eqn.params.get(key), "jaxpr")
        ]

    return any(eqn.primitive.name in _REWRITTEN or any(map(_needs_rewriting, inner(eqn))) for eqn in jaxpr.eqns)
