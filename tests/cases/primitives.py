"""The table of primitives: what a mod may compute from two numbers, in every dtype, on every kind of value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPES = ("bfloat16", "float16", "float32", "int32", "bool")
# Of two operands, by the promotion of JAX: `x` of the first dtype and `y` of the second.
MIXTURES = (("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float16"), ("int32", "bfloat16"),
            ("int32", "float16"), ("int32", "float32"), ("bool", "bfloat16"), ("bool", "float32"),
            ("bool", "int32"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Primitive:
    """A function of two numbers ``0.1 <= x, y <= 0.9``, or of integers from 1 to 6, or of booleans.

    Attributes:
      name: Of the primitive, in reports.
      function: Of ``x, y``; it may leave out ``y``.
      takes: Of ``"float"``, ``"int"`` and ``"bool"``: dtypes of which it is a function.
      mixes: Whether both operands matter, so that they may have different dtypes.
    """

    name: str
    function: Callable[[Any, Any], Any]
    takes: tuple[str, ...] = ("float",)
    mixes: bool = False


@jax.custom_jvp
def twice_with_rule_of_three(x: jax.Array) -> jax.Array:
    """Twice its argument, with a derivative of 3: a rule that is ignored shows."""
    return x + x


twice_with_rule_of_three.defjvp(lambda x, t: (twice_with_rule_of_three(*x), t[0] * jnp.asarray(3, x[0].dtype)))


@jax.custom_vjp
def square_with_rule_of_five(x: jax.Array) -> jax.Array:
    """The square, with a derivative of 5, by a rule that calls the function itself."""
    return x * x


square_with_rule_of_five.defvjp(lambda x: (square_with_rule_of_five(x), x), lambda x, g: (g * jnp.asarray(5, x.dtype),))


def nested_rules(x: Any, y: Any) -> Any:
    """A rule inside of a function with a rule, of which the outer one counts, beside one that counts by itself."""

    @jax.custom_vjp
    def outer(x):
        return jax.jit(square_with_rule_of_five)(x) * x

    outer.defvjp(lambda x: (outer(x), x), lambda x, g: (g * twice_with_rule_of_three(x),))
    return outer(x) + lax.cond(y > y * y, twice_with_rule_of_three, square_with_rule_of_five, y)


def _horner(x: Any, coefficients: Sequence[Any]) -> Any:
    """What `lax.polynomial` is, for JAX before 0.12."""
    return functools.reduce(lambda out, c: out * x + c, reversed(coefficients[:-1]), coefficients[-1])


def _tie(x: Any, y: Any) -> Any:
    """Extremes of a vector in which the largest and the smallest value occur several times."""
    stack = jnp.stack([x, y, x, y, x])
    return jnp.max(stack) * y + jnp.min(stack) * x


def _cumulated(x: Any, y: Any) -> Any:
    stack = jnp.stack([x, y, y, x])
    return (lax.cummax(stack) * stack[::-1] + lax.cummin(stack, reverse=True) + jnp.cumsum(stack)).sum()


FLOAT, INT, BOOL = "float", "int", "bool"
NUMBERS, ALL = (FLOAT, INT), (FLOAT, INT, BOOL)
P = Primitive
PRIMITIVES = (
    P("abs", lambda x, y: jnp.abs(x - y), NUMBERS, True),
    P("acos", lambda x, y: jnp.arccos(x)),
    P("acosh", lambda x, y: jnp.arccosh(x + 1)),
    P("add", lambda x, y: x + y, NUMBERS, True),
    P("and", lambda x, y: x & y, (INT, BOOL), True),
    P("argmax", lambda x, y: jnp.argmax(jnp.stack([x, y, x + x]))),
    P("asin", lambda x, y: jnp.arcsin(x)),
    P("asinh", lambda x, y: jnp.arcsinh(x)),
    P("atan", lambda x, y: jnp.arctan(x)),
    P("atan2", jnp.arctan2, (FLOAT,), True),
    P("atanh", lambda x, y: jnp.arctanh(x)),
    P("bitcast_convert_type", lambda x, y: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFF0000, jnp.float32)),
    P("cbrt", lambda x, y: jnp.cbrt(x)),
    P("ceil", lambda x, y: jnp.ceil(3 * x)),
    P("clamp", lambda x, y: lax.clamp(jnp.minimum(x, y), x, jnp.maximum(x, y)), NUMBERS),
    P("clamp_at_ties", lambda x, y: lax.clamp(x, x, y) + lax.clamp(x, y, y) * x),
    P("cond", lambda x, y: lax.cond(x > y, lambda: x * y, lambda: x - y), (FLOAT,), False),
    P("convert_element_type", lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float16) + y.astype(jnp.float16), ALL),
    P("cos", lambda x, y: jnp.cos(x)),
    P("cosh", lambda x, y: jnp.cosh(x)),
    P("cumulations", _cumulated),
    P("custom_jvp", lambda x, y: twice_with_rule_of_three(x) * y),
    P("custom_vjp", lambda x, y: square_with_rule_of_five(x) * y),
    P("custom_nested", nested_rules),
    P("div", lambda x, y: x / y, (FLOAT,), True),
    P("dot_general", lambda x, y: jnp.stack([x, y, x]) @ jnp.stack([y, x, x])),
    P("eq", lambda x, y: x == y, ALL, True),
    P("erf", lambda x, y: lax.erf(x)),
    P("erf_inv", lambda x, y: lax.erf_inv(x)),
    P("erfc", lambda x, y: lax.erfc(x)),
    P("exp", lambda x, y: jnp.exp(x)),
    P("exp2", lambda x, y: jnp.exp2(x)),
    P("expm1", lambda x, y: jnp.expm1(x)),
    P("floor", lambda x, y: jnp.floor(3 * x)),
    P("floor_divide", lambda x, y: (x * 7) // (y + 1), NUMBERS, True),
    P("ge", lambda x, y: x >= y, ALL, True),
    P("gelu", lambda x, y: jax.nn.gelu(x, approximate=False) + jax.nn.gelu(y)),
    P("gt", lambda x, y: x > y, ALL, True),
    P("integer_pow", lambda x, y: x**3 + x**-2),
    P("is_finite", lambda x, y: jnp.isfinite(x / (y - y))),
    P("ldexp", lambda x, y: jnp.ldexp(x, 2 - (x > y).astype(jnp.int32))),
    P("le", lambda x, y: x <= y, ALL, True),
    P("log", lambda x, y: jnp.log(x)),
    P("log1p", lambda x, y: jnp.log1p(x)),
    P("log2", lambda x, y: jnp.log2(x)),
    P("logaddexp", jnp.logaddexp, (FLOAT,), True),
    P("logistic", lambda x, y: jax.nn.sigmoid(x)),
    P("loop", lambda x, y: lax.fori_loop(0, 3, lambda i, c: c * y + x, x)),
    P("lt", lambda x, y: x < y, ALL, True),
    P("max", lambda x, y: jnp.maximum(x, y) + jnp.maximum(x, x), NUMBERS, True),
    P("min", lambda x, y: jnp.minimum(x, y) + jnp.minimum(y, y), NUMBERS, True),
    P("mul", lambda x, y: x * y, NUMBERS, True),
    P("ne", lambda x, y: x != y, ALL, True),
    P("neg", lambda x, y: -x, NUMBERS),
    P("not", lambda x, y: ~x, (INT, BOOL)),
    P("or", lambda x, y: x | y, (INT, BOOL), True),
    P("polynomial", lambda x, y: getattr(lax, "polynomial", _horner)(x, [y, 2, y * y, 1, 3, y]), NUMBERS),
    P("population_count", lambda x, y: lax.population_count(x), (INT,)),
    P("pow", lambda x, y: x**y, mixes=True),
    P("pow_of_integers", lambda x, y: x ** jnp.maximum(y, 0), (INT,), True),
    P("pow_of_integer", lambda x, y: x ** (1 + (y > y * y).astype(jnp.int32))),
    P("prod", lambda x, y: jnp.prod(jnp.stack([x, y, x]))),
    P("reduce_precision", lambda x, y: lax.reduce_precision(x, 8, 4) + lax.reduce_precision(y, 5, 10)),
    P("rem", lambda x, y: (x * 7) % y, (INT,), True),
    # In 16 bits the derivative jumps where a rounded quotient reaches a whole number: not for these.
    P("rem_of_float", lambda x, y: (x * 7) % (y * 0 + 0.75)),
    P("round", lambda x, y: jnp.round(4 * x) + lax.round(4 * y, lax.RoundingMethod.AWAY_FROM_ZERO)),
    P("rsqrt", lambda x, y: lax.rsqrt(x)),
    P("select_n", lambda x, y: jnp.where(x > y, x, y) + jnp.where(x == x, y, x), NUMBERS, True),
    P("shift_left", lambda x, y: x << y, (INT,)),
    P("shift_of_all_bits", lambda x, y: (x << (y * 40)) + ((x - 9) >> (y * 40 - 8)) + (x >> (y * 0 + 32)), (INT,)),
    P("shift_right_arithmetic", lambda x, y: (x - 9) >> y, (INT,)),
    P("shift_right_logical", lambda x, y: lax.shift_right_logical(x * 64, y), (INT,)),
    P("sign", lambda x, y: jnp.sign(x - y), NUMBERS),
    P("sin", lambda x, y: jnp.sin(x)),
    P("sinh", lambda x, y: jnp.sinh(x)),
    P("softplus", lambda x, y: jax.nn.softplus(x) + jax.nn.relu(y - x)),
    P("sqrt", lambda x, y: jnp.sqrt(x)),
    P("square", lambda x, y: jnp.square(x), NUMBERS),
    P("stop_gradient", lambda x, y: lax.stop_gradient(x) * y + x * lax.stop_gradient(y * y), NUMBERS, True),
    P("sub", lambda x, y: x - y, NUMBERS, True),
    P("sum", lambda x, y: jnp.sum(jnp.stack([x, y, x])) + jnp.mean(jnp.stack([x, y]))),
    P("switch", lambda x, y: lax.switch((x > y).astype(jnp.int32) + (y > x * y).astype(jnp.int32),
                                        [lambda: x * y, lambda: x + y, lambda: y * y])),
    P("tan", lambda x, y: jnp.tan(x)),
    P("tanh", lambda x, y: jnp.tanh(x)),
    P("ties", _tie),
    P("xor", lambda x, y: x ^ y, (INT, BOOL), True),
)  # fmt: skip
# On Hopper these, and no others, are left to `triton` (`ldexp` in 16 bits).
REFUSED_BY_MOSAIC = {"rem_of_float", "floor_divide", "ldexp", "population_count"}
BY_NAME = {primitive.name: primitive for primitive in PRIMITIVES}


def family(dtype: str) -> str:
    """``"float"``, ``"int"`` or ``"bool"``."""
    return BOOL if dtype == "bool" else INT if dtype == "int32" else FLOAT


def dtypes_of(primitive: Primitive) -> list[tuple[str, str]]:
    """The pairs of dtypes in which it is computed."""
    same = [(dtype, dtype) for dtype in DTYPES if family(dtype) in primitive.takes]
    mixed = [pair for pair in MIXTURES if primitive.mixes and _meaning(pair) in primitive.takes]
    return same + mixed


def _meaning(pair: tuple[str, str]) -> str:
    """The family of what two dtypes promote to."""
    return FLOAT if FLOAT in map(family, pair) else INT


def draw(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Numbers of which every primitive is a function; the same for both operands now and then."""
    rng = np.random.default_rng(seed)
    if family(dtype) == BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if family(dtype) == INT:
        return rng.integers(1, 7, shape).astype(np.int32)
    return (rng.integers(10, 90, shape) / 100.0).astype(jnp.dtype(dtype))


