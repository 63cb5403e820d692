"""Children that answer in parallel, of which one that fails becomes a remark."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.children import called

# JAX would take three quarters of the GPU's memory at its start, and leave none for the children beside it.
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_LONGEST = 240.0  # seconds of a child; no peer may hold a run up


class Question(NamedTuple):
    """A call of ``module.function(**arguments)`` in a process of its own.

    Attributes:
      label: Who is asked what, for remarks.
      module: Where the function is.
      function: Its name.
      arguments: Of the function.
      variables: Added to the variables of the environment.
    """

    label: str
    module: str
    function: str
    arguments: dict[str, Any]
    variables: dict[str, str] = {}  # noqa: RUF012


Ask = Callable[[Question], Any]


def ask(question: Question) -> Any:
    """The answer of a fresh process.

    Raises:
      RuntimeError: It failed, or did not end.
    """
    return called(question.module, question.function, question.arguments, SHARED_GPU | question.variables, _LONGEST)


def answers(questions: Sequence[Question], ask_one: Ask = ask, at_once: int = 16) -> tuple[dict[str, Any], list[str]]:
    """Answers by label, and why some are missing.

    Args:
      questions: With labels that differ.
      ask_one: How one is asked; tests ask without a process.
      at_once: How many processes run side by side; 1 where wall time is measured.
    """
    found, remarks = {}, []
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        running = [(question.label, pool.submit(ask_one, question)) for question in questions]
        for label, future in running:
            try:
                found[label] = future.result()
            except (RuntimeError, ImportError) as error:
                remarks.append(f"{label} is left out: {_last_line(error)}")
    return found, remarks


@contextmanager
def alone() -> Iterator[None]:
    """Keeps what is timed in one child from running beside what is timed in another."""
    path = os.path.join(tempfile.gettempdir(), f"jflex-benchmark-{os.getuid()}.lock")
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1].strip()[:300]
