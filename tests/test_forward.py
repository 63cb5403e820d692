"""Outputs and lse of every case, by every backend, against the oracle."""

import pytest

from tests import evaluation, tolerance
from tests.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_forward(case, backend):
    if evaluation.refused(case, backend):
        return
    found, plain, exact = evaluation.forward(case, backend), evaluation.plain(case), evaluation.exact(case).results
    for name in ("out", "lse"):
        tolerance.check(name, getattr(found, name), getattr(plain, name), getattr(exact, name))
