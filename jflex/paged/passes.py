"""Paged attention of a backend, as a step that JAX's programs hold and XLA may split over devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from jflex._jax import partitioning
from jflex._jax.partitioning import Axes, Split
from jflex.backends import paged_backends as backends
from jflex.mods.trace import trace_mask_mod, trace_score_mod
from jflex.paged.problem import PagedInputs, PagedProblem

_ROWS, _PAGES = Axes(None, 1), Axes(None, 2, per_key=True)


@dataclasses.dataclass(frozen=True)
class PagedPass:
    """``PagedInputs -> (out, lse)``."""

    backend: str
    problem: PagedProblem

    def __call__(self, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
        """Runs the backend."""
        return backends.get(self.backend).attend(self.problem, inputs)

    def axes(self, inputs: PagedInputs) -> tuple[list[Axes], list[Axes]]:
        """Of the flat inputs and outputs: heads are independent, and requests share pages."""
        others = len(jax.tree.leaves(inputs)) - 3
        return [_ROWS, _PAGES, _PAGES, *[Axes()] * others], [_ROWS, _ROWS]

    def partitioned(self, inputs: PagedInputs, outputs: Any, whole: Callable[..., Any]) -> Callable[..., Any]:
        """See `jflex._jax.primitive.Pass`."""
        del outputs
        tree = jax.tree.structure(inputs)

        def local(mesh: Any, split: Split, *flat: jax.Array) -> tuple[jax.Array, ...]:
            problem, own = _shard_of(self.problem, jax.tree.unflatten(tree, flat), mesh, split.heads)
            return tuple(PagedPass(self.backend, problem)(own))

        return partitioning.partitioned(self.problem, whole, local, *self.axes(inputs))

    def out_specs(self, inputs: PagedInputs, outputs: Any, spec: Any) -> list[Any]:
        """See `jflex._jax.primitive.Pass`."""
        names = () if spec[1] is None else spec[1] if isinstance(spec[1], tuple) else (spec[1],)
        split = Split((), names)
        return [split.spec(_ROWS, len(x.shape)) for x in jax.tree.leaves(outputs)]


def _shard_of(
    problem: PagedProblem, inputs: PagedInputs, mesh: Any, names: tuple[str, ...]
) -> tuple[PagedProblem, PagedInputs]:
    """The problem of some heads, inside of the program of one shard; mods still see the numbers of the whole."""
    pieces = math.prod(mesh.shape[name] for name in names)
    if pieces == 1:
        return problem, inputs
    first = (None, jax.lax.axis_index(names) * (problem.Hq // pieces))
    score, score_operands = partitioning.shifted(problem.score, inputs.score_operands, first, trace_score_mod)
    mask, mask_operands = partitioning.shifted(problem.mask, inputs.mask_operands, first, trace_mask_mod)
    sizes = {"Hq": problem.Hq // pieces, "Hkv": problem.Hkv // pieces}
    local = dataclasses.replace(problem, **sizes, score=score, mask=mask)
    return local, inputs._replace(score_operands=score_operands, mask_operands=mask_operands)
