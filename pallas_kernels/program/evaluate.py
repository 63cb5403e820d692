"""Evaluation of tile programs: each value in the shape of its kind, each load once, ``a * b + c`` as FMA.

The elementwise primitives have substitute formulas where the GPU compilers behind Pallas lack them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.ir import Axes, Node, reachable
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
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip
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
    residue = x - low
    odd = low - 2.0 * jnp.floor(low * 0.5)
    up = (residue > 0.5) | ((residue == 0.5) & (odd == 1.0))
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
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06, -3.5233877e-06,
    3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_ERF_INV_FAR = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
    0.000100950558, -0.000200214257,
)  # fmt: skip


def is_finite(x: jax.Array) -> jax.Array:
    """True if a number is neither NaN nor infinite."""
    return jnp.abs(x) < jnp.inf


def remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x - trunc(x / y) * y`` as C's `fmod`, exact up to quotients of 2 ** 44, where the hardware's is not.

    PTX has no remainder of floats. LLVM writes ``div.full``, ``cvt.rzi`` and one FMA for it (PTX of jax 0.11.2 and of
    Triton 3.6). That quotient is off by up to 2 ULP, so that a whole one may come out one too small: ``6 % 3`` as 3.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.rem(x, y)
    return repair_remainder(x, y, lax.rem(lax.rem(x, y), y))


def repair_remainder(x: jax.Array, y: jax.Array, residue: jax.Array) -> jax.Array:
    """The remainder of `x` by `y` from `residue`, which may be one divisor too large or too small."""
    size, zero = jnp.abs(y), jnp.zeros_like(x)
    toward_zero = lambda sign: jnp.where(sign < zero, size, -size)
    residue = jnp.where(jnp.abs(residue) >= size, residue + toward_zero(residue), residue)
    other_sign = ((residue < zero) & (x > zero)) | ((residue > zero) & (x < zero))
    return jnp.where(other_sign, residue - toward_zero(x), residue)


def without_accuracy(params: Params) -> Params:
    """Parameters of a function without `accuracy`: a kernel has one version of it, and Mosaic GPU lowers no other.

    JAX >= 0.12 asks for the highest one in the derivative of `erf`.
    """
    return {**params, "accuracy": None} if "accuracy" in params else params


def substitute(primitive: str, params: Params, dtypes: Sequence[np.dtype]) -> Callable[..., jax.Array] | None:
    """A formula for a primitive of float32, which takes inputs of `dtypes` as float32; None if it needs none."""
    if primitive == "pow" and jnp.issubdtype(dtypes[1], jnp.integer) and jnp.issubdtype(dtypes[0], jnp.floating):
        return lax.pow  # CUDA's has no exponents of another dtype
    if primitive == "round":
        return round_even if params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else round_away
    if primitive == "integer_pow" and params["y"] < -1:
        return lambda x: 1.0 / lax.integer_pow(x, -params["y"])
    if primitive == "reduce_precision" and params["exponent_bits"] in (8, 5):
        return lambda x: reduce_precision(x, params["exponent_bits"], params["mantissa_bits"])
    return {"erf": erf, "erfc": erfc, "erf_inv": erf_inv, "is_finite": is_finite}.get(primitive)


class Space(abc.ABC):
    """A backend of evaluation: shapes and layouts of values of each kind, and how elements are loaded."""

    def literal(self, node: Node) -> jax.Array:
        """A constant, as a uniform value."""
        return jnp.full((), node.value.item(), node.dtype)

    @abc.abstractmethod
    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Broadcasts a value of one kind to a kind with more axes."""

    @abc.abstractmethod
    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Loads elements of operand ``node.value``; the indices have the kind of the node."""

    def multiply_add(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """``a * b + c`` of float32 tiles, rounded once where the hardware does that."""
        return a * b + c

    def substitutes(self, kind: str) -> Mapping[str, Callable[..., jax.Array]]:
        """Functions that replace primitives in this backend, for values of a kind: an approximate tanh, say."""
        return {}

    def substitutes_of_multiples(self, kind: str) -> Mapping[str, OfMultiple]:
        """Substitutes for primitives of one float32 argument, by functions of a multiple of it."""
        return {}


class ArraySpace(Space):
    """Evaluates on arrays, of a shape for each kind; without one, uniform values are scalars."""

    def __init__(self, operands: Sequence[jax.Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.operands, self.shapes = operands, {Axes.UNIFORM: (), **shapes}

    def literal(self, node: Node) -> jax.Array:
        """An array of the shape of uniform values."""
        return self.spread(super().literal(node), node.kind, Axes.UNIFORM)

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Broadcasts to the shape of a kind."""
        return jnp.broadcast_to(x, self.shapes[to])

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Gathers elements."""
        x = self.operands[node.value]
        x = x[tuple(indices)] if indices else self.spread(x, node.kind, Axes.UNIFORM)
        return x.astype(node.dtype) if node.dtype == np.bool_ else x  # kernels get booleans as integers


class OfMultiple(NamedTuple):
    """A function that is computed as ``function(factor * argument)``: a logistic by an exponential of base 2."""

    factor: float
    function: Callable[[jax.Array], jax.Array]


class Product(NamedTuple):
    """A tile value that is kept as a product, ``tile * factor``, to be fused into FMAs; the factor may be smaller."""

    tile: jax.Array
    factor: jax.Array


class Evaluation:
    """Memoised values of the nodes of a program.

    Loop-invariant values are computed in the prologue and used in the mainloop: `child` makes an evaluation for the
    body, whose own values end with it. Literals are not kept: one that a loop or branch made must not outlive it.

    ``a * b + c`` is one FMA: compilers behind Pallas may not contract it (XLA's Triton emits ``mul.rn`` and
    ``add.rn``). An unused product is dead code, which the compiler drops.
    """

    def __init__(
        self, space: Space, values: Mapping[Node, jax.Array], products: Mapping[Node, Product] | None = None
    ) -> None:
        self.space = space
        self.values = dict(values)
        self.products = dict(products or {})

    def child(self, values: Mapping[Node, jax.Array], products: Mapping[Node, Product] | None = None) -> Evaluation:
        """An evaluation that starts from these values too; `products` has those that are kept as products."""
        products = products or {}
        computed = {node: x.tile * x.factor for node, x in products.items()}
        return Evaluation(self.space, {**self.values, **computed, **values}, {**self.products, **products})

    def prepare(self, nodes: Iterable[Node], kinds: Sequence[str]) -> None:
        """Computes all nodes of these kinds, in the prologue of a loop."""
        for node in nodes:
            if node.kind in kinds and node.op != "literal":
                self(node)

    def __call__(self, output: Node) -> jax.Array:
        """The value of a node, in the shape of its kind."""
        if output not in self.values:
            for node in reachable([output]):
                if node not in self.values and node.op != "literal":
                    self.values[node] = self._compute(node)
        return self._value(output)

    def _value(self, node: Node) -> jax.Array:
        return self.space.literal(node) if node.op == "literal" else self.values[node]

    def tile(self, output: Node) -> jax.Array:
        """The value of a node, as a tile value."""
        return self.space.spread(self(output), output.kind, Axes.TILE)

    def _compute(self, node: Node) -> jax.Array:
        if node.op in ("call", "stop_gradient"):
            return self._value(node.inputs[0])
        if node.op == "input":
            raise AssertionError(f"argument {node.value} of a mod was not given")
        if node.kind == Axes.TILE and node.dtype == np.float32:
            fused = self._scaled_product(node) if node.op == "mul" else self._sum_of_product(node)
            if fused is not None:
                return fused
        if node.op == "reduce_lanes":
            assert node.apply is not None  # see `Graph.reduce_lanes`
            return node.apply(*(self._spread(n, Axes.TILE) for n in node.inputs))
        if (shifted := self._divided_by_power(node)) is not None:
            return shifted
        ins = [self._spread(n, node.kind) for n in node.inputs]
        if node.op == "load":
            return self.space.load(node, ins)
        assert node.apply is not None  # all that is left are primitives
        of_multiple = self.space.substitutes_of_multiples(node.kind).get(node.op)
        if of_multiple is not None and node.dtype == np.float32:
            return of_multiple.function(self._multiple(node.inputs[0], of_multiple.factor))
        return self.space.substitutes(node.kind).get(node.op, node.apply)(*ins)

    def _spread(self, node: Node, to: str) -> jax.Array:
        return self.space.spread(self._value(node), node.kind, to)

    def _divided_by_power(self, node: Node) -> jax.Array | None:
        """A quotient or remainder of a non-negative integer by a power of two, as one shift or one mask.

        Compilers do not know the sign, and correct for it: 2 to 4 more instructions for each element.
        """
        if node.op not in ("div", "rem") or node.dtype.kind not in "iu":
            return None
        number, divisor = node.inputs
        if divisor.op != "literal" or number.bounds is None or number.bounds[0] < 0:
            return None
        power = int(divisor.value)
        if power < 1 or power & (power - 1):
            return None
        function, by = (
            (lax.shift_right_logical, power.bit_length() - 1) if node.op == "div" else (lax.bitwise_and, power - 1)
        )
        constant = self.space.literal(dataclasses.replace(divisor, value=np.asarray(by, divisor.dtype)))
        return function(self._spread(number, node.kind), self.space.spread(constant, Axes.UNIFORM, node.kind))

    def _scaled_product(self, node: Node) -> jax.Array | None:
        """A product times a uniform value: multiplies the factors first."""
        for product, other in (node.inputs, node.inputs[::-1]):
            if product in self.products and other.kind == Axes.UNIFORM:
                tile, factor = self.products[product]
                self.products[node] = Product(tile, factor * self._value(other))
                return tile * self.products[node].factor
        return None

    def _multiple(self, node: Node, constant: float) -> jax.Array:
        """A value times a constant, which goes into the factors of a product, or of a sum with one."""
        if node in self.products:
            tile, factor = self.products[node]
            return tile * (factor * constant)
        if node.op in ("add", "sub"):
            for i, (product, other) in enumerate((node.inputs, node.inputs[::-1])):
                if product in self.products and other.kind != Axes.TILE:
                    tile, factor = self.products[product]
                    factor, c = factor * constant, self._value(other) * constant
                    if node.op == "sub":
                        factor, c = (factor, -c) if i == 0 else (-factor, c)
                    added = self.space.spread(c, other.kind, Axes.TILE)
                    return self.space.multiply_add(tile, jnp.broadcast_to(factor, tile.shape), added)
        return self._value(node) * constant

    def _sum_of_product(self, node: Node) -> jax.Array | None:
        """``a * b + c``, ``a * b - c`` or ``c - a * b`` as one FMA; None for anything else."""
        if node.op not in ("add", "sub"):
            return None
        for i, (product, other) in enumerate((node.inputs, node.inputs[::-1])):
            factors = self._factors(product)
            if factors is not None:
                a, b = factors
                c = self._spread(other, Axes.TILE)
                if node.op == "sub":
                    a, c = (a, -c) if i == 0 else (-a, c)
                return self.space.multiply_add(a, b, c)
        return None

    def _factors(self, node: Node) -> tuple[jax.Array, jax.Array] | None:
        if node in self.products:
            tile, factor = self.products[node]
            return tile, jnp.broadcast_to(factor, tile.shape)
        if node.op == "mul" and node.kind == Axes.TILE:
            a, b = (self._spread(n, Axes.TILE) for n in node.inputs)
            return a, b
        return None
