"""A server of jflex that a benchmark starts, and how long it takes to its first token."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Started(NamedTuple):
    """A server that runs.

    Attributes:
      url: Its URL.
      begun: When its process was started, by `time.perf_counter`.
    """

    url: str
    begun: float


@contextlib.contextmanager
def started(options: Sequence[str]) -> Iterator[Started]:
    """Runs ``python -m flax_layers.serve`` on a free port, and ends it.

    Args:
      options: Of the command, but for the port.

    Yields:
      The server, once it takes requests.

    Raises:
      RuntimeError: It has ended before.
    """
    begun = time.perf_counter()
    command = [sys.executable, "-m", "flax_layers.serve", "--port=0", "--log-level=warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            found = next(filter(None, (re.match(r"Serving .* at (\S+)", line) for line in lines)), None)
            if found is None:
                raise RuntimeError(f"The server ended with status {process.wait()}. Its output above says why.")
            yield Started(found[1], begun)
        finally:
            process.terminate()
