"""The case tables through official Triton's interpreter; `tests/kernels/test_official_triton.py` runs this file.

`TRITON_INTERPRET=1 pytest tests/support/official_interpreted.py`, in a process of its own.
"""

import jax
import pytest

from tests.cases import official_primitives, paged_cases
from tests.cases.table import CASES
from tests.support import evaluation, paged_evaluation, triton_interpreter

# The interpreter adds no bfloat16 atomically.
ATOMIC_BFLOAT16 = {"bias_bf16"}
TRUNCATED = "convert_element_type.bfloat16"  # the interpreter does not round to nearest
LIBDEVICE = {"acos", "asin", "atan", "atan2", "erf_inv", "erfc", "nextafter", "round", "round.away"}
SUPPORTED = [case for case in CASES if "triton" not in case.unsupported]


@pytest.fixture(autouse=True)
def on_this_cpu(monkeypatch):
    triton_interpreter.replaced(monkeypatch)
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_forward(case):
    evaluation.check_forward(case, "official_triton")


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_backward(case):
    if case.name in ATOMIC_BFLOAT16:
        pytest.skip("Triton's interpreter adds no bfloat16 atomically")
    evaluation.check_gradients(case, "official_triton", evaluation.gradients_of(case))


@pytest.mark.parametrize("case", paged_cases.CASES, ids=str)
def test_paged(case):
    paged_evaluation.check(case, paged_evaluation.run(case, "official_triton"))


@pytest.mark.parametrize(("row", "dtype"), official_primitives.CASES)
def test_primitive(row, dtype):
    if row.name in LIBDEVICE:
        pytest.skip("Triton's interpreter has no libdevice")
    if row.name == TRUNCATED:
        pytest.skip("Triton's interpreter truncates to bfloat16")
    official_primitives.check_row(row, dtype)


@pytest.mark.parametrize("name", official_primitives.MEMORY)
def test_memory(name):
    official_primitives.check_memory(name)
