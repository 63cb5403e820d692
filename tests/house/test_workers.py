"""Which tests stay together on one worker of pytest-xdist."""

import pytest

from tests.support.workers import group_of


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/calls/test_forward.py::test_forward[xla-causal]", "causal"),
        ("tests/calls/test_backward.py::test_backward[triton-interpret-causal]", "causal"),
        ("tests/house/test_oracle.py::test_matches_oracle[causal]", "causal"),
        ("tests/house/test_oracle.py::test_names", "tests/house/test_oracle.py::test_names"),
        ("tests/masks/test_x.py::test_x[xla-16]", "tests/masks/test_x.py::test_x[xla-16]"),
        ("tests/serving/test_engine.py::test_tokens[int8]", "tests/serving"),
        ("tests/train/test_train.py::test_mesh[data=8]", "tests/train/test_train.py"),
    ],
)
def test_group(test, group):
    assert group_of(test) == group
