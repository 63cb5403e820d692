"""What ends a run, or keeps it from beginning."""


class InputError(ValueError):
    """What was asked for cannot be done; the message says why, and what to do."""


class SaveError(OSError):
    """A checkpoint could not be written."""


class LossError(ArithmeticError):
    """The loss or the gradient is no longer a number."""


class Interrupted(RuntimeError):
    """The run was asked to end, by a signal.

    Attributes:
        signal: Its number.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal
