"""Evaluates tile programs: each value in the shape of its kind, each load once, ``a * b + c`` as FMA."""

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


class Space(abc.ABC):
    """A backend of evaluation: shapes and layouts of values of each kind, and how elements are loaded."""

    @abc.abstractmethod
    def literal(self, node: Node) -> jax.Array:
        """A constant, as a uniform value."""

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
        """Likewise for primitives of one float32 argument, by functions of a multiple of it."""
        return {}


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
