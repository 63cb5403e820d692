"""Tiles of keys that some queries visit, in plain JAX: up to the length, without fully masked tiles at either end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jflex._mesh import isolated_trace
from jflex.backends.base import PagedInputs
from pallas_kernels.plan import Refusal
from pallas_kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from pallas_kernels.program.build import Program
    from pallas_kernels.program.evaluate import Space
    from pallas_kernels.program.ir import Node

MOST_JUDGED = 1024  # runs of tiles whose bounds are evaluated at once


def walk_of(
    p: AttentionSpec, inputs: PagedInputs, request: jax.Array, n: jax.Array, h: jax.Array, length: jax.Array, tile: int
) -> tuple[jax.Array, jax.Array]:
    """The first tile, and the one after the last."""
    end = (length + tile - 1) // tile
    program = None if p.mask_mod is None else _mask_program(p)
    if program is None:  # no mask, or one without a kernel program
        return jnp.zeros_like(end), end
    from pallas_kernels.program import intervals
    from pallas_kernels.program.evaluate import Evaluation

    rows = jnp.stack([x.reshape(-1) for x in jnp.meshgrid(n, h, indexing="ij")])
    indices = {"b": request, "q": rows[0], "h": rows[1]}
    space = _space(inputs.captured.mask, rows.shape[1])
    known = Evaluation(space, {node: indices[node.value] for node in program.arguments if node.value in indices})
    tiles = -(-p.S // tile)
    run = -(-tiles // MOST_JUDGED)
    nth = jnp.arange(-(-tiles // run), dtype=jnp.int32)
    first = nth * (run * tile)
    seen = intervals.visibility(program, known, first, first + (run * tile - 1)).some & (nth * run < end)
    begin = jnp.min(jnp.where(seen, nth, len(nth))) * run
    return jnp.minimum(begin, end), jnp.minimum((jnp.max(jnp.where(seen, nth, -1)) + 1) * run, end)


@isolated_trace
def _mask_program(p: AttentionSpec) -> Program | None:
    """The kernel program of the mask, with heads in rows; None if there is none."""
    from pallas_kernels.plan import with_programs

    planned = with_programs(p.replace(score_mod=None, heads_in_rows=True))
    return None if isinstance(planned, Refusal) else planned.programs.mask


def _space(operands: Sequence[jax.Array], count: int) -> Space:
    """Row values have the shape ``[count]``, uniform ones ``[]``."""
    from pallas_kernels.program.evaluate import Space

    class Rows(Space):
        def literal(self, node: Node) -> jax.Array:
            return jnp.full((), node.value.item(), node.dtype)

        def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
            return jnp.broadcast_to(x, (count,)) if to == "q" else x

        def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
            return operands[node.value][tuple(indices)]

    return Rows()
