"""All gradients of the cases whose score mods capture arrays, by every backend, against the oracle."""

import pytest

from tests.cases.table import CASES
from tests.support import evaluation

CAPTURING = [case for case in CASES if evaluation.draw(case).floats()]


@pytest.mark.parametrize(("backend", "case"), evaluation.runs(CAPTURING))
def test_captured_gradients(backend, case):
    if evaluation.refused(case, backend):
        return
    evaluation.check_gradients(case, backend, ("query", "key", "value", *evaluation.draw(case).floats()))
