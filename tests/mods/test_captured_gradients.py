"""All gradients of the cases whose score mods capture arrays, by every backend, against the oracle."""

import pytest

from tests.cases.table import CASES, in_tiers
from tests.support import evaluation

CAPTURING = [case for case in CASES if evaluation.draw(case).floats()]


@pytest.mark.parametrize("case", in_tiers(CAPTURING))
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_captured_gradients(case, backend):
    if evaluation.refused(case, backend):
        return
    evaluation.check_gradients(case, backend, ("query", "key", "value", *evaluation.draw(case).floats()))
