"""How long a run may take. Loads neither JAX nor torch."""

from __future__ import annotations

import time

_LEAST = 15.0  # seconds that a problem takes at most, if nothing hangs; no wait is shorter unless the end is nearer


class Deadline:
    """The end of a run, for waits that must not outlast it.

    Args:
      seconds: From now on; None for no end.
      share: Of the time that is left, how much one wait may take at most; a peer that hangs must leave some for others.

    >>> Deadline().patience(90.0), Deadline(0.0).patience(90.0), Deadline(0.0).over, Deadline().over
    (90.0, 0.0, True, False)
    >>> Deadline(100.0, 0.25).patience(90.0) <= 25.0
    True
    """

    def __init__(self, seconds: float | None = None, share: float = 1.0) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._share = share

    @property
    def left(self) -> float | None:
        """Seconds until the end; None if there is none."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether nothing should be begun any more, since what takes `_LEAST` seconds would be cut short."""
        return self.left is not None and self.left < _LEAST

    def patience(self, most: float) -> float:
        """How long to wait, at most so long."""
        return most if self.left is None else min(most, max(self.left * self._share, min(self.left, _LEAST)))
