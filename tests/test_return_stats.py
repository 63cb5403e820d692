"""`return_stats`: the statistics of rows and their gradients, against float64; what they cost; what refuses them."""


import pytest

from tests import evaluation, stats_evaluation
from tests.cases import CASES, LENGTHS

pytestmark = pytest.mark.usefixtures("in_haste")

TABLE = {case.name: case for case in [*CASES, *LENGTHS]}
NAMES = [
    "alibi_like", "bnth", "causal_mask_mod", "decode", "decode_sees_nothing", "dropout", "extreme_logits", "grouped_causal",
    "head_sizes_40_16", "length_many_mask_mod", "length_sinks", "negative_scale", "one_key", "own_derivative",
    "rows_that_see_nothing", "shared_keys_bias", "sinks", "sinks_see_nothing", "slopes", "softcap", "softcap_dropout_sinks",
    "squared_through_causal_blocks", "table",
]  # fmt: skip
BACKENDS = ["reference", *evaluation.BACKENDS]


@pytest.mark.parametrize("case", [TABLE[name] for name in NAMES], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(case, backend):
    stats_evaluation.check(case, backend)
