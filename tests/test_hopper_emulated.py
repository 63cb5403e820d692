"""The Hopper kernels on a CPU, by `tests.hopper_emulator`: results and gradients of the table of cases."""

import pytest

from tests import evaluation
from tests.hopper_cases import HOPPER, MANY, ONE_PASS

# Of those with many tiles, the emulator has enough in any case.
CASES = [case for case in HOPPER if not case.unsupported and case not in MANY]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case):
    evaluation.check_forward(case, "mosaic_gpu-emulated")
    evaluation.check_gradients(case, "mosaic_gpu-emulated", ("query", "key", "value", *evaluation.draw(case).floats()))


@pytest.mark.parametrize("case", [case for case in ONE_PASS if case not in MANY], ids=str)
def test_gradients_in_one_pass(case):
    names = ("query", "key", "value", *evaluation.draw(case).floats())
    evaluation.check_gradients(case, "mosaic_gpu-emulated_one_pass", names)
