"""What one library does for a problem: prepare its peers, measure them in turn, say what failed."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.problems import Problem

Call = Callable[[], Any]
DIRECTIONS = ("forward", "backward")
_LONGEST = 1.5  # seconds of kernels that one measurement may take, if it has three repetitions
# What a peer that cannot run raises. Anything else ends the process, and the parent says so.
PEER_ERRORS = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, LookupError, AssertionError, OSError)


class Prepared(NamedTuple):
    """A peer's compiled calls by direction, and the wall time of one of each."""

    calls: dict[str, Call]
    seconds: dict[str, float]


class Side(abc.ABC):
    """The part of the harness that runs in a library's own process.

    Answers are of what JSON can hold.
    """

    def __init__(self) -> None:
        self._prepared: dict[str, Prepared] = {}

    @abc.abstractmethod
    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays of a problem; what it tells is part of the answer."""

    @abc.abstractmethod
    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """A peer's calls for the problem that was started, by direction.

        The backward's call starts from what the forward left behind, so that its time is its own.
        """

    @abc.abstractmethod
    def compile_only(self, peer: str, directions: Sequence[str]) -> None:
        """Fills the caches on the disk for a peer and the problem that was started."""

    @abc.abstractmethod
    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """Device seconds of each repetition, and the method."""

    @abc.abstractmethod
    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Wall seconds of a call in a queue of calls."""

    @abc.abstractmethod
    def wait(self, result: Any) -> None:
        """Until the device has done all."""

    @abc.abstractmethod
    def rates(self) -> dict[str, float]:
        """What the machine can do here: ``matmul_flops`` and ``copy_bytes`` per second."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Frees what the problem took."""

    def prepare(
        self, problem: dict[str, Any], peers: Sequence[str], directions: Sequence[str], ahead: bool = False
    ) -> dict[str, Any]:
        """Compiles and warms up; says which peers are ready, after how many seconds, and what others cannot.

        A peer that can do one direction is ready for it. What it cannot is told by peer and direction.

        Args:
          problem: As `dataclasses.asdict` gives it.
          peers: Names.
          directions: Of `DIRECTIONS`.
          ahead: Only fill the caches on the disk.
        """
        self.release()
        told = self.start(Problem.read(problem))
        ready: dict[str, float] = {}
        unable: dict[str, dict[str, str]] = {}
        for name in peers:
            started = time.perf_counter()
            reasons = self._prepare_peer(name, tuple(directions), ahead)
            if reasons:
                unable[name] = reasons
            if len(reasons) < len(directions):
                ready[name] = round(time.perf_counter() - started, 2)
        return {"ready": ready, "unable": unable} | told

    def _prepare_peer(self, peer: str, directions: tuple[str, ...], ahead: bool) -> dict[str, str]:
        """All directions at once; each alone if that fails. The reasons of those that fail."""
        try:
            if ahead:
                self.compile_only(peer, directions)
            else:
                self._keep(peer, self._warm(self.build(peer, directions)))
        except self.errors() as error:
            if len(directions) == 1:
                return {directions[0]: f"{type(error).__name__}: {first_line(error)}"}
        else:
            return {}
        found: dict[str, str] = {}
        for direction in directions:
            found |= self._prepare_peer(peer, (direction,), ahead)
        return found

    def _keep(self, peer: str, new: Prepared) -> None:
        old = self._prepared.get(peer, Prepared({}, {}))
        self._prepared[peer] = Prepared(old.calls | new.calls, old.seconds | new.seconds)

    def errors(self) -> tuple[type[BaseException], ...]:
        """What a peer that cannot run raises."""
        return PEER_ERRORS

    def measure(self, peer: str, direction: str, runs: int, queue: bool = False) -> dict[str, Any]:
        """Seconds of so many repetitions, fewer of a slow call; of a queue also, if asked for."""
        if peer not in self._prepared or direction not in self._prepared[peer].calls:
            return {"failed": "It was prepared by a process that is gone."}
        prepared = self._prepared[peer]
        call, once = prepared.calls[direction], prepared.seconds[direction]
        runs = max(min(runs, 3), min(runs, int(_LONGEST / max(once, 1e-6))))
        try:
            seconds, method = self.timed(call, runs)
            queued = self.queue_seconds(call, runs) if queue else []
        except self.errors() as error:
            return {"failed": f"{type(error).__name__}: {first_line(error)}"}
        return {"seconds": seconds, "method": method, "queue": queued}

    def release(self) -> dict[str, Any]:
        """Forgets the problem."""
        self._prepared = {}
        self.forget()
        return {}

    def _warm(self, calls: dict[str, Call]) -> Prepared:
        seconds = {}
        for direction, call in calls.items():
            self.wait(call())
            started = time.perf_counter()
            self.wait(call())
            seconds[direction] = time.perf_counter() - started
        return Prepared(calls, seconds)


def first_line(error: BaseException) -> str:
    """Of its message, at most 300 characters; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def as_message(problem: Problem) -> dict[str, Any]:
    """A problem for `Side.prepare`."""
    return dataclasses.asdict(problem)
