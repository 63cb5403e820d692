"""Outputs and lse of every case, by every backend, against the oracle."""

import pytest

from tests.cases.table import CASES, in_tiers
from tests.support import evaluation


@pytest.mark.parametrize("case", in_tiers(CASES))
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_forward(case, backend):
    if evaluation.refused(case, backend):
        return
    evaluation.check_forward(case, backend)
