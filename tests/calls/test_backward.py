"""Gradients of query, key and value, by every backend, against the oracle.

Cases that capture arrays are in `test_captured_gradients.py`, so that each case is compiled once.
"""

import pytest

from tests.cases.table import CASES, in_tiers
from tests.support import evaluation

OTHERS = [case for case in CASES if not evaluation.draw(case).floats()]


@pytest.mark.parametrize("case", in_tiers(OTHERS))
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_backward(case, backend):
    if evaluation.refused(case, backend):
        return
    evaluation.check_gradients(case, backend, ("query", "key", "value"))
