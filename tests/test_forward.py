"""Outputs and lse of every case, by every backend, against the oracle."""

import pytest

from tests import evaluation
from tests.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_forward(case, backend):
    if evaluation.refused(case, backend):
        return
    evaluation.check_forward(case, backend)
