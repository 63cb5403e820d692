"""Finds the objects that a mod captures."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any


def captures(mod: Any) -> Iterator[Any]:
    """All objects that a mod can reach: closures, defaults, the owner of a method, arguments of a `functools.partial`.

    Args:
        mod: The mod. It is yielded first.

    Yields:
        Each object once.

    Example:
        >>> def scaled(factor):  # the function that it returns holds the factor
        ...     return lambda score, b, h, q_idx, kv_idx: score * factor
        >>> list(captures(scaled(0.5)))[1:]
        [0.5]
    """
    empty_cell = types.CellType()
    pending: list[Any] = [mod]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # such as the result of `jflex.and_masks`
            names = vars(value) if hasattr(value, "__dict__") else [field.name for field in dataclasses.fields(value)]
            pending += [getattr(value, name, None) for name in names]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            pending += [value.__self__, value.__func__]
        elif inspect.isfunction(value):
            # The cell of a variable that is not assigned yet is empty.
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != empty_cell]
            pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
