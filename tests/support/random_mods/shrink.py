"""Makes a failing random call smaller as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.support.random_mods.case import Case
from tests.support.random_mods.program import simpler


def shrunk(case: Case, fails: Callable[[Case], bool], attempts: int = 60) -> Case:
    """The smallest call that is found to fail.

    Args:
      case: One that fails.
      fails: Whether another fails in the same way.
      attempts: How many are tried.
    """
    found = True
    while found and attempts > 0:
        found = False
        for candidate in _simpler(case):
            attempts -= 1
            if fails(candidate):
                case, found = candidate, True
                break
            if attempts <= 0:
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    if case.mask is not None:
        yield dataclasses.replace(case, mask=None, block=None)
    plain = {"kv_lengths": None, "tiles": None, "scale": None, "layout": "BTNH", "block": None, "dtype": "float32"}
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield dataclasses.replace(case, **{name: value})
    for score in simpler(case.score):
        yield dataclasses.replace(case, score=score)
    for mask in simpler(case.mask) if case.mask is not None else ():
        yield dataclasses.replace(case, mask=mask)
