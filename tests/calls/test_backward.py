"""Gradients of query, key and value, by every backend, against the oracle.

Cases that capture arrays are in `test_captured_gradients.py`, so that each case is compiled once.
"""

import pytest

from tests.cases.table import CASES
from tests.support import evaluation

OTHERS = [case for case in CASES if not evaluation.draw(case).floats()]


@pytest.mark.parametrize(("backend", "case"), evaluation.runs(OTHERS))
def test_backward(backend, case):
    if evaluation.refused(case, backend):
        return
    evaluation.check_gradients(case, backend, ("query", "key", "value"))
