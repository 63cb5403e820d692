"""Two GPUs of one host against the oracle: results and gradients of every strategy, and pages divided among them."""

import jax
import numpy as np
import pytest

from jflex import context_parallel
from tests.cases import captured_pairs as captured
from tests.cases import mask_pairs as masks
from tests.cases import paged_cases
from tests.cases.table import Case
from tests.cases.table import Sizes as N
from tests.support import divided_pages, evaluation
from tests.support.context_parallel_calls import attend_by, strategies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs of one host")]
SIZES = N(T=1024, Hq=4, Hkv=2, D=64)
ZIGZAG = context_parallel.zigzag_order(2)
SHUFFLED = np.array([3, 0, 6, 5, 7, 1, 4, 2])
# A case and the order of the tokens.
CASES = {
    "causal": (Case("causal_two_gpus", mask=masks.causal, sizes=SIZES, block=128, dtype="bfloat16"), ZIGZAG),
    "documents": (
        Case("documents_two_gpus", captured.slopes, masks.documents, SIZES, block=128, by_batch=True, dtype="bfloat16"),
        SHUFFLED,
    ),
    "window": (Case("window_two_gpus", mask=masks.window, sizes=SIZES, block=64, dtype="bfloat16"), None),
    "sinks": (
        Case("sinks_two_gpus", captured.slopes, masks.strictly_causal, SIZES, block=128, sinks=True, dtype="bfloat16"),
        ZIGZAG,
    ),
}


@strategies
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_on_two_gpus(name, implementation, strategy):
    case, order = CASES[name]
    attend = attend_by(case, {"context": 2}, order, strategy, implementation, interpret=False)
    found, by_plain, exact = evaluation.everything_by(case, attend), evaluation.plain(case), evaluation.exact(case)
    names = evaluation.gradients_of(case)
    evaluation.compare_forward(case, found, by_plain, exact)
    evaluation.compare_gradients(case, found, by_plain, exact, names)


PAGED = ["decode", "mixed", "window", "bias_by_key", "rotated_pages_of_64", "e4m3", "sigmoid", "divided"]


@pytest.mark.parametrize("implementation", ["triton", "official_triton"])
@pytest.mark.parametrize("name", PAGED)
def test_divided_pages_on_two_gpus(name, implementation):
    case = paged_cases.in_dtype(divided_pages.BY_NAME[name], dtype="bfloat16")
    divided_pages.check_in_turn(case, {"context": 2}, implementation)
