"""Outputs and lse of every case, by every backend, against the oracle."""

import pytest

from tests.cases.table import CASES
from tests.support import evaluation


@pytest.mark.parametrize(("backend", "case"), evaluation.runs(CASES))
def test_forward(backend, case):
    if evaluation.refused(case, backend):
        return
    evaluation.check_forward(case, backend)
