"""On what a figure was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton")


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit, the date and the command."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _commit(),
        "machine": {"processor": _processor(), "cores": _cores(), "memory_GB": _memory(), "system": platform.platform(),
                    "load_at_the_end": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version()} | {name: v for name in _PACKAGES if (v := _version(name))},
    }  # fmt: skip


def _module() -> str:
    main = sys.modules["__main__"].__spec__
    return "?" if main is None else main.name.removesuffix(".__main__")


def _commit() -> str | None:
    name = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "jflex", "pallas_kernels")
    return f"{name} and changes" if changed else name or None


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    return facts.get("model name", platform.processor()) + (", AVX-512" if "avx512f" in facts.get("flags", "") else "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
