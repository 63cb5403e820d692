"""One HTTP request on its way through the engine: all its choices."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from flax_layers.serving.engine import Engine
from flax_layers.serving.errors import ApiError
from flax_layers.serving.metrics import Metrics
from flax_layers.serving.requests import Deliver, Event, Request
from flax_layers.serving.text import ChoiceText, Piece
from flax_layers.serving.ticket import Closed, QueueFull, Ticket


class Usage(NamedTuple):
    """Tokens of a request: of its prompts, of those in the prefix cache, and of all choices."""

    prompt: int
    cached: int
    completion: int


class Generation:
    """The choices of a request, and their texts. Belongs to the event loop that it is made in.

    The engine's thread only appends to a queue and wakes the loop, so a slow client does not hold it up. The queue of a
    client that does not read is bounded by the tokens that it asked for.

    Args:
        requests: One for each choice; those of one prompt follow each other.
        choices: How many each prompt has.
        text: Makes the text of a choice.
        metrics: Gets latencies and reasons.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        choices: int,
        text: Callable[[], ChoiceText],
        metrics: Metrics,
    ):
        self._requests, self._choices, self._metrics = requests, choices, metrics
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Event()
        self._events: collections.deque[tuple[int, Event, float]] = collections.deque()
        self._texts = [text() for _ in requests]
        self._last = [time.perf_counter()] * len(requests)
        self._tickets: list[Ticket] = []
        self._is_cancelled = False

    def submit(self, engine: Engine) -> None:
        """Submits the requests. Takes a while for many long prompts, so it runs beside the event loop.

        Args:
            engine: Takes them.

        Raises:
            ApiError: The engine refuses one of them. `cancel` ends the others.
        """
        try:
            for first in range(0, len(self._requests), self._choices):
                samples = range(first, first + self._choices)
                deliver = [self._deliver(index) for index in samples]
                tickets = engine.submit_samples([self._requests[index] for index in samples], deliver)
                self._tickets += tickets
                if self._is_cancelled:  # meanwhile
                    for ticket in tickets:
                        ticket.cancel()
                    return
        except (ValueError, QueueFull, Closed) as error:
            status = {QueueFull: 429, Closed: 503}.get(type(error), 400)
            is_long = any(len(x.prompt) + (x.max_tokens or 1) > engine.context for x in self._requests)
            code = "context_length_exceeded" if status == 400 and is_long else None
            message = str(error).replace("`constraint`", "`response_format`")  # as in the body
            raise ApiError(status, message, code=code) from error

    def cancel(self) -> None:
        """Ends what still runs, before the next step; does nothing at the end."""
        self._is_cancelled = True
        for ticket, text in zip(self._tickets, self._texts, strict=False):
            if not text.is_done:
                text.is_done = True
                ticket.cancel()
                self._metrics.ended("cancelled")

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The texts as they come.

        Yields:
            The number of a choice, and what is new. What came while the client was slow is one piece.

        Raises:
            ApiError: A step failed, or the server shuts down.
        """
        while not all(text.is_done for text in self._texts):
            await self._arrived.wait()
            self._arrived.clear()
            fresh: dict[int, list[Piece]] = {}
            while self._events:
                index, event, moment = self._events.popleft()
                if not self._texts[index].is_done:
                    fresh.setdefault(index, []).append(self._take(index, event, moment))
            for index, pieces in fresh.items():
                if (piece := _joined(pieces)) != Piece():
                    yield index, piece

    async def texts(self) -> list[Piece]:
        """Runs to the end.

        Returns:
            The whole text of each choice.

        Raises:
            ApiError: As for `pieces`.
        """
        found: list[list[Piece]] = [[] for _ in self._texts]
        async for index, piece in self.pieces():
            found[index].append(piece)
        return [_joined(pieces) for pieces in found]

    @property
    def usage(self) -> Usage:
        """Tokens until now. The choices of a prompt share it: it counts once."""
        prompts = self._tickets[:: self._choices]
        return Usage(
            sum(ticket.prompt_tokens for ticket in prompts),
            sum(ticket.hit_tokens for ticket in prompts),
            sum(text.num_tokens for text in self._texts),
        )

    def _deliver(self, index: int) -> Deliver:
        def deliver(event: Event) -> None:  # in the engine's thread
            self._events.append((index, event, time.perf_counter()))
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._arrived.set)

        return deliver

    def _take(self, index: int, event: Event, moment: float) -> Piece:
        text = self._texts[index]
        if event.finish_reason in ("cancelled", "error"):
            text.is_done = True
            self._metrics.ended(event.finish_reason)
            if event.finish_reason == "cancelled":
                raise ApiError(503, event.error or "The request was cancelled.")
            error = event.error.replace("`constraint`", "`response_format`")
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


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece("".join(piece.text for piece in pieces), tokens, pieces[-1].finish_reason)
