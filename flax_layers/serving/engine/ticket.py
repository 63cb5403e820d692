"""What the engine gives for a request: a ticket, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

from flax_layers.serving.engine.sequence import Sequence


class QueueFull(RuntimeError):
    """The queue is full: `max_waiting` requests wait that cannot start. Try again later."""


class Closed(RuntimeError):
    """The engine takes no more requests: it is shutting down."""


class Ticket:
    """A submitted request."""

    def __init__(self, sequence: Sequence, cancel: Callable[[Sequence], None]):
        self._sequence, self._cancel = sequence, cancel

    def cancel(self) -> None:
        """Ends the request before the next step, from any thread; does nothing if it has ended."""
        self._cancel(self._sequence)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._sequence.request.prompt)

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache, or that another sample of it computed."""
        return self._sequence.hit or 0
