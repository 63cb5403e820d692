"""Leaves waits out of the Hopper kernels. A run in the emulator must then fail, on a fast and on a slow host."""

import threading
from typing import Any

import pytest

from tests.support import hopper_emulator

SECONDS = 60.0  # after which a warp group is no longer held


def leave_out_waits(
    patch: pytest.MonkeyPatch, owner: Any, method: str, *, held: tuple[Any, str] | None = None, runs: int = 1
) -> None:
    """Makes a method pass all barriers. Warp groups are held before the method `held` until it has run so often."""
    kept, wait_for, impatient = getattr(owner, method), hopper_emulator.Cta.wait_for, threading.local()
    begun = threading.Semaphore(0)

    def without_waits(*args: Any) -> Any:
        impatient.now = True  # this warp group alone: each is a thread
        try:
            return kept(*args)
        finally:
            impatient.now = False
            begun.release()

    patch.setattr(owner, method, without_waits)
    patch.setattr(
        hopper_emulator.Cta, "wait_for", lambda *x: None if getattr(impatient, "now", False) else wait_for(*x)
    )
    if held is not None:
        _hold(patch, *held, begun, runs)


def _hold(patch: pytest.MonkeyPatch, owner: Any, method: str, begun: threading.Semaphore, runs: int) -> None:
    kept, lock, left = getattr(owner, method), threading.Lock(), [runs]

    def late(*args: Any) -> Any:
        with lock:
            while left[0]:
                if not begun.acquire(timeout=SECONDS):
                    raise RuntimeError(f"{runs} runs were waited for, and {left[0]} did not come")
                left[0] -= 1
        return kept(*args)

    patch.setattr(owner, method, late)
