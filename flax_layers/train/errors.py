"""Errors that end a run or prevent its start."""


class InputError(ValueError):
    """An option or its data is wrong; the message says why, and what to do."""


class SaveError(OSError):
    """A checkpoint could not be written."""


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
