"""Limits, bodies that are read within them, answers that are streamed, and clients that leave."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.api.errors import ApiError

with needs("starlette", "serve"):
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests and connections.

    Attributes:
        body_bytes: Maximum size of a body.
        body_seconds: Maximum time for a body to arrive.
        head_seconds: Maximum time for the head of a request to arrive, and of a connection without a request.
        stall_seconds: Maximum time in which a client reads nothing of what waits for it.
    """

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    head_seconds: float = 15.0
    stall_seconds: float = 60.0


class Disconnected(Exception):
    """The client has left."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """Reads a body within limits; what is over them is never held.

    Args:
        request: The request.
        limits: Limits of its size and of the time to receive it.

    Returns:
        The body.

    Raises:
        ApiError: 413 or 408.
    """
    too_large = ApiError(
        413, f"The body must be at most {limits.body_bytes} bytes. It has more. Shorten it, or send several requests."
    )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408, f"The body must arrive within {limits.body_seconds:g} s. {len(body)} bytes came. Send it again."
        ) from None
    return bytes(body)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs something as long as the client is there; the body must have been read.

    Args:
        receive: The `receive` of the ASGI request.
        work: The coroutine to run. It is cancelled if the client leaves.

    Returns:
        Its result.

    Raises:
        Disconnected: The client has left.
    """
    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Disconnected
    finally:
        running.cancel()
        leaving.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams events, and stops when the client leaves.

    Args:
        events: Their bytes.
        end: Called once, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_disconnected(receive, self._write(send))
        except (Disconnected, OSError):  # servers raise OSError when they send to a client that has left
            pass
        finally:
            self._end()

    async def _write(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
