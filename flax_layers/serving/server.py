"""The process around the application: a socket, programs that are compiled while it answers, and a graceful end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import json
import socket
from collections.abc import Callable

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.api.transport import ApiError, Limits
from flax_layers.serving.engine.engine import Engine

with needs("starlette", "serve"):
    from starlette.types import ASGIApp
with needs("uvicorn", "serve"):
    import h11
    import uvicorn
    from uvicorn.protocols.http.flow_control import CLOSE_HEADER
    from uvicorn.protocols.http.h11_impl import H11Protocol

_LAST_SECONDS = 5
"""Time for answers to leave the process, once the engine has ended them."""


class _Interrupted(Exception):
    """The server ends while programs are still being compiled."""


def bind(host: str, port: int) -> socket.socket:
    """Binds an address, without listening yet; port 0 is any that is free. Raises ValueError if it cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ValueError(f"`--host` must be an address of this machine. Got {host!r}. {error}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"`--host` must be an address of this machine. Got {host!r}. {error}.") from error
        raise ValueError(
            f"`--port` must be free at {host}. Got {port}: {error}. Choose another port, or 0 for any."
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Launch:
    """Starts and stops an engine: its programs are compiled in a thread, so that the server answers meanwhile.

    `report` is called with the number of compiled programs, and of all; without it none are compiled ahead. `ready` is
    called once the engine runs.
    """

    def __init__(
        self, engine: Engine, report: Callable[[int, int], None] | None = None, ready: Callable[[], None] = lambda: None
    ):
        self._engine, self._report, self._ready = engine, report, ready
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jflex-warm-up")
        self._starting: concurrent.futures.Future[None] | None = None
        self._interrupted = False

    @property
    def failure(self) -> BaseException | None:
        """Why the engine could not be started; None while it starts, and if it could."""
        return self._starting.exception() if self._starting is not None and self._starting.done() else None

    def is_starting(self) -> bool:
        """True while programs are being compiled."""
        return self._starting is not None and not self._starting.done() and not self._engine.is_running

    def start(self, failed: Callable[[], None]) -> None:
        """Begins to compile, then starts the engine; calls `failed` if that fails."""
        self._starting = self._thread.submit(self._run)
        self._starting.add_done_callback(lambda starting: failed() if starting.exception() is not None else None)

    def stop(self, grace: float) -> None:
        """Stops the engine, after the program that is being compiled. Requests may take `grace` seconds."""
        self._interrupted = True
        self._thread.shutdown()
        self._engine.stop(grace)
        gc.unfreeze()

    def _run(self) -> None:
        with contextlib.suppress(_Interrupted):
            if self._report is not None:
                self._engine.warm_up(self._progress)
                gc.collect()
            gc.freeze()  # a full collection of all older objects stopped every stream for 0.3 to 0.5 s (one layer, CPU)
            self._engine.start()
            self._ready()

    def _progress(self, done: int, total: int) -> None:
        assert self._report is not None
        self._report(done, total)
        if self._interrupted:
            raise _Interrupted


class _Connection(H11Protocol):
    """A connection with limits of time: for the head of a request, and for a client that reads nothing."""

    limits = Limits()
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begins to wait for the head of a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Takes data. The time for a head begins with its first byte."""
        super().data_received(data)
        self._expect_head()

    def handle_events(self) -> None:
        """Handles arrived data.

        A request with both `Content-Length` and `Transfer-Encoding` may be two requests for a proxy, so the connection
        is closed after the answer (RFC 9112, 6.1).
        """
        super().handle_events()
        names = {name for name, _ in self.headers or ()}
        if {b"content-length", b"transfer-encoding"} <= names and CLOSE_HEADER not in self.headers:
            self.headers.append(CLOSE_HEADER)  # the scope holds the same list, and is answered later

    def pause_writing(self) -> None:
        """Begins to wait for the client to read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _expect_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._refuse_head)

    def _refuse_head(self) -> None:
        if not self.conn.trailing_data[0]:  # nothing has come
            self.transport.close()
        if self.transport.is_closing():
            return
        text = f"The head of a request must arrive within {self.limits.head_seconds:g} s. Send it again."
        body = json.dumps(ApiError(408, text).body()).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        parts = [h11.Response(status_code=408, headers=[*fields.items()]), h11.Data(data=body), h11.EndOfMessage()]
        for part in parts:
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _watch_reader(self, before: int | None = None) -> None:
        """Ends the connection if nothing was read since the last call; a slow client may go on."""
        size = self.transport.get_write_buffer_size()
        if size == before:
            self.transport.abort()
        elif size:
            self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self._watch_reader, size)


class Server(uvicorn.Server):
    """Serves an application, and its engine with it.

    At SIGTERM or SIGINT it takes no more connections and refuses new requests. Running requests may go on for `grace`
    seconds; then they end with an error.
    """

    def __init__(self, app: ASGIApp, launch: Launch, grace: float = 30.0, limits: Limits = Limits()):  # noqa: B008
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=type("Connection", (_Connection,), {"limits": limits}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(grace) + _LAST_SECONDS,
        )
        super().__init__(config)
        self._launch, self._grace = launch, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and begins to compile."""
        await super().startup(sockets)
        self._launch.start(self._end)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections and engine together; at once after a second SIGINT."""
        ending = asyncio.create_task(asyncio.to_thread(self._launch.stop, self._grace))
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(self._launch.stop, 0.0)
        await ending

    def _end(self) -> None:
        self.should_exit = True
