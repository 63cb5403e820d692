"""What one library's process does for a problem: compile and time its peers, and report what failed.

Imports neither JAX nor torch.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.problems import Problem

Call = Callable[[], Any]
DIRECTIONS = ("forward", "backward")
_MAX_SECONDS = 1.5  # of kernels that one measurement may take, if it has three repetitions
# What a peer that cannot run raises. Anything else ends the process, and the parent reports it.
PEER_ERRORS = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, LookupError, AssertionError, OSError)


class Prepared(NamedTuple):
    """A peer's compiled calls by direction, and the wall time of one of each."""

    calls: dict[str, Call]
    seconds: dict[str, float]


class LibraryRunner(abc.ABC):
    """The part of a run inside a library's own process. Answers are of what JSON can hold."""

    def __init__(self) -> None:
        self._prepared: dict[str, Prepared] = {}

    @abc.abstractmethod
    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays of a problem; what it returns is part of the answer."""

    @abc.abstractmethod
    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """A peer's calls for the started problem, by direction.

        The backward's call starts from the residuals of one forward, so that its time is its own.
        """

    @abc.abstractmethod
    def fill_caches(self, peer: str, directions: Sequence[str]) -> None:
        """Compiles a peer's programs for the started problem into the caches on the disk."""

    @abc.abstractmethod
    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """Device seconds of each repetition, and the method."""

    @abc.abstractmethod
    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Wall seconds of a call in a queue of calls."""

    @abc.abstractmethod
    def wait(self, result: Any) -> None:
        """Until the device is idle."""

    @abc.abstractmethod
    def rates(self) -> dict[str, float]:
        """The machine's rates as measured here: ``matmul_flops`` and ``copy_bytes`` per second."""

    @abc.abstractmethod
    def large_product(self) -> Call:
        """A GEMM of bfloat16 matrices of side 8192."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Frees what the problem took."""

    def samples(self, call: Call) -> list[list[float]] | None:
        """Elements of each resulting array, for `benchmarks.run.check_outputs`; None if they are not compared."""
        return None

    def errors(self) -> tuple[type[BaseException], ...]:
        """What a peer that cannot run raises."""
        return PEER_ERRORS

    def prepare(
        self, problem: dict[str, Any], peers: Sequence[str], directions: Sequence[str], compile_only: bool = False
    ) -> dict[str, Any]:
        """Compiles, warms up and samples the outputs of peers.

        A peer that can run one direction is ready for it.

        Args:
          problem: Fields of `Problem`.
          peers: Names.
          directions: Of `DIRECTIONS`.
          compile_only: Only fill the caches on the disk.

        Returns:
          What `start` returns; ``ready``, seconds by peer; ``unable``, reasons by peer and direction; ``samples`` of
          the results, by peer and direction.
        """
        self.release()
        started = self.start(Problem(**problem))
        ready: dict[str, float] = {}
        unable: dict[str, dict[str, str]] = {}
        for name in peers:
            begun = time.perf_counter()
            reasons = self._prepare_peer(name, tuple(directions), compile_only)
            if reasons:
                unable[name] = reasons
            if len(reasons) < len(directions):
                ready[name] = round(time.perf_counter() - begun, 2)
        return {"ready": ready, "unable": unable, "samples": self._samples()} | started

    def _prepare_peer(self, peer: str, directions: tuple[str, ...], compile_only: bool) -> dict[str, str]:
        """All directions at once; each alone if that fails. The reasons of those that fail."""
        try:
            if compile_only:
                self.fill_caches(peer, directions)
            else:
                self._keep(peer, self._warm(self.build(peer, directions)))
        except self.errors() as error:
            if len(directions) == 1:
                return {directions[0]: describe_error(error)}
        else:
            return {}
        found: dict[str, str] = {}
        for direction in directions:
            found |= self._prepare_peer(peer, (direction,), compile_only)
        return found

    def _keep(self, peer: str, new: Prepared) -> None:
        old = self._prepared.get(peer, Prepared({}, {}))
        self._prepared[peer] = Prepared(old.calls | new.calls, old.seconds | new.seconds)

    def _samples(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, prepared in self._prepared.items():
            for direction, call in prepared.calls.items():
                if (values := self.samples(call)) is not None:
                    found.setdefault(name, {})[direction] = values
        return found

    def measure(self, peer: str, direction: str, runs: int, queue: bool = False) -> dict[str, Any]:
        """Seconds of so many repetitions, fewer of a slow call; of a queue of calls also, if requested."""
        if peer not in self._prepared or direction not in self._prepared[peer].calls:
            return {"failed": "It was prepared by a process that is gone."}
        prepared = self._prepared[peer]
        call, once = prepared.calls[direction], prepared.seconds[direction]
        runs = max(min(runs, 3), min(runs, int(_MAX_SECONDS / max(once, 1e-6))))
        try:
            seconds, method = self.timed(call, runs)
            queued = self.queue_seconds(call, runs) if queue else []
        except self.errors() as error:
            return {"failed": describe_error(error)}
        return {"seconds": seconds, "method": method, "queue": queued}

    def release(self) -> dict[str, Any]:
        """Forgets the problem."""
        self._prepared = {}
        self.forget()
        return {}

    def check(self) -> dict[str, Any]:
        """Of a large product: seconds by the profiler, with the method, and by the wall."""
        call, started = self.large_product(), time.perf_counter()
        seconds, method = self.timed(call, 10)
        queue = self.queue_seconds(call, 10)
        return {"profiler": seconds, "method": method, "queue": queue, "took": time.perf_counter() - started}

    def _warm(self, calls: dict[str, Call]) -> Prepared:
        seconds = {}
        for direction, call in calls.items():
            self.wait(call())
            started = time.perf_counter()
            self.wait(call())
            seconds[direction] = time.perf_counter() - started
        return Prepared(calls, seconds)


def describe_error(error: BaseException) -> str:
    """Its type and the first line of its message, at most 300 characters."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Of its message, at most 300 characters; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
