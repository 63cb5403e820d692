"""All choices of one HTTP request, on their way through the engine."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from flax_layers.serving.api.metrics import Metrics
from flax_layers.serving.api.text import ChoiceText, Piece
from flax_layers.serving.api.transport import ApiError
from flax_layers.serving.engine.engine import Engine
from flax_layers.serving.engine.requests import Closed, Event, QueueFull, Request
from flax_layers.serving.engine.sequence import Ticket

MAX_BACKLOG = 1 << 18
"""Tokens and log probabilities of a stream that may wait for its client; up to 80 MB."""

_TURN = 1024
"""Tokens and log probabilities after which a stream lets others have their turn: 13 ms of a CPU for tokens alone."""


Woken = dict[asyncio.AbstractEventLoop, list["Choices"]]
"""Requests with new events, by their loops."""


class Usage(NamedTuple):
    """Tokens of a request: of its prompts, of those in the prefix cache, and of all choices."""

    prompt: int
    cached: int
    completion: int


class Choices:
    """The choices of an HTTP request, and their texts. Belongs to the event loop that constructs it.

    The engine's thread only appends to a queue and wakes the loop, so a slow client does not block it. A client that
    is `max_backlog` behind loses no token that was generated, but gets no more: its requests end.

    Args:
        requests: One for each choice; all requests of a prompt follow each other.
        per_prompt: Number of choices of each prompt.
        text: Constructs the text of each choice.
        metrics: Collects latencies and finish reasons.
        woken: Gets it in each step with events, for `wake_all`.
        max_backlog: Tokens and log probabilities that may wait for the client. None: any number.
        constraint: Name of the field that the constraint comes from.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        per_prompt: int,
        text: Callable[[int], ChoiceText],
        metrics: Metrics,
        woken: Woken,
        max_backlog: int | None = None,
        constraint: str = "response_format",
    ):
        self._constraint = constraint
        self._max_backlog, self._is_behind = max_backlog, False
        self._produced = self._consumed = 0  # by the engine's thread, and by the loop
        self._weights = [1 if x.logprobs is None else 2 + x.logprobs for x in requests]
        self._requests, self._per_prompt, self._metrics = requests, per_prompt, metrics
        self._woken, self._loop = woken, asyncio.get_running_loop()
        self._arrived = self._loop.create_future()  # done once there are events
        self._events: collections.deque[tuple[int, Event, float]] = collections.deque()
        self._texts = [text(index) for index in range(len(requests))]
        self._last = [time.perf_counter()] * len(requests)
        self._tickets: list[Ticket] = []
        self._is_cancelled = False

    def submit(self, engine: Engine) -> None:
        """Submits the requests. Takes a while for many long prompts, so it runs beside the event loop.

        Raises ApiError if the engine refuses one of them; it takes none then.
        """
        try:
            deliver = [functools.partial(self._deliver, index) for index in range(len(self._requests))]
            self._tickets += engine.submit_all(self._requests, deliver)
            if self._is_cancelled:  # meanwhile
                for ticket in self._tickets:
                    ticket.cancel()
        except (ValueError, QueueFull, Closed) as error:
            status = {QueueFull: 429, Closed: 503}.get(type(error), 400)
            is_long = any(len(x.prompt) + (x.max_tokens or 1) > engine.context for x in self._requests)
            code = "context_length_exceeded" if status == 400 and is_long else None
            raise ApiError(status, self._named(str(error)), code=code) from error

    def cancel(self) -> None:
        """Ends unfinished choices before the next step."""
        self._is_cancelled = True
        for ticket, text in zip(self._tickets, self._texts, strict=False):
            if not text.is_done:
                text.is_done = True
                ticket.cancel()
                self._metrics.ended("cancelled")

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yields indices of choices and their new texts: one piece for all text that came while the client was slow.

        Raises ApiError if a step failed, or the server shuts down.
        """
        while not all(text.is_done for text in self._texts):
            await self._arrived
            self._arrived = self._loop.create_future()
            while self._events:
                pieces, error = self._next_pieces()
                if pieces:
                    yield pieces
                if error is not None:
                    raise error
                if self._events:  # of a client that was slow: others have their turn
                    await asyncio.sleep(0)

    @property
    def usage(self) -> Usage:
        """Tokens until now. The choices of a prompt share it: it counts once."""
        prompts = self._tickets[:: self._per_prompt]
        return Usage(
            sum(ticket.prompt_tokens for ticket in prompts),
            sum(ticket.hit_tokens for ticket in prompts),
            sum(text.num_tokens for text in self._texts),
        )

    def _deliver(self, index: int, event: Event) -> None:  # in the engine's thread
        self._events.append((index, event, time.perf_counter()))
        self._produced += len(event.tokens) * self._weights[index]
        self._woken.setdefault(self._loop, []).append(self)

    def _named(self, message: str) -> str:
        """A message about the constraint, with the name that it has in the body."""
        return message.replace("`constraint`", f"`{self._constraint}`")

    def wake(self) -> None:
        """Takes note of new events, in the event loop."""
        if not self._arrived.done():
            self._arrived.set_result(None)
        is_behind = self._max_backlog is not None and self._produced - self._consumed > self._max_backlog
        if is_behind and not self._is_behind:
            self._is_behind = True
            for ticket in self._tickets:
                ticket.cancel()

    def _next_pieces(self) -> tuple[list[tuple[int, Piece]], ApiError | None]:
        """Takes about `_TURN` tokens and log probabilities: new pieces by choice, and the error after them."""
        fresh: dict[int, Piece] = {}
        error, ends = None, self._consumed + _TURN
        while self._events and self._consumed < ends and error is None:
            index, event, moment = self._events.popleft()
            self._consumed += len(event.tokens) * self._weights[index]
            if not self._texts[index].is_done:
                try:
                    piece = self._take(index, event, moment)
                    fresh[index] = fresh[index].then(piece) if index in fresh else piece
                except ApiError as failure:
                    error = failure
        return [(index, piece) for index, piece in fresh.items() if any(piece)], error

    def _take(self, index: int, event: Event, moment: float) -> Piece:
        text = self._texts[index]
        if event.finish_reason in ("cancelled", "error"):
            text.is_done = True
            self._metrics.ended(event.finish_reason)
            if event.finish_reason == "cancelled":
                if self._is_behind:
                    raise ApiError(
                        408,
                        f"The stream must be read sooner: more than {self._max_backlog} tokens and log probabilities "
                        "wait for the client. Read it, or ask for fewer.",
                    )
                raise ApiError(503, event.error or "The request was cancelled.")
            error = self._named(event.error)
            raise ApiError(500, f"The request failed in a step of the engine. {error}. Try again.")
        if event.tokens:
            kind = self._metrics.next_token if text.num_tokens else self._metrics.first_token
            for _ in event.tokens:  # of accepted drafts, which come at once, each gets its share of the time
                kind.observe((moment - self._last[index]) / len(event.tokens))
            self._last[index] = moment
        piece = text.push(event)
        if piece.finish_reason is not None:
            self._metrics.ended(piece.finish_reason)
            if event.finish_reason is None:  # a stop string, which the engine does not know
                self._tickets[index].cancel()
        return piece


def wake_all(woken: Woken) -> None:
    """Wakes the event loops of requests with new events: once for all events of a step, in the engine's thread.

    The thread takes 36 us of CPU time a token, with a wake-up for each event 47 (256 streams, host of an H200).
    """
    while woken:
        loop, requests = woken.popitem()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(lambda requests=requests: [choices.wake() for choices in requests])
