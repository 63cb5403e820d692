"""What all libraries' timers share: the method, and the spans of a profiler. Imports neither JAX nor torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

PROFILER = "kernels seen by the profiler, cold L2"
WALL = "wall time of a call"
COLD_BYTES = 256 * 2**20  # written and read before a call; several times the L2 of any GPU
QUEUED = 10  # calls in a queue
WARM_SECONDS = 0.03  # within which the clocks of an idle GPU rise

_CLOCK = 1e-6  # Some profilers give starts as seconds since 1970, and float64 holds those to a quarter of this.


class Span(NamedTuple):
    """A kernel, a copy or a fill on the device.

    Attributes:
      start: In seconds, on any clock that all spans share.
      seconds: How long it took.
      separator: Whether it is the one that empties the cache before each call; it belongs to no call.
    """

    start: float
    seconds: float
    separator: bool


def busy_per_call(spans: Iterable[Span], calls: int) -> list[float]:
    """Seconds in which the device worked for each call.

    Every call must come after a separator. Spans that overlap count once, so that kernels on several streams are not
    counted twice.

    Raises:
      ValueError: The separators do not number `calls`, or a call left no span.

    >>> flush, kernel = Span(0.0, 1.0, True), Span(1.5, 0.5, False)
    >>> busy_per_call([flush, kernel, Span(1.75, 0.75, False)], 1)
    [1.0]
    """
    groups: list[list[Span]] = []
    for span in sorted(spans):
        if span.separator:
            groups.append([])
        elif groups:
            groups[-1].append(span)
    if len(groups) != calls or not all(groups):
        raise ValueError(
            f"The profiler saw {len(groups)} calls, {sum(map(bool, groups))} with kernels, out of {calls}."
        )
    return [_busy(group) for group in groups]


def _busy(spans: list[Span]) -> float:
    busy, reached = 0.0, float("-inf")
    for span in spans:
        overlap = max(0.0, reached - span.start)
        busy += max(0.0, span.seconds - overlap * (overlap > _CLOCK))
        reached = max(reached, span.start + span.seconds)
    return busy


def wall_seconds(call: Callable[[], Any], wait: Callable[[Any], Any], runs: int, queued: int = 1) -> list[float]:
    """Wall time of a call within a queue of so many, launches included.

    Args:
      call: What is timed.
      wait: Waits for its result.
      runs: Repetitions.
      queued: Calls in a queue.
    """
    seconds = []
    for _ in range(runs):
        started, result = time.perf_counter(), None
        for _ in range(queued):
            result = call()
        wait(result)
        seconds.append((time.perf_counter() - started) / queued)
    return seconds
