"""Gradients of query, key, value and of the arrays that score mods capture, by every backend, against the oracle."""

import pytest

from tests.cases.table import CASES
from tests.support import evaluation


@pytest.mark.parametrize(("backend", "case"), evaluation.runs(CASES))
def test_backward(backend, case):
    if evaluation.refused(case, backend):
        return
    evaluation.check_gradients(case, backend, ("query", "key", "value", *evaluation.draw(case).floats()))