def shapes_of(H: int, T: int, S: int, *, of_heads: bool = False) -> list[tuple[int, ...]]:
    """Of arrays that are read as uniform value, row, column and tile; those `of_heads` each head has for itself."""
    heads = (H,) if of_heads else ()
    return [(H,), (*heads, T), (*heads, S), (*heads, T, S)]


def operands_of(dtypes: tuple[str, str], H: int, T: int, S: int, *, of_heads: bool = False) -> list[jax.Array]:
    """What `mod_of` takes: two arrays of each kind."""
    pairs = [(shape, dtype) for shape in shapes_of(H, T, S, of_heads=of_heads) for dtype in dtypes]
    return [jnp.asarray(draw(shape, dtype, seed)) for seed, (shape, dtype) in enumerate(pairs)]


def mod_of(primitive: Primitive, *, of_heads: bool = False) -> Callable[..., jax.Array]:
    """``(score, b, h, q, k, *operands)``: the score times the primitive of two arrays of each kind.

    Times, for what is added to all scores of a query has no gradient. Values are bounded, so that rounding stays small.
    """

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any, *operands: Any) -> jax.Array:
        factor = jnp.float32(0.5)
        heads = (h,) if of_heads else ()
        for n, at in enumerate(((h,), (*heads, q), (*heads, k), (*heads, q, k))):
            x, y = (array[at] for array in operands[2 * n : 2 * n + 2])
            value = jnp.asarray(primitive.function(x, y)).astype(jnp.float32)
            factor = factor + value / (1.0 + jnp.abs(value)) * (0.5 + 0.25 * n)
        return score * factor

    return mod


def is_coarse(primitive: Primitive, *dtypes: str) -> bool:
    """Whether 16 bits take part, which are rounded here and there in different order."""
    return "16" in "".join(dtypes) or primitive.name in ("convert_element_type", "reduce_precision")


ROWS = [(primitive, *dtypes) for primitive in PRIMITIVES for dtypes in dtypes_of(primitive)]
