"""Outputs and lse of every case, by every backend, against the oracle."""

import jax
import numpy as np
import pytest

from tests.cases.table import CASES
from tests.support import evaluation


@pytest.mark.parametrize(("backend", "case"), evaluation.runs(CASES))
def test_forward(backend, case):
    if evaluation.refused(case, backend):
        return
    evaluation.check_forward(case, backend)


# --- float32 at JAX's default precision

TF32 = 2.0**-10  # one unit in the last place
NAMES = ("causal_score", "relative", "bias_bhqk", "table", "identity")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES and case.dtype == "float32"], ids=str)
def test_tf32(case):
    x, exact = jax.tree.map(jax.numpy.asarray, evaluation.draw(case)), evaluation.exact(case)

    def run(query, key, value):
        blocks = evaluation.block_mask(case)
        return evaluation.call(case, "triton", query, key, value, x.score, x.mask, blocks)

    (out, lse), pull = jax.vjp(run, x.query, x.key, x.value)
    found = {"out": out, "lse": lse} | dict(zip(("query", "key", "value"), pull((x.d_out, x.d_lse)), strict=True))
    for name, got in found.items():
        right = getattr(exact.results, name)
        seen = np.isfinite(right)
        assert np.array_equal(seen, np.isfinite(np.asarray(got))), name
        # Each of two chained products rounds both of its inputs; the largest entries of a tensor are of the size of its
        # sums.
        assert np.abs(np.asarray(got) - right)[seen].max() <= 4 * TF32 * np.abs(right[seen]).max(), name
