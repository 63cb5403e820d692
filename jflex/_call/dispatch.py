"""Which backend runs a call: the first of those asked for that can."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jflex import backends
from jflex.errors import UnsupportedError

Implementation = str | Sequence[str] | None


def names_of(implementation: Implementation) -> tuple[str, ...]:
    """The names that an argument `implementation` stands for.

    Raises:
      ValueError: It names no backend, or one that is not known.
    """
    known = ", ".join(map(repr, backends.KNOWN))
    if implementation is None:
        return backends.ORDER
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not names:
        raise ValueError(f"`implementation` must name at least one backend; the sequence is empty. Known are {known}.")
    for name in names:
        if name not in backends.KNOWN:
            raise ValueError(f"`implementation` must be one of {known}, a sequence of them, or None. Got {name!r}.")
    return names


def reasons_of(implementation: Implementation, get: Callable[[str], Any], problem: Any) -> dict[str, str | None]:
    """Why each backend does not run the problem, in order; ends with the first that does (None).

    Where none was named, one that can but is slower than others is passed over too.

    Args:
      implementation: As in the call.
      get: The backend of a name, whose ``unsupported(problem)`` is asked.
      problem: What is to be run.
    """
    reasons: dict[str, str | None] = {}
    for name in names_of(implementation):
        backend = get(name)
        reasons[name] = backend.unsupported(problem)
        if reasons[name] is None and implementation is None:
            reasons[name] = backend.slower(problem)
        if reasons[name] is None:
            break
    return reasons


def choose(
    implementation: Implementation, get: Callable[[str], Any], problem: Any, caller: str = "flex_attention"
) -> str:
    """The name of the backend that runs a problem.

    Warns where nothing was asked for, and a GPU would run what is made for CPUs.

    Raises:
      ValueError: As `names_of`.
      UnsupportedError: None of those asked for can run it.
    """
    reasons = reasons_of(implementation, get, problem)
    name, last = list(reasons.items())[-1]
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    if last is not None:
        able = [n for n in backends.KNOWN if n not in reasons and get(n).unsupported(problem) is None]
        raise UnsupportedError(
            f"No implementation that was asked for can run this call. {told}. These can: "
            f"{', '.join(map(repr, able))}; pass implementation=None to let jflex choose."
        )
    if implementation is None and name == "xla" and problem.platform == "gpu":
        warnings.warn(
            f"{caller} runs on the slower implementation 'xla' on this GPU. {told}. Pass "
            "implementation='xla' to accept that.",
            stacklevel=_level_of_user(),
        )
    return name


def gradients_by(implementation: Implementation, name: str, get: Callable[[str], Any], problem: Any) -> tuple[str, str]:
    """Which backend computes gradients of what `name` has run, and why, if it is another: one that is faster at them.

    Where a backend was asked for, or the faster one cannot, it is itself.
    """
    faster = get(name).faster_gradients(problem) if implementation is None else None
    return (name, "") if faster is None or get(faster[0]).unsupported(problem) is not None else faster


def _level_of_user() -> int:
    """The first caller outside of this package, as `warnings.warn` in the function that asks counts levels."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "jflex":
        frame, level = frame.f_back, level + 1
    return level
