"""The machine, versions and clocks of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "nvidia-cudnn-cu13")
_CLOCKS = {"clocks.sm": "MHz", "clocks.mem": "MHz", "power.draw": "W", "temperature.gpu": "C"}
_BUSY = 50.0  # per cent of a sampling period in which kernels ran
_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit, the date and the command."""
    machine = {"processor": _processor(), "cores": _cores(), "memory_GB": _memory(), "system": platform.platform()}
    installed = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine | {"load_at_the_end": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version()} | installed,
    }


def gpu_facts() -> dict[str, str]:
    """Name, driver and present clocks of the first GPU by `nvidia-smi`; empty without one.

    It starts nothing on the GPU, so that subprocesses may have all of its memory.
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


class ClockWatch:
    """Samples clocks and power by `nvidia-smi` twice a second; records nothing where there is none.

    >>> with ClockWatch() as watch:
    ...     pass
    >>> isinstance(watch.seen(), dict)
    True
    """

    def __enter__(self) -> ClockWatch:
        self._file = tempfile.TemporaryFile("w+")
        query = f"--query-gpu=utilization.gpu,{','.join(_CLOCKS)}"
        words = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "500"]
        try:
            self._process = subprocess.Popen(words, stdout=self._file, stderr=subprocess.DEVNULL)
        except OSError:
            self._process = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._samples = self._read()
        self._file.close()

    def seen(self) -> dict[str, list[float]]:
        """Lowest, median and highest of each while the GPU was busy."""
        samples = self._samples if self._file.closed else self._read()
        columns = zip(*(numbers[1:] for numbers in samples if numbers[0] >= _BUSY), strict=True)
        return {
            f"{name} ({unit})": [min(column), statistics.median(column), max(column)]
            for (name, unit), column in zip(_CLOCKS.items(), columns, strict=False)
        }

    def _read(self) -> list[list[float]]:
        self._file.seek(0)
        found = []
        for line in self._file.read().splitlines():
            words = line.split(",")
            if len(words) == len(_CLOCKS) + 1 and all(word.strip().replace(".", "", 1).isdigit() for word in words):
                found.append([float(word) for word in words])
        self._file.seek(0, 2)
        return found


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
