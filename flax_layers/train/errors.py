"""Errors that end a run or prevent its start."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator


class InputError(ValueError):
    """An option or its data is wrong; the message says why, and what to do."""


class SaveError(OSError):
    """A checkpoint, the log or a result could not be written."""


class LossError(ArithmeticError):
    """The loss or the gradient is no longer a number."""


class Interrupted(RuntimeError):
    """A signal ended the run.

    Attributes:
        signal: Its number.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


@contextlib.contextmanager
def saving(path: pathlib.Path, last_good: Callable[[], str]) -> Iterator[None]:
    """Turns an error of the disk into one that names the file and the last good checkpoint.

    Args:
        path: What is written inside.
        last_good: The last good checkpoint in words, without a full stop.

    Raises:
        SaveError: Writing failed.
    """
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{path} could not be written: {error.strerror or error}. {last_good()}. Make room on the disk, or make "
            "the folder writable; then run the same command again."
        ) from error
