"""The oracle's gradients against its own finite differences; the reference backend against the oracle."""

import functools

import numpy as np
import pytest

from tests.cases.table import CASES, distinct, in_tiers
from tests.support import evaluation, oracle, tolerance

SMOOTH = [case for case in CASES if case.score is None or case.score.smooth]


def test_table_has_enough_cases_of_different_names():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", in_tiers(SMOOTH))
def test_gradients_match_finite_differences(case):
    """Along one random direction through all inputs."""
    drawn, exact, rng = evaluation.draw(case), evaluation.exact(case), np.random.default_rng(5)
    floats = {name: drawn.score[name] for name in drawn.floats()}
    inputs = [x.astype(np.float64) for x in (drawn.query, drawn.key, drawn.value, *floats.values())]
    slopes = [rng.normal(size=x.shape) for x in inputs]
    scale = case.sizes.D**-0.5 if case.scale is None else case.scale
    d_out, d_lse = drawn.d_out.astype(np.float64), drawn.d_lse.astype(np.float64)

    def loss(step):
        q, k, v, *captured = (x + step * slope for x, slope in zip(inputs, slopes, strict=True))
        captures = {**drawn.score, **dict(zip(floats, captured, strict=True))}
        score = None if case.score is None else case.score.exact
        mask, sinks = functools.partial(evaluation.visible, case), captures.get("sinks")
        factors = evaluation.factors_of(case)
        found = oracle.forward(q, k, v, scale, score, mask, captures, sinks, factors, case.normalize)
        return np.sum(found.out * d_out) + np.sum(np.where(found.lse == -np.inf, 0, found.lse) * d_lse)

    gradients = exact.results
    gradients = [gradients.query, gradients.key, gradients.value, *(gradients.captures[name] for name in floats)]
    along = sum(np.sum(g * slope) for g, slope in zip(gradients, slopes, strict=True))
    size = np.sqrt(sum(np.sum((g * slope) ** 2) for g, slope in zip(gradients, slopes, strict=True)))
    step = 1e-6 / max(1, abs(scale))
    assert abs((loss(step) - loss(-step)) / (2 * step) - along) <= 1e-4 * size + 1e-6


@pytest.mark.parametrize("case", in_tiers(distinct(CASES), share=3))
def test_reference_matches_oracle(case):
    check_everything(case, "reference")


def check_everything(case, backend):
    found, plain, exact = evaluation.everything(case, backend), evaluation.plain(case), evaluation.exact(case).results
    for name in ("out", "lse"):
        tolerance.check(name, getattr(found, name), getattr(plain, name), getattr(exact, name))
    evaluation.check_gradients(case, backend, evaluation.gradients_of(case))


def test_tolerance_refuses_nan_and_wrong_infinities():
    exact = np.array([1.0, -np.inf])
    plain = exact.astype(np.float32)
    tolerance.check("same", plain, plain, exact)
    for wrong in ([np.nan, -np.inf], [1.0, 0.0], [np.inf, -np.inf], [1.1, -np.inf]):
        with pytest.raises(AssertionError, match="exceeds"):
            tolerance.check("wrong", np.asarray(wrong, np.float32), plain, exact)
