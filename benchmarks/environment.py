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
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "nvidia-cudnn-cu13")
_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


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


def gpu_facts() -> dict[str, str]:
    """Name, driver and present clocks of the first GPU as `nvidia-smi` tells them; empty without one.

    It starts nothing on the GPU, so that children may have all of its memory.
    """
    words = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    facts = dict(zip(_GPU_FIELDS, done.stdout.splitlines()[0].split(", "), strict=False))
    return {"device": facts.pop("name")} | facts


def results_folder(device: str) -> str:
    """The folder of the results of a GPU, by its name.

    >>> results_folder("NVIDIA H200"), results_folder("NVIDIA L4")
    ('h200', 'nvidia-l4')
    """
    return "h200" if "H200" in device else device.lower().replace(" ", "-")


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
