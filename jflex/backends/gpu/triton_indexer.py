"""Adapter of the Triton kernels of the lightning indexer, which Pallas compiles."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jflex._mesh import isolated_trace
from pallas_kernels.plan import missing_from_pallas
from pallas_kernels.spec import Route
from pallas_kernels.triton.indexer.limits import scores_not_taken, selection_not_taken
from pallas_kernels.triton.plan.limits import limit_of_platform


class Site(NamedTuple):
    """The device of a kernel, and whether Pallas' interpreter runs it."""

    platform: str
    device_kind: str
    interpret: bool

    @property
    def route(self) -> Route:
        """The runner."""
        return "interpreted" if self.interpret else "pallas"

    @property
    def limit(self) -> str | None:
        """Why nothing runs here, as part of a sentence, or None."""
        return limit_of_platform(self.platform, interpret=self.interpret) or (
            None if self.interpret else missing_from_pallas()
        )


def limit_of_scores(site: Site, query: jax.Array, key: jax.Array) -> str | None:
    """Why the kernel does not compute these scores, or None."""
    return site.limit or scores_not_taken(str(query.dtype), str(key.dtype), query.shape[-1])


@isolated_trace
def scores(site: Site, query: jax.Array, key: jax.Array, weights: jax.Array) -> jax.Array:
    """Scores [N, S] of arrays that are not empty; weights are float32."""
    from pallas_kernels.triton.indexer import scores
    from pallas_kernels.triton.launch import runner_for

    return scores.scores(runner_for(site.route, site.device_kind), query, key, weights)


def limit_of_selection(site: Site, scores: jax.Array, k: int) -> str | None:
    """Why the kernel does not select k of each row, or None."""
    return site.limit or selection_not_taken(str(scores.dtype), scores.shape[-1], k)


@isolated_trace
def select(site: Site, scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, and their positions; k is from 1 to their number, and there are rows."""
    from pallas_kernels.triton.indexer import select
    from pallas_kernels.triton.launch import runner_for

    return select.select(runner_for(site.route, site.device_kind), scores, k)
