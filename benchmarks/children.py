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
    words = [sys.executable, "-m", "benchmarks.children", module, function, json.dumps(arguments)]
    # glibc would keep freed arrays for later ones, so that a peak would depend on what was freed before; with this it
    # gives each array of more than 64 kB back at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module}.{function}({arguments}) failed in a process of its own:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    called = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    print(json.dumps(called(**json.loads(sys.argv[3]))))
