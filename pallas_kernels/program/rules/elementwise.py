"""The elementwise primitives, and substitute formulas for those that the GPU compilers behind Pallas lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.types import Params

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type",
    "cbrt", "ceil", "convert_element_type", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polynomial", "population_count", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})  # fmt: skip


def erfc(x: jax.Array) -> jax.Array:
    """Complementary error function, by Chebyshev fitting in ``1 / (1 + |x| / 2)``; relative error below 1.2e-7.

    Press et al., Numerical Recipes in C, 2nd edition, section 6.2.
    """
    z = jnp.abs(x)
    t = 1.0 / (1.0 + 0.5 * z)
    tail = t * jnp.exp(-z * z + _polynomial(t, _ERFC))
    return jnp.where(x >= 0, tail, 2.0 - tail)


def erf(x: jax.Array) -> jax.Array:
    """Error function: the Maclaurin series near 0, where ``1 - erfc(x)`` would lose digits, else that."""
    small = jnp.abs(x) < 0.5
    y = jnp.where(small, x, 0.0)
    return jnp.where(small, y * _polynomial(y * y, _ERF), 1.0 - erfc(x))


_ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)
_ERF = tuple(2.0 / np.sqrt(np.pi) * (-1.0) ** n / (np.prod(np.arange(1.0, n + 1)) * (2 * n + 1)) for n in range(8))


def _polynomial(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    out = jnp.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = out * x + float(c)
    return out


def round_away(x: jax.Array) -> jax.Array:
    """Nearest integer, ties away from zero."""
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


def round_even(x: jax.Array) -> jax.Array:
    """Nearest integer, ties to even."""
    low = jnp.floor(x)
    rest = x - low
    odd = low - 2.0 * jnp.floor(low * 0.5)
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
    return jnp.where(up, low + 1.0, low)


def reduce_precision(x: jax.Array, exponent_bits: int, mantissa_bits: int) -> jax.Array:
    """Rounds a float32 to fewer bits of mantissa, ties to even; only those of float16 also bound the exponent."""
    if (exponent_bits, mantissa_bits) == (5, 10):
        return x.astype(jnp.float16).astype(jnp.float32)
    drop = 23 - mantissa_bits
    if drop == 0:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    odd = lax.shift_right_logical(bits, jnp.full_like(bits, drop)) & jnp.int32(1)
    rounded = (bits + jnp.int32((1 << (drop - 1)) - 1) + odd) & jnp.int32(-(1 << drop))
    return jnp.where(x == x, lax.bitcast_convert_type(rounded, jnp.float32), x)


def erf_inv(x: jax.Array) -> jax.Array:
    """Inverse of the error function, by two polynomials in ``log(1 - x ** 2)``; relative error below 4e-7.

    Giles 2012, Approximating the erfinv function, GPU Computing Gems, Jade Edition, chapter 10.
    """
    w = -jnp.log1p(-x * x)
    near, far = _polynomial(w - 2.5, _ERF_INV_NEAR), _polynomial(jnp.sqrt(jnp.maximum(w, 5.0)) - 3.0, _ERF_INV_FAR)
    return jnp.where(jnp.abs(x) == 1.0, x * jnp.inf, jnp.where(w < 5.0, near, far) * x)


_ERF_INV_NEAR = (
    1.50140941,
    0.246640727,
    -0.00417768164,
    -0.00125372503,
    0.00021858087,
    -4.39150654e-06,
    -3.5233877e-06,
    3.43273939e-07,
    2.81022636e-08,
)
_ERF_INV_FAR = (
    2.83297682,
    1.00167406,
    0.00943887047,
    -0.0076224613,
    0.00573950773,
    -0.00367342844,
    0.00134934322,
    0.000100950558,
    -0.000200214257,
)


def is_finite(x: jax.Array) -> jax.Array:
    """Whether a number is neither NaN nor infinite."""
    return jnp.abs(x) < jnp.inf


def remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x - trunc(x / y) * y`` as C's `fmod`, exact up to quotients of 2 ** 44, where the hardware's is not.

    PTX has no remainder of floats. LLVM writes ``div.full``, ``cvt.rzi`` and one FMA for it (PTX of jax 0.11.2 and of
    Triton 3.6). That quotient is off by up to 2 ULP, so that a whole one may come out one too small: ``6 % 3`` as 3.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.rem(x, y)
    return repair_remainder(x, y, lax.rem(lax.rem(x, y), y))


def repair_remainder(x: jax.Array, y: jax.Array, rest: jax.Array) -> jax.Array:
    """The remainder of `x` by `y` from `rest`, which may be one divisor too large or too small."""
    size, zero = jnp.abs(y), jnp.zeros_like(x)
    toward_zero = lambda sign: jnp.where(sign < zero, size, -size)
    rest = jnp.where(jnp.abs(rest) >= size, rest + toward_zero(rest), rest)
    other_sign = ((rest < zero) & (x > zero)) | ((rest > zero) & (x < zero))
    return jnp.where(other_sign, rest - toward_zero(x), rest)


def without_accuracy(params: Params) -> Params:
    """Parameters of a function without `accuracy`: a kernel has one version of it, and Mosaic GPU lowers no other.

    JAX >= 0.12 asks for the highest one in the derivative of `erf`.
    """
    return {**params, "accuracy": None} if "accuracy" in params else params


def substitute(primitive: str, params: Params, dtypes: Sequence[np.dtype]) -> Callable[..., jax.Array] | None:
    """A formula for a primitive of float32, made of common ones, or None if it needs none.

    Args:
      dtypes: Of its inputs, which the formula takes as float32.
    """
    if primitive == "pow" and jnp.issubdtype(dtypes[1], jnp.integer) and jnp.issubdtype(dtypes[0], jnp.floating):
        return lax.pow  # CUDA's has no exponents of another dtype
    if primitive == "round":
        return round_even if params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else round_away
    if primitive == "integer_pow" and params["y"] < -1:
        return lambda x: 1.0 / lax.integer_pow(x, -params["y"])
    if primitive == "reduce_precision" and params["exponent_bits"] in (8, 5):
        return lambda x: reduce_precision(x, params["exponent_bits"], params["mantissa_bits"])
    return {"erf": erf, "erfc": erfc, "erf_inv": erf_inv, "is_finite": is_finite}.get(primitive)
