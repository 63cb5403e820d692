"""One library's process: it compiles and times its peers for a problem, and reports failures.

Imports neither JAX nor torch.
"""

import abc
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.problems import Problem
from benchmarks.run.timing import Call, Timer, describe_error, failures

DIRECTIONS = ("forward", "backward", "jvp")  # the last computes the value and its tangent
_MAX_SECONDS = 1.5  # of kernels that one measurement may take, if it has three repetitions


class _Prepared(NamedTuple):
    """One direction of a peer: its compiled call, the wall time of one, and elements of each resulting array."""

    call: Call
    seconds: float
    samples: list[list[float]] | None


class LibraryRunner(abc.ABC):
    """The part of a run inside a library's own process. Answers need no library to be read."""

    timer: Timer

    def __init__(self) -> None:
        self._prepared: dict[str, dict[str, _Prepared]] = {}  # by peer and direction

    @abc.abstractmethod
    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays of a problem; what it returns is part of the answer."""

    @abc.abstractmethod
    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """A peer's calls by direction; the backward starts from the residuals of one forward, to be timed alone."""

    @abc.abstractmethod
    def gemm_and_copy(self, side: int, count: int) -> tuple[Call, Call]:
        """A GEMM of bfloat16 matrices of a side, and a copy of so many numbers of 4 bytes."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Frees what the problem took."""

    def fill_caches(self, peer: str, directions: Sequence[str]) -> None:
        """Compiles a peer's programs for the started problem into the caches on the disk."""
        for call in self.build(peer, directions).values():
            self.timer.wait(call())

    def samples(self, result: Any) -> list[list[float]] | None:
        """Elements of each resulting array, for `benchmarks.run.check_outputs`; None if they are not compared."""
        return None

    def prepare(
        self, problem: Problem, peers: Sequence[str], directions: Sequence[str], compile_only: bool = False
    ) -> dict[str, Any]:
        """Compiles, warms up and samples the outputs of peers. A peer that can run one direction is ready for it.

        To the answer of `start` it adds ``ready``, names of peers, and by peer and direction ``unable``, reasons, and
        ``samples`` of the results.
        """
        self.release()
        answer = self.start(problem) | {"ready": [], "unable": {}, "samples": {}}
        for name in peers:
            if reasons := self._prepare_peer(name, tuple(directions), compile_only):
                answer["unable"][name] = reasons
            if len(reasons) < len(directions):
                answer["ready"].append(name)
            samples = {x: y.samples for x, y in self._prepared.get(name, {}).items() if y.samples is not None}
            answer["samples"] |= {name: samples} if samples else {}
        return answer

    def _prepare_peer(self, peer: str, directions: tuple[str, ...], compile_only: bool) -> dict[str, str]:
        """All directions at once; each alone if that fails. The reasons of those that fail."""
        try:
            if compile_only:
                self.fill_caches(peer, directions)
            else:
                warm = {direction: self._warm(call) for direction, call in self.build(peer, directions).items()}
                self._prepared[peer] = self._prepared.get(peer, {}) | warm
            return {}
        except failures() as error:  # each library's compiler has errors of its own
            if len(directions) == 1:
                return {directions[0]: describe_error(error)}
        alone = (self._prepare_peer(peer, (direction,), compile_only) for direction in directions)
        return {direction: reason for reasons in alone for direction, reason in reasons.items()}

    def _warm(self, call: Call) -> _Prepared:
        result = call()
        self.timer.wait(result)
        [seconds] = self.timer.wall_seconds(call, 1)
        return _Prepared(call, seconds, self.samples(result))

    def measure(self, peer: str, direction: str, runs: int, queue: bool = False) -> dict[str, Any]:
        """Seconds of so many repetitions, fewer of a slow call; of a queue of calls also, if requested."""
        prepared = self._prepared.get(peer, {}).get(direction)
        if prepared is None:
            return {"failed": "It was prepared by a process that is gone."}
        runs = max(min(runs, 3), min(runs, int(_MAX_SECONDS / max(prepared.seconds, 1e-6))))
        try:
            seconds, method = self.timer.timed(prepared.call, runs)
            queued = self.timer.queue_seconds(prepared.call, runs) if queue else []
        except failures() as error:
            return {"failed": describe_error(error)}
        return {"seconds": seconds, "method": method, "queue": queued}

    def release(self) -> dict[str, Any]:
        """Forgets the problem."""
        self._prepared = {}
        self.forget()
        return {}

    def rates(self) -> dict[str, float]:
        """The machine's rates: of a GEMM of matrices of side 8192, and of reading and writing 1 GiB."""
        side, count = (256, 2**16) if self.timer.profiled is None else (8192, 2**28)
        gemm, copy = (statistics.median(self.timer.timed(call, 10)[0]) for call in self.gemm_and_copy(side, count))
        return {"matmul_flops": 2 * side**3 / gemm, "copy_bytes": 2 * 4 * count / copy}
