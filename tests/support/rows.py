"""Rows of a test with several parameters: which of their product exist, and the tier of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

Rows = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_MARKS = {"default": [], "full": [pytest.mark.full], "long": [pytest.mark.long], "gpu": []}


class _Value(NamedTuple):
    """One value of one ``parametrize``: its arguments by name, its id and its marks."""

    arguments: dict[str, Any]
    identity: str
    marks: tuple[Any, ...]

    @property
    def is_for_gpu(self) -> bool:
        return any(mark.name == "gpu" for mark in self.marks)


def stays(number: int, share: int) -> bool:
    """Selects one row in `share`. After each six it shifts by one, so that rows of two or three backends take turns."""
    return (number + number // 6) % share == 0


def tiers(default: Rows = (), full: Rows = (), *, rest: str = "", in_turns: bool = False, share: int = 1) -> Callable:
    """Sets the tier of each row of the product of the ``parametrize`` decorators below.

    ``{"backend": "xla", "case": ["causal", "alibi"]}`` describes two rows, by values of parameters or their ids; a list
    of descriptions names the rows of each.

    Args:
      default: The rows of the default tier.
      full: The rows of the tier ``full``.
      rest: The tier of all other rows: unless it is given, the tier after those that are named. `gpu`: they exist for
        a GPU alone.
      in_turns: Leaves rows out: each value of the longest parameter meets the values of the others in turn. Rows of
        the default tier and rows for a GPU stay.
      share: One in `share` of the rows that no description names has the tier `rest`; the others are of ``long``.
    """
    rest = rest or ("long" if default and full else "full" if default else "default")

    def decorate(test: Callable) -> Callable:
        axes = [list(_values(mark)) for mark in test.pytestmark if mark.name == "parametrize"]
        test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
        table = list(itertools.product(*axes))
        named = dict.fromkeys(_described(full, table, test), "full")
        named |= dict.fromkeys(_described(default, table, test), "default")
        turns = _turns(axes) if in_turns else range(len(table))
        params, unnamed = [], itertools.count()
        for number, row in enumerate(table):
            is_kept = number in named or any(x.is_for_gpu for x in row)
            if is_kept or (number in turns and rest != "gpu"):
                tier = named.get(number, rest) if is_kept or stays(next(unnamed), share) else "long"
                arguments = [argument for x in row for argument in x.arguments.values()]
                marks = [*itertools.chain(*(x.marks for x in row)), *_MARKS[tier]]
                params.append(pytest.param(*arguments, id="-".join(x.identity for x in row), marks=marks))
        return pytest.mark.parametrize([name for axis in axes for name in axis[0].arguments], params)(test)

    return decorate


in_turns = tiers(in_turns=True)


def _values(mark: pytest.Mark) -> Iterator[_Value]:
    """The values of a ``parametrize``, with the ids that pytest gives them."""
    names, values = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    ids = mark.kwargs.get("ids")
    listed = None if ids is None or callable(ids) else list(ids)
    for number, value in enumerate(values):
        identity, marks = None if listed is None else listed[number], ()
        if isinstance(value, type(pytest.param())):
            identity, marks, value = value.id or identity, tuple(value.marks), value.values
        elif len(names) == 1:
            value = (value,)
        arguments = dict(zip(names, value, strict=True))
        if identity is None:
            named = {name: ids(x) if callable(ids) else None for name, x in arguments.items()}
            identity = "-".join(str(named[k] or _identity(k, number, x)) for k, x in arguments.items())
        yield _Value(arguments, str(identity), marks)


def _identity(name: str, number: int, value: Any) -> str:
    if value is None or isinstance(value, str | int | float | complex | bool):
        return str(value)
    named = getattr(value, "__name__", None)
    return named if isinstance(named, str) else f"{name}{number}"


def _described(described: Rows, table: list[tuple[_Value, ...]], test: Callable) -> set[int]:
    """The numbers of the rows that descriptions name."""
    numbers = set()
    for choice in [described] if isinstance(described, Mapping) else described:
        chosen = {number for number, row in enumerate(table) if all(_has(row, *item) for item in choice.items())}
        if not chosen:
            raise ValueError(f"{test.__name__} has no row {choice}")
        numbers |= chosen
    return numbers


def _has(row: tuple[_Value, ...], name: str, values: Any) -> bool:
    value = next(x for x in row if name in x.arguments)
    argument = value.arguments[name]
    same = lambda x: value.identity == str(x) or (type(argument) is type(x) and argument == x)
    return any(map(same, values if isinstance(values, list) else [values]))


def _turns(axes: list[list[_Value]]) -> set[int]:
    """The numbers of the rows in which each value of the longest axis meets the values of the others in turn."""
    places = [[number for number, x in enumerate(axis) if not x.is_for_gpu] for axis in axes]
    longest = max(range(len(axes)), key=lambda number: len(places[number]))
    others = [number for number in range(len(axes)) if number != longest]
    numbers = set()
    for turn in range(len(places[longest])):
        at, total = {longest: turn}, 0
        for shift, other in enumerate(others):
            at[other] = (turn + shift * (turn // len(places[other]))) % len(places[other])
        for number, axis in enumerate(axes):
            total = total * len(axis) + places[number][at[number]]
        numbers.add(total)
    return numbers
