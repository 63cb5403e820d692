"""Median and spread of repetitions. Loads neither JAX nor torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


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


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return statistics.geometric_mean(values)
