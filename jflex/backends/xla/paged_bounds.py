"""Which tiles of keys some queries visit, in plain JAX: up to the length, and without those that a mask hides whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jflex.backends.gpu.programs import programs_of
from jflex.paged.problem import PagedInputs, PagedProblem

MOST_JUDGED = 1024  # runs of tiles that are judged at once


def walk_of(
    p: PagedProblem, inputs: PagedInputs, request: jax.Array, n: jax.Array, h: jax.Array, length: jax.Array, tile: int
) -> tuple[jax.Array, jax.Array]:
    """The first tile, and the one after the last.

    Args:
      p: The problem.
      inputs: Its arrays.
      request: The request.
      n: Packed queries.
      h: All query heads.
      length: Keys of the request.
      tile: Keys in a tile.
    """
    end = (length + tile - 1) // tile
    programs = programs_of(p, heads_in_rows=True) if p.mask is not None else ""
    if isinstance(programs, str):  # no mask, or one of which no program can be made
        return jnp.zeros_like(end), end
    from pallas_kernels.program import intervals
    from pallas_kernels.program.evaluate import Evaluation

    program = programs.mask
    rows = jnp.stack([x.reshape(-1) for x in jnp.meshgrid(n, h, indexing="ij")])
    indices = {"b": request, "q": rows[0], "h": rows[1]}
    space = _space(inputs.mask_operands, rows.shape[1])
    known = Evaluation(space, {node: indices[node.value] for node in program.arguments if node.value in indices})
    tiles = -(-p.S // tile)
    run = -(-tiles // MOST_JUDGED)
    nth = jnp.arange(-(-tiles // run), dtype=jnp.int32)
    first = nth * (run * tile)
    seen = intervals.visibility(program, known, first, first + (run * tile - 1)).some & (nth * run < end)
    begin = jnp.min(jnp.where(seen, nth, len(nth))) * run
    return jnp.minimum(begin, end), jnp.minimum((jnp.max(jnp.where(seen, nth, -1)) + 1) * run, end)


def _space(operands: Sequence[jax.Array], count: int) -> Any:
    """Values of rows as ``[count]``, of nothing as ``[]``."""
    from pallas_kernels.program.evaluate import Space

    class Rows(Space):
        def literal(self, node: Any) -> jax.Array:
            return jnp.full((), node.value.item(), node.dtype)

        def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
            return jnp.broadcast_to(x, (count,)) if to == "q" else x

        def load(self, node: Any, indices: Sequence[jax.Array]) -> jax.Array:
            return operands[node.value][tuple(indices)]

    return Rows()
