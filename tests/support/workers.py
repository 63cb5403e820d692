"""Tests that `pytest -n` keeps on one worker: by a case, whose results they share, or by models that are compiled once.

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
    """The group of a test: the last of its parameters if that is a case of the table, else the test itself.

    Tests of serving share the programs of one model, and modules of models and training share theirs.
    """
    room = test.split("/")[1]
    if room in ("serving", "models", "train"):
        return f"tests/{room}" if room == "serving" else test.partition("::")[0]
    last = test.removesuffix("]").rpartition("[")[2].rpartition("-")[2]
    return last if test.endswith("]") and last in _names_of_cases() else test


def scheduler(config: Any, log: Any) -> Any:
    """A scheduler of pytest-xdist that hands out groups."""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return InGroups(config, log)
