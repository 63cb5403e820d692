"""A process for each library, and one for Mosaic GPU kernels, which lives as long as the run and answers in JSON lines.

The parent holds `Worker`s; ``python -m benchmarks.workers jax`` is the child. What libraries print goes to a log.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from typing import Any

from benchmarks.environment import ROOT

_JAX = ("benchmarks.jax_side", "JaxSide")
SIDES = {"jax": _JAX, "mosaic": _JAX, "torch": ("benchmarks.torch_side", "TorchSide")}
START_SECONDS = 180.0  # to import a library and start on the GPU


class WorkerError(RuntimeError):
    """A worker ended, or did not answer in time; it is gone."""


class Worker:
    """A child process with one library.

    Args:
      library: A name in `SIDES`.
      variables: Added to the variables of the environment.
      log: A file for what the child prints.
    """

    def __init__(self, library: str, variables: dict[str, str], log: pathlib.Path) -> None:
        self.library, self._log, self._buffer = library, log, b""
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.workers", library], cwd=ROOT, env=os.environ | variables,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0,
            )  # fmt: skip

    def send(self, method: str, **arguments: Any) -> None:
        """Asks for ``Side.method(**arguments)``, without waiting.

        Raises:
          WorkerError: The child has ended.
        """
        line = json.dumps({"method": method, "arguments": arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
        except OSError as error:
            raise self._gone("ended") from error

    def receive(self, seconds: float) -> Any:
        """The answer to the oldest question that is open.

        Raises:
          WorkerError: The child has ended, or does not answer within `seconds`; then it is killed.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._gone(f"was ended, since it did not answer within {seconds:.0f} s")
            chunk = self._process.stdout.read(1 << 16)
            if not chunk:
                raise self._gone("ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, method: str, seconds: float, **arguments: Any) -> Any:
        """Sends and receives.

        Raises:
          WorkerError: As they do.
        """
        self.send(method, **arguments)
        return self.receive(seconds)

    def close(self) -> None:
        """Ends the child."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def _gone(self, how: str) -> WorkerError:
        self.close()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "it printed nothing"
        return WorkerError(f"the {self.library} process {how}: {last}")


def serve(library: str) -> None:
    """The child: answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a library prints must not come among the answers.
    module, name = SIDES[library]
    side = getattr(importlib.import_module(module), name)()
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(side, question["method"])(**question["arguments"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
