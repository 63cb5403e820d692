"""Which tests stay together on one worker of pytest-xdist."""

import pytest

from tests.support.workers import group_of


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/calls/test_forward.py::test_forward[xla-causal]", "causal"),
        ("tests/calls/test_backward.py::test_backward[triton-interpret-causal]", "causal"),
        ("tests/house/test_oracle.py::test_matches_oracle[causal]", "causal"),
        ("tests/kernels/test_containment.py::test_documents_stay_apart[xla-page-nan]", "test_containment-xla"),
        ("tests/house/test_oracle.py::test_names", "tests/house/test_oracle.py::test_names"),
        ("tests/calls/test_errors.py::test_message[causal]", "tests/calls/test_errors.py::test_message[causal]"),
    ],
)
def test_group(test, group):
    assert group_of(test) == group
