"""Processes that run benchmark code: persistent workers, one per library, and one-shot jobs.

What libraries print goes to a log. Imports neither JAX nor torch.
"""

import contextlib
import fcntl
import importlib
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX would take three quarters of the memory at its start
_START_SECONDS = 180.0  # to import a library and initialize the GPU
_JOB_SECONDS = 240.0
_MIN_WAIT = 15.0  # seconds that a problem takes at most, if nothing hangs; no wait is shorter unless the end is nearer
_MAX_LOSSES = 5  # of one library, after which its worker is not started again
# After these errors nothing works in a process any more, although it answers.
_FATAL = ("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH", "CUDA_ERROR_MISALIGNED", "CUDA error:")


class Deadline:
    """The end of a run, for waits that must not outlast it.

    One wait may take a `share` of the remaining time: a peer that hangs must leave some for others.
    """

    def __init__(self, seconds: float | None = None, share: float = 1.0) -> None:
        self._end = float("inf") if seconds is None else time.monotonic() + seconds
        self._share = share

    @property
    def over(self) -> bool:
        """Less than `_MIN_WAIT` seconds remain, so that nothing should begin."""
        return self._left < _MIN_WAIT

    @property
    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def timeout(self, seconds: float) -> float:
        """Seconds to wait, at most `seconds`."""
        return min(seconds, max(self._left * self._share, min(self._left, _MIN_WAIT)))


class WorkerError(RuntimeError):
    """A worker ended, or did not answer in time; it is gone."""


class Worker:
    """A child process, which calls the functions of ``MODULE`` or the methods of one instance of ``MODULE:CLASS``."""

    def __init__(self, target: str, variables: Mapping[str, str], log: pathlib.Path, name: str = "") -> None:
        self._name, self._log = name or target, log
        log.touch()
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, target, dict(variables), log))
        self._process.start()
        other.close()

    def send(self, method: str, **arguments: Any) -> None:
        """Requests ``method(**arguments)``, without waiting; a `WorkerError` if the child has ended."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise self._gone("ended") from error

    def receive(self, seconds: float) -> Any:
        """The answer to the oldest open request; a `WorkerError` if the child ended, or is killed after `seconds`."""
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone("ended") from error
        raise self._gone(f"was ended, since it did not answer within {seconds:.4g} s")

    def close(self, grace: float = 0.0) -> None:
        """Ends the child; it may take `grace` seconds to exit by itself."""
        self._pipe.close()
        self._process.join(grace)
        self._process.kill()
        self._process.join()

    def _gone(self, how: str) -> WorkerError:
        self.close()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "it printed nothing"
        return WorkerError(f"the {self._name} process {how}: {last}")


def _serve(pipe: Connection, target: str, variables: dict[str, str], log: pathlib.Path) -> None:
    """The child: answers until its input ends."""
    os.environ.update(variables)
    with open(log, "ab") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    module, _, name = target.partition(":")
    called = importlib.import_module(module)
    called = getattr(called, name)() if name else called
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(called, method)(**arguments))


class WorkerPool:
    """One persistent worker per library; a worker that is lost is started again.

    A failure is an answer with ``"failed"``, and never ends the run. If the process was lost with it, and the prepared
    problem too, the answer has ``"lost"``.
    """

    def __init__(
        self, targets: Mapping[str, str], variables: Mapping[str, str], logs: pathlib.Path, deadline: Deadline
    ) -> None:
        self._targets, self._variables, self._logs, self._deadline = targets, variables, logs, deadline
        self._workers: dict[str, Worker] = {}
        self._losses = dict.fromkeys(targets, 0)

    def __enter__(self) -> Self:
        self.request_each("release", 0.0, {library: {} for library in self._targets})  # all start at once
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def has_given_up(self, library: str) -> bool:
        """The worker was lost too often to be started again."""
        return self._losses[library] >= _MAX_LOSSES

    def request(self, library: str, method: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """The answer of one worker."""
        return self.request_each(method, seconds, {library: arguments})[library]

    def request_in_turn(self, method: str, seconds: float) -> dict[str, dict[str, Any]]:
        """The answers of all, one after the other, so that none disturbs another."""
        return {library: self.request(library, method, seconds) for library in self._targets}

    def request_each(
        self, method: str, seconds: float, arguments: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """The answers of the workers that have arguments, side by side, by library."""
        answers, waits = {}, {}
        for library, request in arguments.items():
            waits[library] = seconds + _START_SECONDS * (library not in self._workers)
            try:
                self._worker(library).send(method, **request)
            except WorkerError as error:
                answers[library] = self._lost(library, str(error))
        for library in [x for x in waits if x not in answers]:
            try:
                answer = self._workers[library].receive(self._deadline.timeout(waits[library]))
                if any(word in str(answer) for word in _FATAL):
                    self._workers[library].close()
                    answer |= self._lost(library, answer.get("failed"))
                answers[library] = answer
            except WorkerError as error:
                answers[library] = self._lost(library, str(error))
        return {library: answers[library] for library in arguments}

    def _worker(self, library: str) -> Worker:
        if library not in self._workers:
            if self.has_given_up(library):
                raise WorkerError(f"the {library} process was lost {_MAX_LOSSES} times, and is not started again")
            log = self._logs / f"{library}.log"
            self._workers[library] = Worker(self._targets[library], self._variables, log, library)
        return self._workers[library]

    def _lost(self, library: str, failed: str | None) -> dict[str, Any]:
        self._losses[library] += self._workers.pop(library, None) is not None
        return {"lost": True} if failed is None else {"failed": failed, "lost": True}


class Job(NamedTuple):
    """A call of ``module.function(**arguments)`` in a process of its own; importing the module is part of it."""

    label: str  # for remarks and answers
    module: str
    function: str
    arguments: dict[str, Any]
    variables: Mapping[str, str] = SHARED_GPU  # added to those of the environment
    seconds: float = _JOB_SECONDS  # after which the process is ended


RunJob = Callable[[Job], Any]


def run_job(job: Job) -> Any:
    """The result of a job. What it printed is printed if it fails, for the figures in it; see `Worker.receive`."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        worker = Worker(job.module, job.variables, log, "job's")
        try:
            worker.send(job.function, **job.arguments)
            result = worker.receive(job.seconds)
        except WorkerError:
            print(log.read_text(errors="replace"), flush=True)
            raise
        worker.close(grace=20.0)
    return result


def run_jobs(jobs: Sequence[Job], run: RunJob = run_job, at_once: int = 16) -> tuple[dict[str, Any], list[str]]:
    """Results by label, and a remark for each job that failed; one `at_once` where wall time is measured."""
    results, remarks = {}, []
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        running = [(job.label, pool.submit(run, job)) for job in jobs]
        for label, future in running:
            try:
                results[label] = future.result()
            except (RuntimeError, ImportError) as error:
                remarks.append(f"{label} is left out: {error}")
    return results, remarks


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Keeps what is timed in one process from running beside what is timed in another."""
    path = os.path.join(tempfile.gettempdir(), f"jflex-benchmark-{os.getuid()}.lock")
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
