"""Runs a function in a fresh process: ``python -m benchmarks.children MODULE FUNCTION ARGUMENTS``."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.environment import ROOT


def in_fresh_process(module: str, function: str, **arguments: Any) -> Any:
    """What ``module.function(**arguments)`` returns there, by way of JSON.

    Raises:
      RuntimeError: The process failed; its messages are in the error.
    """
    # glibc would keep freed arrays for later ones, so that a peak would depend on what was freed before; with this it
    # gives each array of more than 64 kB back at once.
    return called(module, function, arguments, {"MALLOC_MMAP_THRESHOLD_": "65536"})


def called(
    module: str, function: str, arguments: dict[str, Any], variables: dict[str, str], seconds: float | None = None
) -> Any:
    """What ``module.function(**arguments)`` returns in a fresh process, by way of JSON.

    Args:
      module: Where the function is; importing it is part of the process.
      function: Its name.
      arguments: By name, of what JSON can hold.
      variables: Added to the variables of the environment.
      seconds: The process is ended after so long; None for never.

    Raises:
      RuntimeError: The process failed, with its messages in the error, or took too long.
    """
    words = [sys.executable, "-m", "benchmarks.children", module, function, json.dumps(arguments)]
    try:
        done = subprocess.run(words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False,
                              timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{module}.{function}({arguments}) was ended: it ran for {seconds} s.") from error
    if done.returncode:
        raise RuntimeError(f"{module}.{function}({arguments}) failed in a process of its own:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    called_there = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    print(json.dumps(called_there(**json.loads(sys.argv[3]))))
