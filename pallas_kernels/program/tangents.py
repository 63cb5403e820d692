"""The tangent of a score program: a tile program that is evaluated beside the value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.program.build import Program, Run, all_loads, box, evaluate_scalars, open_jaxpr
from pallas_kernels.program.ir import Axes, Node, reachable
from pallas_kernels.program.rules.primitive_rules import element
from pallas_kernels.program.rules.views import NotOnTile


@dataclasses.dataclass(frozen=True, eq=False)
class Tangent:
    """The tangent of a score program, in the graph of the program.

    It reads tangents of captured arrays at the indices at which the program reads the arrays. They are operands too:
    that of captured array ``i`` has the number ``i`` plus the number of captured arrays.
    """

    program: Program
    d_score: Node  # the argument: tangent of the score
    output: Node  # the tangent of the program's output

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """All nodes that program and tangent need."""
        return reachable([self.program.output, self.output])


def push_forward(program: Program, requested: Sequence[bool], *, moves_score: bool) -> Tangent:
    """Builds the tangent along the score, if it has one, and along captured arrays, which `requested` numbers.

    Raises:
      NotOnTile: A primitive of the tangent has no meaning on a tile.
    """
    graph = program.graph
    score, loads = program.arguments[0], all_loads(program)
    d_score = graph.input("d_score", Axes.TILE, np.float32)
    tangents = {score: d_score} if moves_score else {}
    for load in loads:
        if jnp.issubdtype(load.dtype, jnp.floating) and requested[load.value]:
            moved = graph.load(len(requested) + load.value, load.dtype, load.inputs)
            tangents[load] = graph.cast(moved, np.float32)
    if not tangents:
        return Tangent(program, d_score, graph.literal(0.0, np.float32))
    fixed, count = [n for n in (*program.arguments, *loads) if n not in tangents], len(tangents)

    def pushed(*values: jax.Array) -> jax.Array:
        moved, along = values[:count], values[count : 2 * count]
        others = dict(zip(fixed, values[2 * count :], strict=True))
        f = lambda *xs: evaluate_scalars(program, others | dict(zip(tangents, xs, strict=True)))
        return jax.jvp(f, moved, along)[1]

    ins = [*(graph.cast(n, np.float32) for n in tangents), *tangents.values(), *fixed]
    try:
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(pushed)(*(jax.ShapeDtypeStruct((), n.dtype) for n in ins)))
    except (NotImplementedError, TypeError) as error:  # a `custom_vjp` has no tangent
        raise NotOnTile(f"JAX has no tangent of it: {error}") from error
    [output] = Run(graph).jaxpr(jaxpr, consts, [box(n) for n in ins])
    return Tangent(program, d_score, element(graph, output))
