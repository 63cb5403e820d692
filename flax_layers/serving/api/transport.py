"""HTTP below the endpoints: errors as OpenAI's API words them, limits of bodies and connections, streams."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from flax_layers.models.checkpoint.optional import needs

with needs("starlette", "serve"):
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
Json = dict[str, Any]
"""A JSON object."""

_KINDS = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "server_error"),
    503: ("service_unavailable_error", "service_unavailable"),
}
"""Type and code of an error, by its HTTP status."""

RETRY_SECONDS = 1
"""`Retry-After` of refused requests, in seconds."""


class ApiError(Exception):
    """The error that answers a failed request.

    Args:
        message: The error, the rule, the values, the remedy.
        param: The wrong parameter; default: the first that the message names in backquotes, if it is a 400.
        code: A code for programs. Default: follows from the status.

    Example:
        >>> ApiError(400, "`n` must be at least 1. Got 0.").body()["error"]["param"]
        'n'
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message = status, message
        named = re.match(r"`([\w.]+)`", message) if status == 400 else None
        self.param = named[1] if param is None and named else param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the answer."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status in (408, 413):  # the remaining body is not read
            return {"Connection": "close"}
        return {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object of the answer, as JSON."""
        kind, code = _KINDS.get(self.status, _KINDS[400 if self.status < 500 else 500])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code}}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests and connections."""

    body_bytes: int = 4 << 20  # maximum size of a body
    body_seconds: float = 30.0  # maximum time for a body to arrive
    # maximum time for the head of a request to arrive, and of a connection without a request
    head_seconds: float = 15.0
    stall_seconds: float = 60.0  # maximum time in which a client reads nothing of a waiting answer


class Disconnected(Exception):
    """The client has left."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """Reads a body; bytes beyond the limits are never held. Raises ApiError 413 or 408."""
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


async def unless_disconnected(receive: Receive, work: Coroutine[object, None, Result]) -> Result:
    """Awaits `work`, or cancels it and raises Disconnected if the client leaves; the body must have been read."""
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
    """Streams events, and stops when the client leaves. `end` is called once, whatever happens."""

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
