"""Evaluates tile programs: each value at the size of its kind, each load once, sums of products in one step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.program.ir import Node, reachable


class Space(abc.ABC):
    """Where a program is evaluated: what values of each kind are, and how elements are loaded."""

    @abc.abstractmethod
    def literal(self, node: Node) -> jax.Array:
        """A constant, of kind ``""``."""

    @abc.abstractmethod
    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Repeats a value of one kind to a kind that includes it."""

    @abc.abstractmethod
    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Loads elements of operand ``node.value``; the indices have the kind of the node."""

    def multiply_add(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """``a * b + c`` of float32 tiles, rounded once where the hardware does that."""
        return a * b + c

    def substitutes(self, kind: str) -> Mapping[str, Callable[..., jax.Array]]:
        """Functions that replace primitives here, for values of a kind: an approximate tanh, say."""
        return {}


class Product(NamedTuple):
    """A value of the size of a tile that need not be computed by itself: a tile times something smaller, or a tile."""

    tile: jax.Array
    factor: jax.Array


class Evaluation:
    """Values of the nodes of a program; what is computed once is kept.

    Values that were computed before a loop are used inside of it: `child` makes an evaluation for the body, whose own
    values end with it.

    Sums of a product are computed as one multiply-add: compilers behind Pallas may not fuse them (XLA's Triton emits
    ``mul.rn`` and ``add.rn``). What is then not used of the product, the compiler drops.
    """

    def __init__(
        self, space: Space, values: Mapping[Node, jax.Array], products: Mapping[Node, Product] | None = None
    ) -> None:
        self.space = space
        self.values = dict(values)
        self.products = dict(products or {})

    def child(self, values: Mapping[Node, jax.Array], products: Mapping[Node, Product] | None = None) -> Evaluation:
        """An evaluation that starts from these values too; `products` says of which some are products."""
        products = products or {}
        given = {node: x.tile * x.factor for node, x in products.items()}
        return Evaluation(self.space, {**self.values, **given, **values}, {**self.products, **products})

    def prepare(self, nodes: Iterable[Node], kinds: Sequence[str]) -> None:
        """Computes all nodes of these kinds, ahead of a loop."""
        for node in nodes:
            if node.kind in kinds and node.op != "literal":
                self(node)

    def __call__(self, output: Node) -> jax.Array:
        """The value of a node, at the size of its kind."""
        if output not in self.values:
            for node in reachable([output]):
                if node not in self.values:
                    self.values[node] = self._compute(node)
        return self.values[output]

    def tile(self, output: Node) -> jax.Array:
        """The value of a node, at the size of a tile."""
        return self.space.spread(self(output), output.kind, "qk")

    def _compute(self, node: Node) -> jax.Array:
        if node.op == "literal":
            return self.space.literal(node)
        if node.op in ("call", "stop_gradient"):
            return self.values[node.inputs[0]]
        if node.op == "input":
            raise AssertionError(f"argument {node.value} of a mod was not given")
        if node.kind == "qk" and node.dtype == np.float32:
            short = self._scaled_product(node) if node.op == "mul" else self._sum_of_product(node)
            if short is not None:
                return short
        ins = [self._spread(n, node.kind) for n in node.inputs]
        if node.op == "load":
            return self.space.load(node, ins)
        assert node.apply is not None  # all that is left are primitives
        return self.space.substitutes(node.kind).get(node.op, node.apply)(*ins)

    def _spread(self, node: Node, to: str) -> jax.Array:
        return self.space.spread(self.values[node], node.kind, to)

    def _scaled_product(self, node: Node) -> jax.Array | None:
        """The value of a product with a known factor times a uniform value: the factors are multiplied first."""
        for product, other in (node.inputs, node.inputs[::-1]):
            if product in self.products and other.kind == "":
                tile, factor = self.products[product]
                self.products[node] = Product(tile, factor * self.values[other])
                return tile * self.products[node].factor
        return None

    def _sum_of_product(self, node: Node) -> jax.Array | None:
        """The value of ``a * b + c``, ``a * b - c`` or ``c - a * b`` as one step; None of anything else."""
        if node.op not in ("add", "sub"):
            return None
        for i, (product, other) in enumerate((node.inputs, node.inputs[::-1])):
            factors = self._factors(product)
            if factors is not None:
                a, b = factors
                c = self._spread(other, "qk")
                if node.op == "sub":
                    a, c = (a, -c) if i == 0 else (-a, c)
                return self.space.multiply_add(a, b, c)
        return None

    def _factors(self, node: Node) -> tuple[jax.Array, jax.Array] | None:
        if node in self.products:
            tile, factor = self.products[node]
            return tile, jnp.broadcast_to(factor, tile.shape)
        if node.op == "mul" and node.kind == "qk":
            a, b = (self._spread(n, "qk") for n in node.inputs)
            return a, b
        return None
