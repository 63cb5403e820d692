"""Which tests `pytest -n` keeps on one worker: those of a case, which share what an implementation computes of it.

By the names of tests: pytest 9.2 gives no effect to the mark `xdist_group`, from which pytest-xdist 3.8 makes names.
"""

from __future__ import annotations

from typing import Any

from tests.tiers import TABLES

_IMPLEMENTATIONS = ("xla-", "triton-interpret-", "reference-", "emulated-")


def group_of(test: str) -> str:
    """The group of a test, by its name; that of most is the test itself."""
    path, _, name = test.partition("::")
    module = path.rpartition("/")[2].removesuffix(".py")
    _, has_parameters, parameters = name.removesuffix("]").partition("[")
    if not has_parameters:
        return test
    if module == "test_containment":
        return f"{module}-{parameters.partition('-')[0]}"
    if module not in TABLES:
        return test
    for implementation in _IMPLEMENTATIONS:
        parameters = parameters.removeprefix(implementation)
    return parameters


def scheduler(config: Any, log: Any) -> Any:
    """A scheduler of pytest-xdist that hands out groups."""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return InGroups(config, log)
