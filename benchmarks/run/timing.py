"""Timing of every library: kernels of a profile, with a cold L2, or wall time. Imports neither JAX nor torch."""

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

Call = Callable[[], Any]
PROFILER = "kernels seen by the profiler, cold L2"
QUEUE = "wall time of a queue of calls"
WALL = "wall time of a call"
COLD_BYTES = 256 * 2**20  # written and read before a call; several times the L2 of any GPU
_QUEUED = 10  # calls in a queue
_WARM_SECONDS = 0.03  # within which the clocks of an idle GPU rise
_CLOCK = 1e-6  # Some profilers give starts as seconds since 1970, and float64 holds those to a quarter of this.


class Span(NamedTuple):
    """A kernel, a copy or a fill on the device."""

    start: float  # in seconds, on any clock that all spans share
    seconds: float
    separator: bool  # whether it empties the cache before a call; it belongs to no call
    communication: bool = False  # whether it sends to other devices, or waits for them
    in_graph: bool = False  # whether it was launched with others, as a node of a CUDA graph


def busy_per_call(spans: Iterable[Span], calls: int) -> list[float]:
    """Seconds in which the device worked for each call.

    Spans that overlap count once, so that kernels on several streams are not counted twice.
    """
    return [busy_seconds(group) for group in spans_per_call(spans, calls)]


def spans_per_call(spans: Iterable[Span], calls: int) -> list[list[Span]]:
    """The spans of each call, in the order of their start; a `ValueError` unless each comes after a separator."""
    groups: list[list[Span]] = []
    for span in sorted(spans):
        if span.separator:
            groups.append([])
        elif groups:
            groups[-1].append(span)
    if len(groups) != calls or not all(groups):
        seen = f"{len(groups)} calls, {sum(map(bool, groups))} with kernels"
        raise ValueError(f"The profiler saw {seen}, out of {calls}.")
    return groups


def busy_seconds(spans: list[Span]) -> float:
    """Seconds in which the device worked, of spans in the order of their start."""
    busy, reached = 0.0, float("-inf")
    for span in spans:
        overlap = max(0.0, reached - span.start)
        busy += max(0.0, span.seconds - overlap * (overlap > _CLOCK))
        reached = max(reached, span.start + span.seconds)
    return busy


class Communication(NamedTuple):
    """Communication of one device in one call."""

    seconds: float  # in which it sent to others, or waited for them
    exposed: float  # of these, in which nothing else ran on it

    @classmethod
    def from_spans(cls, spans: list[Span]) -> Self:
        """Of a call, from its spans in the order of their start."""
        sent, kernels = ([x for x in spans if x.communication == kind] for kind in (True, False))
        return cls(busy_seconds(sent), max(0.0, busy_seconds(spans) - busy_seconds(kernels)))

    @property
    def hidden(self) -> float:
        """The share of these seconds in which kernels ran; 1 without communication."""
        return 1.0 - self.exposed / self.seconds if self.seconds else 1.0


class Timer(NamedTuple):
    """Timing of calls in a library: it waits for a result, and profiles so many calls, or cannot (on a CPU)."""

    wait: Callable[[Any], Any]
    profiled: Callable[[Call, int], list[float]] | None

    def device_seconds(self, call: Call, runs: int, warmup: int = 1) -> list[float]:
        """Device time of each of `runs` calls, the L2 cold before each; wall time on a CPU."""
        end = time.perf_counter() + _WARM_SECONDS * (self.profiled is not None)
        while warmup > 0 or time.perf_counter() < end:
            self.wait(call())
            warmup -= 1
        return self.wall_seconds(call, runs) if self.profiled is None else self.profiled(call, runs)

    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """`device_seconds` and the method; where the profiler fails, a GPU is timed by the wall."""
        try:
            return self.device_seconds(call, runs), WALL if self.profiled is None else PROFILER
        except failures() as error:
            return self.queue_seconds(call, runs), f"{QUEUE}: {first_line(error)}"

    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Wall time of a call within a queue of calls, launches included; the L2 is as the call before left it."""
        self.wait(call())
        return self.wall_seconds(call, runs, _QUEUED)

    def wall_seconds(self, call: Call, runs: int, queued: int = 1) -> list[float]:
        """Wall time of a call within a queue of so many, launches included."""
        seconds = []
        for _ in range(runs):
            started, result = time.perf_counter(), None
            for _ in range(queued):
                result = call()
            self.wait(result)
            seconds.append((time.perf_counter() - started) / queued)
        return seconds


def failures() -> tuple[type[BaseException], ...]:
    """Errors of libraries that cannot compile or run a call; Triton and MLIR have errors of their own."""
    errors: list[type[BaseException]] = [ArithmeticError, AssertionError, AttributeError, ImportError, LookupError]
    errors += [MemoryError, OSError, RuntimeError, TypeError, ValueError]
    if "triton" in sys.modules:
        errors.append(importlib.import_module("triton.errors").TritonError)
    if "jaxlib.mlir.ir" in sys.modules:
        errors.append(sys.modules["jaxlib.mlir.ir"].MLIRError)
    return tuple(errors)


def describe_error(error: BaseException) -> str:
    """Its type and the first line of its message, at most 300 characters."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """First line of the message, at most 300 characters; the type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
