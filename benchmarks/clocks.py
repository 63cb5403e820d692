"""What a GPU's clocks and power were while a benchmark ran."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any

from benchmarks.summary import Summary

_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_UNITS = ("MHz", "MHz", "W", "C")
_BUSY = 50.0  # per cent of a sampling period in which kernels ran


class Watch:
    """Samples `nvidia-smi` twice a second; sees nothing where there is none.

    >>> with Watch() as watch:
    ...     pass
    >>> isinstance(watch.seen(), dict)
    True
    """

    def __enter__(self) -> Watch:
        self._file = tempfile.TemporaryFile("w+")
        words = ["nvidia-smi", f"--query-gpu=utilization.gpu,{','.join(_FIELDS)}", "--format=csv,noheader,nounits",
                 "-lms", "500"]  # fmt: skip
        try:
            self._process = subprocess.Popen(words, stdout=self._file, stderr=subprocess.DEVNULL)
        except OSError:
            self._process = None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._samples = self._read()
        self._file.close()

    def seen(self) -> dict[str, list[float]]:
        """Lowest, median and highest of each while the GPU was busy."""
        samples = self._samples if self._file.closed else self._read()
        busy = [numbers[1:] for numbers in samples if numbers[0] >= _BUSY]
        return {f"{name} ({unit})": [min(column), Summary.of(column).median, max(column)]
                for name, unit, column in zip(_FIELDS, _UNITS, zip(*busy, strict=True), strict=False)}  # fmt: skip

    def _read(self) -> list[list[float]]:
        self._file.seek(0)
        found = []
        for line in self._file.read().splitlines():
            words = line.split(",")
            if len(words) == len(_FIELDS) + 1 and all(word.strip().replace(".", "", 1).isdigit() for word in words):
                found.append([float(word) for word in words])
        self._file.seek(0, 2)
        return found
