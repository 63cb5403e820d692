"""Tests that `pytest -n` keeps on one worker: those of a case, which share what an implementation computes of it.

By the ids of tests: the scheduler of pytest-xdist knows nothing else of them.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def _names_of_cases() -> frozenset[str]:
    from tests.cases import hopper_cases, table

    return frozenset(case.name for case in [*table.CASES, *table.LENGTHS, *hopper_cases.HOPPER])


def group_of(test: str) -> str:
    """The group of a test: the last of its parameters if that is a case of the table, else the test itself."""
    last = test.removesuffix("]").rpartition("[")[2].rpartition("-")[2]
    return last if test.endswith("]") and last in _names_of_cases() else test


def scheduler(config: Any, log: Any) -> Any:
    """A scheduler of pytest-xdist that hands out groups."""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return InGroups(config, log)
