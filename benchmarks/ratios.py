"""Figures over several problems of a suite, for bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.problems import Problem
from benchmarks.records import SuiteResult
from benchmarks.results import Figure

Found = Figure | str  # A figure, or in words what is missing; "" for nothing that matters.


def figure_of(
    name: str, values: Iterable[float | None], reduce: Callable[..., float], unit: str = "x", **bar: float
) -> Found:
    """One figure of several problems; in words if one is missing, which matters only to a bar."""
    every = list(values)
    known = [x for x in every if x is not None]
    if not known or (bar and len(known) < len(every)):
        return f"{name}: {len(every) - len(known)} of {len(every)} are missing" if bar else ""
    return Figure(name, float(f"{reduce(known):.4g}"), unit, **bar)


def times_longer(result: SuiteResult, direction: str, slow: Problem, fast: Problem) -> float | None:
    """How many times longer jflex takes for one problem than for another."""
    numerator, denominator = (result.find(problem, result.first, direction) for problem in (slow, fast))
    return None if numerator is None or denominator is None else numerator.seconds.median / denominator.seconds.median


def tflops(result: SuiteResult, problem: Problem, direction: str) -> float | None:
    """Of jflex."""
    record = result.find(problem, result.first, direction)
    return None if record is None else record.tflops


def over(part: float | None, whole: float | None) -> float | None:
    """Their ratio, if both are there."""
    return None if part is None or whole is None else part / whole
