"""The machine, versions and clocks of a measurement."""

import contextlib
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
from typing import Any, Self

ROOT = pathlib.Path(__file__).parent.parent
PEER_PACKAGES = ("fa4-jax", "flash-attn-4", "flashinfer-python", "tokamax")  # packages whose versions the reports name
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl", *PEER_PACKAGES)
_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
# The first GPU that this process sees: on a host with several, others may be busy.
_SMI = ("nvidia-smi", f"--id={_VISIBLE if _VISIBLE.isdigit() or _VISIBLE.startswith('GPU-') else 0}")
_CLOCKS = {"clocks.sm": "MHz", "clocks.mem": "MHz", "power.draw": "W", "temperature.gpu": "C"}
_BUSY = 50.0  # per cent of a sampling period in which kernels ran
_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit, the date and the command."""
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {"processor": _processor(), "cores": cores, "memory_GB": memory, "system": platform.platform()}
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    main = sys.modules["__main__"].__spec__
    module = "?" if main is None else main.name.removesuffix(".__main__")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine | {"load_at_the_end": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version()} | installed,
    }


def gpu_facts() -> dict[str, str]:
    """Name, driver and present clocks of the first GPU that this process sees, by `nvidia-smi`; empty without one.

    It starts nothing on the GPU, so that subprocesses may have all of its memory.
    """
    words = [*_SMI, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    facts = dict(zip(_GPU_FIELDS, done.stdout.splitlines()[0].split(", "), strict=False))
    return {"device": facts.pop("name")} | facts


def results_folder(device: str) -> str:
    """The folder of the results of a GPU, by its name.

    >>> results_folder("NVIDIA H200"), results_folder("NVIDIA H100 80GB HBM3"), results_folder("NVIDIA H100 PCIe")
    ('h200', 'h100', 'nvidia-h100-pcie')
    """
    short = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}  # of SXM5; others have their full names
    return short.get(device) or device.lower().replace(" ", "-")


class ClockWatch:
    """Samples clocks and power by `nvidia-smi` twice a second; records nothing where there is none."""

    def __enter__(self) -> Self:
        self._file = tempfile.NamedTemporaryFile("w")
        query = f"--query-gpu=utilization.gpu,{','.join(_CLOCKS)}"
        words = [*_SMI, query, "--format=csv,noheader,nounits", "-lms", "500"]
        try:
            self._process = subprocess.Popen(words, stdout=self._file, stderr=subprocess.DEVNULL)
        except OSError:
            self._process = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._file.close()

    def seen(self) -> dict[str, list[float]]:
        """Lowest, median and highest of each while the GPU was busy."""
        samples, text = [], pathlib.Path(self._file.name).read_text()  # opened anew, so as not to move the writer's end
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # "[N/A]", or a line that is half written
                samples.append([float(word) for word in line.split(",")])
        busy = [numbers[1:] for numbers in samples if len(numbers) == len(_CLOCKS) + 1 and numbers[0] >= _BUSY]
        return {
            f"{name} ({unit})": [min(column), statistics.median(column), max(column)]
            for (name, unit), column in zip(_CLOCKS.items(), zip(*busy, strict=True), strict=False)
        }


def _commit() -> str | None:
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    try:
        name = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "jflex", "pallas_kernels")
    except FileNotFoundError:
        return None
    return f"{name} and changes" if changed else name or None


def _processor() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return facts.get("model name", platform.processor()) + (", AVX-512" if "avx512f" in facts.get("flags", "") else "")
