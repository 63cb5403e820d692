"""Warnings of public calls, which name the line of the user."""

from __future__ import annotations

import inspect
import warnings


def warn_user(message: str) -> None:
    """Warns at the first frame outside of this package: once for each line, by Python's default."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "jflex":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)
