"""Which tests stay together on one worker of pytest-xdist."""

import pytest

from tests.workers import group_of


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/test_forward.py::test_forward[xla-causal]", "causal"),
        ("tests/test_backward.py::test_backward[triton-interpret-causal]", "causal"),
        ("tests/test_oracle.py::test_matches_oracle[causal]", "causal"),
        ("tests/test_containment.py::test_documents_stay_apart[xla-page-nan]", "test_containment-xla"),
        ("tests/test_oracle.py::test_names", "tests/test_oracle.py::test_names"),
        ("tests/test_errors.py::test_message[causal]", "tests/test_errors.py::test_message[causal]"),
    ],
)
def test_group(test, group):
    assert group_of(test) == group
