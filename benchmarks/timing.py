"""Wall time of peers that take turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.results import Figure

_STEADY = 0.1  # Measuring ends when the quartiles of the ratio lie within this share of its median,
_ENOUGH = 9  # and there are so many rounds,
_LONGEST = 31  # or so many at most, or the time is over.


class Summary(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of at least one value."""
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(quartiles[1], quartiles[0], quartiles[2], len(values))


def take_turns(peers: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds that each peer takes, in rounds.

    Args:
      peers: Two functions without arguments that return arrays; jitted ones.
      seconds: No round is begun after so much time, but three are made in any case.
    """
    for call in peers.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in peers}
    first, second = peers
    deadline = time.perf_counter() + seconds
    while True:
        for name, call in peers.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - started)
        rounds = len(times[first])
        ratio = Summary.of(ratios(times[first], times[second]))
        steady = rounds >= _ENOUGH and ratio.high - ratio.low < _STEADY * ratio.median
        if steady or rounds >= _LONGEST or (rounds >= 3 and time.perf_counter() > deadline):
            return times


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def figure(name: str, values: Sequence[float], unit: str, digits: int = 4, **bar: float) -> Figure:
    """Median and quartiles of repetitions as a figure, to so many significant digits."""
    summary = Summary.of(values)
    short = lambda x: float(f"{x:.{digits}g}")
    return Figure(name, short(summary.median), unit, short(summary.low), short(summary.high), summary.runs, **bar)
