"""Builds the tile programs of key and value mods, which kernels evaluate on the tiles that they load.

A tile has keys as rows and lanes (elements of a head) as columns. The vector is an operand of its own, `VECTOR`, loaded
at the key of the row and at a lane that the program computes: the other half of a rotation is a second load of the same
cache lines. What depends on the lane alone, such as the frequencies of a rotation, is loop-invariant.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jax.extend import core

from pallas_kernels.program.build import CALLS, IDENTITIES, RULED, Run, body_of, open_jaxpr
from pallas_kernels.program.evaluate import ELEMENTWISE
from pallas_kernels.program.ir import Axes, Graph, Node, reachable
from pallas_kernels.program.rules.primitive_rules import choose
from pallas_kernels.program.rules.views import NotOnTile
from pallas_kernels.program.vectors import vector_rules
from pallas_kernels.program.vectors.lazy_arrays import (
    LazyArray,
    added,
    as_node,
    captured,
    clamped,
    constant,
    is_below,
    multiplied,
    scalar,
)
from pallas_kernels.types import aval_of

MIN_WIDTH = 16  # of a tile: what an MMA takes
MAX_CHUNKS = 8
VECTOR = -1  # the operand that is the vector itself; its indices are the key and the lane


class Chunk(NamedTuple):
    """Lanes of a vector that are one tile: `width` of them, from `first` on, in steps."""

    first: int
    width: int
    step: int = 1

    def ends_after(self, size: int) -> bool:
        """True if there are lanes beyond the vector."""
        return self.first + self.step * (self.width - 1) >= size


Chunks = tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class VectorSizes:
    """Sizes of the arguments of a vector mod."""

    B: int  # batch entries, or requests
    H: int
    S: int
    size: int
    dtype: str  # of the array that holds it; the result has it too


@dataclasses.dataclass(frozen=True, eq=False)
class LaneProgram:
    """A vector mod on tiles of one width."""

    width: int  # lanes of a tile
    # ``b, h, q, k``: batch entry, key head, key (the row) and lane of the tile (the column)
    arguments: tuple[Node, ...]
    outputs: tuple[tuple[Chunk, Node], ...]  # the result for each chunk of this width; zeros beyond the vector

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """All nodes that the outputs need, inputs first."""
        return reachable([node for _, node in self.outputs])

    @functools.cached_property
    def vector_loads(self) -> list[Node]:
        """The loads of the vector, in topological order."""
        return [node for node in self.nodes if node.op == "load" and node.value == VECTOR]

    def argument(self, name: str) -> Node:
        """The node of ``b``, ``h``, ``q`` or ``k``."""
        return next(node for node in self.arguments if node.value == name)

    def place_in_pair(self, load: Node) -> int | None:
        """0 or 1 for a load of all even or all odd lanes, which are loaded together; None for others."""
        lane, odd = load.inputs[1], 0
        if lane.op == "add" and lane.inputs[1].op == "literal":
            lane, odd = lane.inputs[0], int(lane.inputs[1].value)
        if lane.op != "mul" or odd not in (0, 1):
            return None
        is_even = lane.inputs[0] is self.argument("k") and lane.inputs[1].bounds == (2, 2)
        return odd if is_even else None


@dataclasses.dataclass(frozen=True, eq=False)
class VectorProgram:
    """The tile programs of a vector mod."""

    chunks: Chunks  # the tiles that make up a vector, in order
    lane_programs: tuple[LaneProgram, ...]

    @property
    def cost(self) -> int:
        """Elements that are computed or loaded for each key."""
        return sum(program.width for program in self.lane_programs for node in program.nodes if node.kind == Axes.TILE)


def trace_vector_program(
    jaxpr: core.ClosedJaxpr, operands: Sequence[tuple[tuple[int, ...], str]], sizes: VectorSizes, chunks: Chunks
) -> VectorProgram:
    """Builds the tile programs of a vector mod, whose jaxpr takes ``vector, b, h, idx, *operands``, in float32.

    Raises:
      NotOnTile: A primitive has no meaning on a tile.
    """
    by_width = lambda chunk: chunk.width
    groups = (tuple(group) for _, group in itertools.groupby(sorted(chunks, key=by_width), by_width))
    return VectorProgram(chunks, tuple(_lane_program(jaxpr, operands, sizes, group) for group in groups))


def chunkings(size: int, plain: Chunks) -> tuple[Chunks, ...]:
    """Chunkings of a vector, for a mod that moves lanes.

    If the two lanes of each rotated pair are in different chunks, each element is loaded and each angle computed once.

    Args:
      plain: The chunks without a mod.

    Returns:
      Halves or smaller pieces of a width that is a power of two, even and odd lanes, and the plain chunks. The first of
      equal cost is best: Triton holds a tile that a mod has made in shared memory once more, as operand of an MMA.

    >>> [len(chunks) for chunks in chunkings(128, (Chunk(0, 128),))]
    [2, 4, 2, 1]
    """
    half = size // 2
    piece = half & -half
    equal = lambda width: tuple(Chunk(first, width) for first in range(0, size, width))
    candidates = [equal(width) for width in (piece, piece // 2) if size % 2 == 0 and width >= MIN_WIDTH]
    if size % 2 == 0 and piece == half >= MIN_WIDTH:
        candidates.append((Chunk(0, half, 2), Chunk(1, half, 2)))
    return (*(chunks for chunks in candidates if len(chunks) <= MAX_CHUNKS), plain)


def _lane_program(
    jaxpr: core.ClosedJaxpr, operands: Sequence[tuple[tuple[int, ...], str]], sizes: VectorSizes, chunks: Chunks
) -> LaneProgram:
    """The program for chunks of one width."""
    graph, width = Graph(), chunks[0].width
    b, h, key, lane = arguments = tuple(
        graph.input(name, kind, np.int32, (0, max(size - 1, 0)))
        for name, kind, size in (
            ("b", Axes.UNIFORM, sizes.B),
            ("h", Axes.UNIFORM, sizes.H),
            ("q", Axes.ROW, sizes.S),
            ("k", Axes.COLUMN, width),
        )
    )
    dtype = np.dtype(sizes.dtype)
    loaded = lambda index: graph.cast(graph.load(VECTOR, dtype, [key, as_node(graph, index[0])]), np.float32)
    vector = LazyArray((sizes.size,), np.float32, loaded)
    arrays = [captured(graph, i, shape, kind) for i, (shape, kind) in enumerate(operands)]
    opened, consts = open_jaxpr(jaxpr)
    [out] = _VectorRun(graph, vector_rules.Lanes(lane, width, chunks[0].step)).jaxpr(
        opened, consts, [vector, *map(scalar, (b, h, key)), *arrays]
    )
    outputs = []
    for chunk in chunks:
        index = added(graph, multiplied(graph, lane, chunk.step), chunk.first)
        node = graph.cast(out.at((clamped(graph, index, sizes.size),)), dtype)
        if chunk.ends_after(sizes.size):
            node = graph.select(is_below(graph, index, sizes.size), node, graph.literal(0, dtype))
        outputs.append((chunk, node))
    return LaneProgram(width, arguments, tuple(outputs))


class _VectorRun:
    """Interprets jaxprs on arrays that are functions of an index; elementwise primitives as on scalars."""

    def __init__(self, graph: Graph, lanes: vector_rules.Lanes) -> None:
        self.graph, self.lanes, self.scalars = graph, lanes, Run(graph)

    def jaxpr(
        self, jaxpr: core.Jaxpr, consts: Sequence[npt.ArrayLike], args: Sequence[LazyArray]
    ) -> Sequence[LazyArray]:
        """Values of the outputs."""
        env = dict(zip(jaxpr.constvars, (constant(self.graph, x) for x in consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(v: core.Var | core.Literal) -> LazyArray:
            return constant(self.graph, v.val, aval_of(v).dtype) if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, ins: list[LazyArray]) -> Sequence[LazyArray]:
        name, params, graph = eqn.primitive.name, eqn.params, self.graph
        shape = tuple(aval_of(eqn.outvars[0]).shape)
        if name in IDENTITIES or name == "stop_gradient":
            return ins[: len(eqn.outvars)]
        if name in CALLS or name in RULED:
            return self.jaxpr(*body_of(eqn), ins)
        if name == "cond":
            return self._cond(eqn, ins)
        if name == "split":
            return vector_rules.split(graph, ins[0], params["axis"], params["sizes"])
        if name == "unstack":
            return [vector_rules.unstacked(ins[0], params["axis"], i) for i in range(len(eqn.outvars))]
        if name in vector_rules.REDUCTIONS:
            return [vector_rules.reduce(graph, name, ins[0], params["axes"], self.lanes)]
        if name == "dot_general":
            return [vector_rules.dot_general(graph, ins, params, shape, self.lanes)]
        if name in vector_rules.RULES:
            return [vector_rules.RULES[name](graph, ins, params, shape)]
        if name in ELEMENTWISE:
            function = self.scalars.elementwise(eqn)
            element = lambda index: function([x.broadcast_at(index) for x in ins])
            return [LazyArray(shape, aval_of(eqn.outvars[0]).dtype, element)]
        raise NotOnTile(f"primitive `{name}` has no meaning on a tile of vectors")

    def _cond(self, eqn: core.JaxprEqn, ins: list[LazyArray]) -> Sequence[LazyArray]:
        which, *operands = ins
        branches = [self.jaxpr(*open_jaxpr(branch), operands) for branch in eqn.params["branches"]]

        def of_output(outs: tuple[LazyArray, ...]) -> LazyArray:
            element = lambda index: choose(self.graph, which.at(()), [x.at(index) for x in outs])
            return LazyArray(outs[0].shape, outs[0].dtype, element)

        return [of_output(outs) for outs in zip(*branches, strict=True)]
