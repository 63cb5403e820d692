"""The workers of a run: one a library, started again when one is lost."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.deadline import Deadline
from benchmarks.workers import START_SECONDS, Worker, WorkerError

_LOSSES = 5  # of one library, after which it is not started again
# After these nothing works in a process any more, although it answers.
_FATAL = ("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH", "CUDA_ERROR_MISALIGNED", "CUDA error:")


def variables(cache: pathlib.Path, threads: int = 4) -> dict[str, str]:
    """The environment of a worker that shares the GPU, and keeps what it compiles in a folder.

    Args:
      cache: The folder.
      threads: With which torch's inductor compiles.
    """
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # or JAX would take three quarters of the memory at its start
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
    }


class Team:
    """Asks the workers; what goes wrong is an answer with ``"failed"``, and never ends the run.

    If the process was lost with it, so that it has forgotten what was prepared, the answer has ``"lost"``, too.

    Args:
      libraries: Which to start.
      cache: A folder for the caches and logs.
      deadline: No answer is waited for beyond it.
    """

    def __init__(self, libraries: Sequence[str], cache: pathlib.Path, deadline: Deadline | None = None) -> None:
        self._libraries, self._cache, self._deadline = tuple(libraries), cache, deadline or Deadline()
        self._workers: dict[str, Worker] = {}
        self._losses = dict.fromkeys(libraries, 0)

    def __enter__(self) -> Team:
        self.ask_each("release", 0.0, {library: {} for library in self._libraries})  # all start at once
        return self

    def __exit__(self, *error: Any) -> None:
        for worker in self._workers.values():
            worker.close()

    def ask(self, library: str, method: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """One of them."""
        return self.ask_each(method, seconds, {library: arguments})[library]

    def ask_all(self, method: str, seconds: float) -> dict[str, dict[str, Any]]:
        """One after the other, so that none disturbs another."""
        return {library: self.ask(library, method, seconds) for library in self._libraries}

    def ask_each(
        self, method: str, seconds: float, arguments: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """All at once, each with its own arguments; the answers by library."""
        answers, waits = {}, {}
        for library, own in arguments.items():
            try:
                worker, new = self._worker(library)
                worker.send(method, **own)
            except WorkerError as error:
                answers[library] = self._lost(library, error)
            else:
                waits[library] = (worker, seconds + START_SECONDS * new)
        for library, (worker, patience) in waits.items():
            try:
                answers[library] = worker.receive(self._deadline.patience(patience))
            except WorkerError as error:
                answers[library] = self._lost(library, error)
            else:
                self._end_if_broken(library, answers[library])
        return answers

    def _worker(self, library: str) -> tuple[Worker, bool]:
        if library in self._workers:
            return self._workers[library], False
        if self._losses[library] >= _LOSSES:
            raise WorkerError(f"the {library} process was lost {_LOSSES} times, and is not started again")
        self._workers[library] = Worker(library, variables(self._cache), self._cache / f"{library}.log")
        return self._workers[library], True

    def _lost(self, library: str, error: WorkerError) -> dict[str, Any]:
        if self._workers.pop(library, None) is not None:
            self._losses[library] += 1
        return {"failed": str(error), "lost": True}

    def _end_if_broken(self, library: str, answer: dict[str, Any]) -> None:
        if any(word in str(answer) for word in _FATAL):
            answer["lost"] = True
            self._workers.pop(library).close()
            self._losses[library] += 1
