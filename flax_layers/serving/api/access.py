"""Keys, hosts and web pages that may call the server; and the id and the log line of each request."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import pathlib
import re
import time
import uuid

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.api.transport import ApiError

with needs("starlette", "serve"):
    from starlette.datastructures import Headers
    from starlette.middleware.cors import CORSMiddleware
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = logging.getLogger(__name__)
_POLLED = ("/health", "/metrics", "/stats")
"""Paths that are asked for every second; their log lines have the level DEBUG."""


@dataclasses.dataclass(frozen=True)
class Access:
    """Hosts and web pages that may call. Without keys, a server on a loopback address needs both checks.

    A browser lets any page send requests to 127.0.0.1, and with a name that the page's owner resolves to it (DNS
    rebinding) read the answers, too.
    """

    # names in `Host`, beside names of this machine; `*` for all. None: neither hosts nor origins are checked
    hosts: tuple[str, ...] | None = None
    # origins of web pages, as `http://localhost:3000`, beside the server's own; `*` for all. They may read answers
    # (CORS)
    origins: tuple[str, ...] = ()

    def check(self, host: str | None, origin: str | None) -> None:
        """Checks the headers `Host` and `Origin`, which browsers send; None for a missing one. Raises ApiError 403.

        Example:
            >>> Access(hosts=()).check("localhost:8000", "http://localhost:8000")
            >>> Access(hosts=()).check("example.com", None)
            Traceback (most recent call last):
            flax_layers.serving.api.transport.ApiError: `Host` must be a name of this machine. Got 'example.com'. ...
        """
        if self.hosts is None:
            return
        name = re.sub(r":\d*$", "", (host or "").lower()).strip("[]")
        if host is not None and not _is_local(name) and not {"*", name} & {x.lower() for x in self.hosts}:
            raise ApiError(
                403,
                f"`Host` must be a name of this machine. Got {name!r}. Start the server with `--allow-host {name}`, or "
                "with keys.",
            )
        page = {f"{scheme}://{(host or '').lower()}" for scheme in ("http", "https")}
        if origin is not None and not {"*", origin} & {*self.origins, *page}:
            raise ApiError(
                403,
                f"`Origin` must be the server's own page. Got {origin!r}. Start the server with "
                f"`--allow-origin {origin}`, or with keys.",
            )


def read_keys(file: pathlib.Path) -> tuple[str, ...]:
    """Reads keys, one on each line, at least one. Raises ValueError if there is none, or the file cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "It is not UTF-8"
        raise ValueError(f"`--api-key-file` must be a text file with keys. Got {file}: {reason}.") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ValueError(f"`--api-key-file` must hold a key on a line of its own. {file} holds none.")
    return keys


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Gate:
    """Checks each request, gives it an id, and logs it.

    The id is the header `x-request-id`, if it has 1 to 128 printable characters, or a new one. The answer has
    the header, too.
    """

    def __init__(self, app: ASGIApp, access: Access):
        self._access, self._app = access, app
        if access.origins:
            self._app = CORSMiddleware(app, access.origins, ("GET", "POST"), ("*",), expose_headers=("x-request-id",))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, started, status = Headers(scope=scope), time.perf_counter(), 0
        sent = headers.get("x-request-id", "")
        request_id = sent if re.fullmatch("[!-~]{1,128}", sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                tag = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), tag]}
            await send(message)

        app = self._app
        try:
            self._access.check(headers.get("host"), headers.get("origin"))
        except ApiError as error:
            app = JSONResponse(error.body(), error.status)
        try:
            await app(scope, receive, tagged)
        finally:
            level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
            path = scope.get("raw_path", b"").decode("latin-1")  # as it was sent: without line breaks
            client, seconds = (scope.get("client") or ("-",))[0], time.perf_counter() - started
            _LOG.log(level, '%s "%s %s" %d %.3f s %s', client, scope["method"], path, status, seconds, request_id)
