"""Errors that end a run or prevent its start."""

import contextlib
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator

from flax_layers.models import CheckpointError


class InputError(ValueError):
    """An option or its data is wrong; the message says why, and what to do."""


class SaveError(OSError):
    """A checkpoint, the log or a result could not be written."""


class LossError(ArithmeticError):
    """The loss or the gradient is no longer a number."""


class Interrupted(RuntimeError):
    """A signal ended the run."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


@contextlib.contextmanager
def saving(path: pathlib.Path, last_good: Callable[[], str]) -> Iterator[None]:
    """Turns an error of the disk into a SaveError that names the file and the last good checkpoint, in words."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{path} could not be written: {error.strerror or error}. {last_good()}. Make room on the disk, or make "
            "the folder writable; then run the same command again."
        ) from error


def run_command(main: Callable[[], object]) -> None:
    """Runs a command.

    Exits with status 1 after an error, and with 128 and the number of the signal after SIGINT or SIGTERM.
    """
    try:
        main()
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(128 + interrupted.signal)
    except KeyboardInterrupt:  # outside of the training loop
        print("SIGINT ended the command.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (InputError, CheckpointError, LossError, ModuleNotFoundError, OSError) as error:
        sys.exit(f"error: {error}")
