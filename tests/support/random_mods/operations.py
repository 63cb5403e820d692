"""The operations that random mods are made of: expressions of `jax.numpy`, their types and how large results get.

Letters of argument types: ``f`` float32, ``x`` float32 as it was loaded, ``g`` 16-bit float, ``y`` such a one as it was
loaded, ``i`` int32, ``p`` bool, ``v`` vector of float32 (all of one operation have one length), ``w`` such a one as it
was loaded, ``u`` vector of 16-bit floats; ``H``, ``Q`` and ``K`` an array of one number for each head, query or key.
Comparisons and the largest of a vector take what was loaded alone: what was computed differs by its roundings from what
float64 says, and a comparison makes a step of that. In texts ``{n}`` is a number of 2 to 7, ``{c}`` one of 0.3 to 1.5,
``{L}`` the length of the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Operation(NamedTuple):
    """An expression.

    Attributes:
      result: Type of the result.
      args: Types of the arguments.
      text: The expression.
      bound: Bound of the magnitude of the result from those of the arguments; for bools unused.
      weight: How often it is drawn, relative to the others.
    """

    result: str
    args: str
    text: str
    bound: Callable[..., float] = lambda *_: 1.0
    weight: float = 1.0


_SAME = lambda a, *_: a
_SUM = lambda a, b, *_: a + b
_PRODUCT = lambda a, b, *_: a * b
_LARGER = lambda a, b, *_: max(a, b)
_GROWTH = lambda a, *_: 1.5 * a + 1
_ONE = lambda *_: 1.0
_LOG = lambda a, *_: math.log1p(a) + 0.7
_BITS = lambda a, b, *_: 2.0 ** math.ceil(math.log2(max(a, b, 1) + 1))

ARITHMETIC = [
    *(Operation("f", "ff", f"{{0}} {sign} {{1}}", _SUM, 2) for sign in "+-"),
    Operation("f", "ff", "{0} * {1}", _PRODUCT, 3),
    Operation("f", "f", "{0} * {c}", lambda a: 1.5 * a),
    Operation("f", "ff", "{0} / (1.5 + jnp.abs({1}))", _SAME, 2),
    Operation("f", "f", "{c} / (1.0 + {0} * {0})", lambda a: 1.5),
    *(Operation("f", "ff", f"jnp.{name}({{0}}, {{1}})", _LARGER, 2) for name in ("maximum", "minimum")),
    Operation("f", "f", "jnp.clip({0}, -{c}, {c})", lambda a: 1.5),
    Operation("f", "f", "jnp.exp(-jnp.abs({0}))", _ONE),
    Operation("f", "f", "jnp.exp(0.25 * {0})", lambda a: math.exp(a / 4), 2),
    Operation("f", "f", "jnp.expm1(0.2 * {0})", lambda a: math.exp(a / 5)),
    Operation("f", "f", "jnp.exp2(0.3 * {0})", lambda a: 2 ** (0.3 * a)),
    Operation("f", "f", "jnp.tanh({0})", _ONE, 2),
    Operation("f", "f", "jax.nn.sigmoid({0})", _ONE, 2),
    Operation("f", "f", "jnp.log1p(jnp.abs({0}))", _LOG),
    Operation("f", "f", "jnp.log1p({0} * {0})", lambda a: 2 * math.log1p(a)),
    Operation("f", "f", "jnp.log(0.5 + jnp.square({0}))", lambda a: 1 + 2 * math.log1p(a)),
    Operation("f", "f", "jnp.sqrt(1.0 + {0} * {0})", lambda a: a + 1),
    Operation("f", "f", "lax.rsqrt(0.5 + {0} * {0})", lambda a: 1.5),
    Operation("f", "f", "jax.nn.softplus({0})", lambda a: a + 0.7),
    Operation("f", "f", "jax.nn.silu({0})", _SAME),
    Operation("f", "f", "jax.nn.gelu({0})", _SAME),
    Operation("f", "f", "jax.nn.gelu({0}, approximate=False)", _SAME, 0.5),
    Operation("f", "f", "jax.nn.elu({0})", _SAME, 0.5),
    Operation("f", "f", "jax.nn.leaky_relu({0})", _SAME, 0.5),
    Operation("f", "f", "lax.erf({0})", _ONE, 0.5),
    Operation("f", "f", "jnp.sin({0})", _ONE, 0.5),
    Operation("f", "f", "jnp.cos({0})", _ONE, 0.5),
    Operation("f", "f", "jnp.arctan({0})", lambda a: 1.6, 0.2),
    Operation("f", "ff", "jnp.arctan2({0}, 1.0 + {1} * {1})", lambda a, b: 1.6, 0.2),
    Operation("f", "f", "jnp.sinh(0.3 * {0})", lambda a: math.sinh(0.3 * a), 0.2),
    Operation("f", "f", "jnp.abs({0})", _SAME),
    Operation("f", "f", "-{0}", _SAME, 0.5),
    Operation("f", "f", "{0} ** 2", lambda a: a * a),
    Operation("f", "f", "{0} ** 3", lambda a: a**3, 0.5),
    Operation("f", "f", "jnp.power(1.0 + jnp.abs({0}), 0.6)", lambda a: (1 + a) ** 0.6, 0.5),
    Operation("f", "ff", "jnp.logaddexp({0}, {1})", lambda a, b: max(a, b) + 0.7, 0.5),
]
CONTROL = [
    Operation("f", "pff", "jnp.where({0}, {1}, {2})", lambda _, a, b: max(a, b), 3),
    Operation("f", "pff", "lax.select({0}, {1}, {2})", lambda _, a, b: max(a, b)),
    Operation("f", "pf", "jnp.where({0}, {1}, 0.25)", lambda _, a: a + 1),
    Operation("f", "pff", "lax.cond({0}, lambda x, y: jnp.tanh(x) - 0.3 * y, lambda x, y: 0.5 * x * y, {1}, {2})",
     lambda _, a, b: a * b + 1 + b, 2),
    Operation("f", "pff", "lax.cond({0}, lambda x: 0.7 * x + {2}, lambda x: jnp.maximum(x, {2}), {1})",
     lambda _, a, b: a + b, 2),
    Operation("f", "pfH", "lax.cond({0}, lambda x: x + {2}[h], lambda x: 0.5 * x, {1})", lambda _, a, __: a + 2),
    Operation("f", "pfQ", "lax.cond({0}, lambda x: 0.7 * x, lambda x: x * {2}[q_idx], {1})", lambda _, a, __: 2 * a),
    Operation("f", "ifK", "lax.switch({0} % 2, [lambda x: x - {2}[kv_idx], lambda x: jnp.sin({2}[0]) * x], {1})",
     lambda _, a, __: a + 2),
    Operation("f", "fQ", "lax.fori_loop(0, 3, lambda j, x: 0.5 * x + {1}[(q_idx + j) % T], {0})", lambda a, _: a + 4),
    Operation("f", "pf", "lax.cond({0}, lambda x: x, lambda x: lax.stop_gradient(0.5 * x), {1})", lambda _, a: a),
    Operation("f", "pppff", "lax.cond({0}, lambda: lax.cond({1}, lambda: {3}, lambda: {4}), lambda: 0.5 * {3})",
     lambda _, __, ___, a, b: max(a, b)),
    Operation("f", "iff", "lax.switch({0} % 3, [lambda x: x * 0.5, lambda x: jnp.sin(x) + {2}, lambda x: {2}], {1})",
     lambda _, a, b: a + b + 1, 2),
    Operation("f", "if", "lax.switch({0}, [jnp.tanh, jnp.sin, lambda x: -0.5 * x], {1})", lambda _, a: a + 1),
    Operation("f", "ff", "lax.fori_loop(0, {n}, lambda j, x: 0.6 * x + jnp.tanh({1}), {0})", lambda a, b: a + 3, 2),
    Operation("f", "f", "lax.fori_loop(0, {n}, lambda j, x: jnp.where(j % 2 == 0, jnp.sin(x), 0.7 * x), {0})", _SAME),
    Operation("f", "if", "lax.fori_loop(0, 4, lambda j, x: x + jnp.where(({0} >> j) & 1 == 1, 0.3, 0.1), {1})",
     lambda _, a: a + 1.2),
    Operation("f", "fv", "lax.scan(lambda x, t: (0.5 * x + t, None), {0}, {1})[0]", lambda a, b: a + 2 * b),
    Operation("f", "fv", "lax.scan(lambda x, t: (0.5 * x, x * t), {0}, {1}, reverse=True)[1].sum()",
     lambda a, b: 2 * a * b),
    Operation("f", "f", "lax.stop_gradient({0})", _SAME, 2),
    Operation("f", "ff", "{0} + lax.stop_gradient({0} * {1})", lambda a, b: a + a * b, 2),
    Operation("f", "f", "jax.checkpoint(lambda x: jnp.tanh(x) * x)({0})", _SAME, 0.5),
    Operation("f", "ff", "jax.jit(lambda x, y: jnp.sin(x) * y)({0}, {1})", lambda a, b: b, 0.5),
    Operation("f", "f", "jax.grad(lambda x: jnp.tanh(x) * x)({0})", lambda a: 1.5, 0.5),
    Operation("f", "ff", "jax.jvp(lambda x: jnp.sin(x) * x, ({0},), ({1},))[1]", lambda a, b: (1 + a) * b, 0.3),
    Operation("f", "v", "jax.vmap(lambda t: jnp.tanh(t) * t)({0}).sum()", lambda a: 5 * a, 0.5),
]  # fmt: skip
RULED = [
    Operation("f", "f", "bent({0})", _ONE, 2),
    Operation("f", "ff", "pulled({0}, {1})", lambda a, b: a * b / 2 + 1, 2),
    Operation("f", "fi", "stepped({0}, {1})", _SAME),
    Operation("f", "f", "doubly({0})", lambda a: 1.5, 2),
    Operation("f", "v", "length({0})", lambda a: 3 * a),
    Operation("f", "ff", "halved({0}, {1})", lambda a, b: max(a, b) + a / 2, 2),
    Operation("f", "f", "jax.jit(bent)(0.5 * {0})", _ONE, 0.5),
    Operation("f", "pff", "lax.cond({0}, lambda x, y: pulled(x, y), lambda x, y: bent(x) - y, {1}, {2})",
     lambda _, a, b: a * b + b + 1),
    Operation("f", "f", "lax.fori_loop(0, 3, lambda j, x: bent(x) + 0.2 * x, {0})", lambda a: a + 2),
]  # fmt: skip
CONVERSIONS = [
    Operation("f", "i", "({0} % {n}).astype(F32) * 0.2", lambda a: 1.5, 2),
    Operation("f", "i", "jnp.tanh(0.05 * {0}.astype(F32))", _ONE),
    Operation("f", "p", "{0}.astype(F32)", _ONE),
    Operation("f", "g", "{0}.astype(F32)", _SAME, 2),
    Operation("f", "gf", "{0}.astype(F32) * {1}", _PRODUCT, 2),
    Operation("f", "v", "jnp.sum({0})", lambda a: 4 * a),
    Operation("f", "vv", "jnp.sum({0} * {1})", lambda a, b: 3 * a * b, 2),
    Operation("f", "vv", "jnp.dot({0}, {1})", lambda a, b: 3 * a * b, 2),
    Operation("f", "vv", "jnp.sum(jnp.square({0} - {1}))", lambda a, b: 4 * (a + b)),
    Operation("f", "v", "jnp.mean(jnp.tanh({0}))", _ONE),
    Operation("f", "v", "jnp.prod(jnp.tanh({0}))", _ONE, 0.5),
    Operation("f", "w", "jnp.max({0})", _SAME),
    Operation("f", "w", "jnp.min({0})", _SAME, 0.5),
    Operation("f", "v", "jax.nn.logsumexp({0})", lambda a: a + 2),
    Operation("f", "v", "jax.nn.softmax({0})[1]", _ONE),
    Operation("f", "v", "{0}[0] - 0.5 * {0}[-1]", lambda a: 1.5 * a),
    Operation("f", "vi", "{0}[{1} % {L}]", _SAME, 0.5),
    Operation("f", "v", "jnp.cumsum({0})[1]", lambda a: 2 * a),
    Operation("f", "u", "jnp.sum({0}).astype(F32)", lambda a: 4 * a),
    Operation("f", "uu", "jnp.sum({0} * {1}).astype(F32)", lambda a, b: 3 * a * b),
]
INTEGERS = [
    *(Operation("i", "ii", f"{{0}} {sign} {{1}}", _SUM, 2) for sign in "+-"),
    Operation("i", "ii", "{0} * {1}", _PRODUCT),
    Operation("i", "i", "{0} * {n}", lambda a: 7 * a),
    Operation("i", "i", "{0} // {n}", _SAME, 2),
    Operation("i", "i", "{0} % {n}", lambda a: 7, 3),
    Operation("i", "ii", "{0} // (1 + jnp.abs({1}) % 4)", _GROWTH),
    Operation("i", "ii", "{0} % (2 + ({1} & 3))", lambda a, b: 5, 2),
    Operation("i", "ii", "{0} // jnp.where({1} == 0, -3, {1})", _GROWTH),
    Operation("i", "i", "{0} % -{n}", lambda a: 7),
    Operation("i", "i", "lax.div({0}, jnp.int32({n}))", _SAME),
    Operation("i", "i", "lax.rem({0}, jnp.int32({n}))", lambda a: 7),
    *(Operation("i", "ii", f"{{0}} {sign} {{1}}", _BITS, 1.5) for sign in "&|^"),
    Operation("i", "i", "{0} & {n}", lambda a: 7),
    Operation("i", "i", "{0} << 2", lambda a: 4 * a),
    Operation("i", "i", "{0} >> 1", _SAME),
    Operation("i", "ii", "{0} >> ({1} & 3)", _SAME),
    Operation("i", "i", "1 << ({0} % 5)", lambda a: 16),
    Operation("i", "i", "~{0}", lambda a: a + 1),
    Operation("i", "i", "-{0}", _SAME),
    Operation("i", "i", "jnp.abs({0})", _SAME),
    Operation("i", "i", "jnp.sign({0})", _ONE, 0.5),
    Operation("i", "ii", "jnp.minimum({0}, {1})", _LARGER),
    Operation("i", "ii", "jnp.maximum({0}, {1})", _LARGER),
    Operation("i", "i", "jnp.clip({0}, -3, {n})", lambda a: 7),
    Operation("i", "pii", "jnp.where({0}, {1}, {2})", lambda _, a, b: max(a, b), 2),
    Operation("i", "pii", "lax.cond({0}, lambda: {1}, lambda: {2} + 1)", lambda _, a, b: max(a, b) + 1),
    Operation("i", "p", "{0}.astype(jnp.int32)", _ONE),
    Operation("i", "i", "{0}.astype(jnp.int8).astype(jnp.int32)", lambda a: 128, 0.3),
    Operation("i", "i", "lax.population_count({0})", lambda a: 32, 0.3),
    Operation("i", "i", "lax.fori_loop(0, 3, lambda j, x: (3 * x + 1) % 17, {0})", lambda a: 17, 0.5),
]
BOOLEANS = [
    *(Operation("p", "ii", f"{{0}} {sign} {{1}}") for sign in ("<", "<=", ">", ">=", "==", "!=")),
    Operation("p", "i", "({0} & 1) == 0", weight=2),
    Operation("p", "i", "{0} % {n} != 1"),
    Operation("p", "ii", "jnp.abs({0} - {1}) < 5 * {n}", weight=2),
    Operation("p", "xx", "{0} < {1}"),
    Operation("p", "x", "{0} > 0.0"),
    Operation("p", "yy", "{0} >= {1}", weight=0.5),
    Operation("p", "pp", "{0} & {1}"),
    Operation("p", "pp", "{0} | {1}", weight=2),
    Operation("p", "pp", "{0} ^ {1}"),
    Operation("p", "pp", "{0} == {1}", weight=0.5),
    Operation("p", "p", "~{0}"),
    Operation("p", "pp", "jnp.logical_and({0}, jnp.logical_not({1}))"),
    Operation("p", "ppp", "jnp.where({0}, {1}, {2})"),
]
HALVES = [
    Operation("g", "f", "{0}.astype(G)", _SAME, 3),
    *(Operation("g", "gg", f"{{0}} {sign} {{1}}", _SUM) for sign in "+-"),
    Operation("g", "gg", "{0} * {1}", _PRODUCT, 2),
    Operation("g", "gg", "{0} / (1.5 + jnp.abs({1}))", _SAME),
    Operation("g", "yy", "jnp.maximum({0}, {1})", _LARGER),
    Operation("g", "g", "jnp.tanh({0})", _ONE),
    Operation("g", "g", "jax.nn.sigmoid({0})", _ONE),
    Operation("g", "g", "jnp.exp(-jnp.abs({0}))", _ONE),
    Operation("g", "g", "jnp.sqrt(1.0 + {0} * {0})", lambda a: a + 1),
    Operation("g", "g", "jnp.log1p(jnp.abs({0}))", _LOG),
    Operation("g", "g", "jax.nn.softplus({0})", lambda a: a + 0.7),
    Operation("g", "g", "jax.nn.silu({0})", _SAME),
    Operation("g", "g", "jax.nn.gelu({0})", _SAME, 0.5),
    Operation("g", "pgg", "jnp.where({0}, {1}, {2})", lambda _, a, b: max(a, b)),
    Operation("g", "pgg", "lax.cond({0}, lambda x, y: x * y, lambda x, y: x + 0.5 * y, {1}, {2})",
     lambda _, a, b: a * b + a + b),
    Operation("g", "g", "lax.stop_gradient({0})", _SAME),
    Operation("g", "g", "bent({0})", _ONE),
    Operation("g", "gg", "pulled({0}, {1})", lambda a, b: a * b / 2 + 1),
    Operation("g", "i", "({0} % 9).astype(G) * 0.25", lambda a: 2),
]  # fmt: skip
VECTORS = [
    *(Operation("v", "vv", f"{{0}} {sign} {{1}}", _SUM) for sign in "+-"),
    Operation("v", "vv", "{0} * {1}", _PRODUCT, 2),
    Operation("v", "vf", "{0} * {1}", _PRODUCT, 2),
    Operation("v", "vf", "{0} + {1}", _SUM),
    Operation("v", "v", "jnp.tanh({0})", _ONE),
    Operation("v", "v", "jnp.exp(-jnp.abs({0}))", _ONE),
    Operation("v", "v", "{0}[::-1]", _SAME),
    Operation("v", "v", "jnp.roll({0}, 1)", _SAME, 0.5),
    Operation("v", "pvv", "jnp.where({0}, {1}, {2})", lambda _, a, b: max(a, b)),
    Operation("v", "vv", "jnp.maximum({0}, {1})", _LARGER),
    Operation("v", "vv", "jnp.concatenate([{0}[1:], {1}[:1]])", _LARGER, 0.5),
    Operation("v", "v", "lax.stop_gradient({0})", _SAME),
    Operation("v", "f", "jnp.arange({L}, dtype=jnp.int32).astype(F32) * (0.2 * {0})", _SAME),
    Operation("v", "v", "jax.nn.softmax({0})", _ONE, 0.5),
    Operation("v", "v", "jnp.cumsum({0})", lambda a: 4 * a, 0.5),
    Operation("v", "uf", "{0}.astype(F32) * {1}", _PRODUCT),
    Operation("u", "uu", "{0} * {1}", _PRODUCT, 0.5),
    Operation("u", "uu", "{0} + {1}", _SUM, 0.5),
]
# Not finite where a query does not stand after the key; drawn together with a mask of which that hides the rest.
GUARDED = [
    Operation("f", "", "0.3 * jnp.log((q_idx - kv_idx).astype(F32))", lambda: 2.0),
    Operation("f", "", "1.0 / (q_idx - kv_idx).astype(F32)", _ONE),
    Operation("f", "f", "{0} * 0.2 * jnp.sqrt((q_idx - kv_idx).astype(F32) - 0.5)", _GROWTH),
]
SCORE_OPERATIONS = [
    *ARITHMETIC,
    *(operation._replace(weight=1.6 * operation.weight) for operation in (*CONTROL, *RULED, *CONVERSIONS)),
    *INTEGERS,
    *BOOLEANS,
    *HALVES,
    *VECTORS,
]
MASK_OPERATIONS = [*INTEGERS, *(operation._replace(weight=4 * operation.weight) for operation in BOOLEANS)]
