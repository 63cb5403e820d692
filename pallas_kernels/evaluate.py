"""Evaluates tile programs: each value at the size of its kind, each load once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from pallas_kernels.nodes import Node, reachable


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

    def substitutes(self) -> Mapping[str, Callable[..., jax.Array]]:
        """Functions that replace primitives here: an approximate tanh, say."""
        return {}


class Evaluation:
    """Values of the nodes of a program; what is computed once is kept.

    Values that were computed before a loop are used inside of it: `child` makes an evaluation for the body, whose own
    values end with it.
    """

    def __init__(self, space: Space, values: Mapping[Node, jax.Array]) -> None:
        self.space = space
        self.values = dict(values)

    def child(self, values: Mapping[Node, jax.Array]) -> Evaluation:
        """An evaluation that starts from these values too."""
        return Evaluation(self.space, {**self.values, **values})

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
        if node.op == "call":
            return self.values[node.inputs[0]]
        if node.op == "input":
            raise AssertionError(f"argument {node.value} of a mod was not given")
        ins = [self.space.spread(self.values[n], n.kind, node.kind) for n in node.inputs]
        if node.op == "load":
            return self.space.load(node, ins)
        assert node.apply is not None  # all that is left are primitives
        return self.space.substitutes().get(node.op, node.apply)(*ins)
