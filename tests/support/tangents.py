"""Tangents of the table of cases: near to the dense definition, and adjoint to the gradients of the float64 oracle."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tests.cases.table import Case
from tests.support import evaluation
from tests.support.drawn_arrays import draw, drawn_tangents


def having(cases: Sequence[Case]) -> list[Case]:
    """The cases with tangents: eight bits have none, nor a mod with a rule for reverse mode alone."""
    return [case for case in cases if not case.qk_dtype and case.name != "own_derivative"]


@functools.cache
def _by_definition(case: Case) -> Any:
    return evaluation.pushed(case, "reference", draw(case), in_haste=False)[1]


def check(case: Case, backend: str) -> None:
    """Fails unless the tangents of out and lse along random tangents are right."""
    in_haste = backend.endswith(("interpret", "emulated"))
    (_, lse), found = evaluation.pushed(case, backend, draw(case), in_haste=in_haste)
    largest = np.abs(lse, where=np.isfinite(lse), out=np.zeros(lse.shape)).max(initial=0)
    error = (1e-4 if case.dtype == "float32" else 0.02) + 4 * np.finfo(np.float32).eps * largest  # weights by the lse
    for x, y in zip(found, _by_definition(case), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.isfinite(x).all()
        assert np.abs(x - y).max(initial=0) <= error * (1e-3 + np.abs(y).max(initial=0)), case.name
    x, exact, product = (
        draw(case),
        evaluation.exact(case),
        lambda *xs: np.prod([np.asarray(x, np.float64) for x in xs], 0),
    )
    gradients = (*exact.results[2:5], {name: exact.results.captures[name] for name in x.floats()})
    products = jax.tree.leaves(jax.tree.map(product, gradients, drawn_tangents((*x[:3], x.floats()))))
    pairs = [product(*pair) for pair in zip(found, (x.d_out, x.d_lse), strict=True)]
    scale = sum(np.sqrt((p**2).sum()) for p in [*pairs, *products])
    assert abs(sum(p.sum() for p in pairs) - sum(p.sum() for p in products)) <= 5 * error * scale
