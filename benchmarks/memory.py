"""Peak memory of this process."""

from __future__ import annotations

import pathlib
import resource
import sys

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")


class PeakAbove:
    """Peak memory above that of the moment at which this was made, in MB.

    Linux tells the present and the peak memory of a program, and can forget the peak. Elsewhere `getrusage` gives the
    peak since the start: less than the truth if an earlier peak was higher. (On Linux it would count the process from
    which this one was started.)
    """

    def __init__(self) -> None:
        if _CLEAR.exists():
            _CLEAR.write_text("5")  # forgets the peak
        self._baseline = _status("VmRSS") if _STATUS.exists() else _peak()

    def megabytes(self) -> float:
        """Up to now."""
        return (_peak() - self._baseline) / 1e6


def _status(field: str) -> int:
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def _peak() -> int:
    if _STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
