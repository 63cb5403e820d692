"""A small model that is served in process, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.serving import Engine, EngineOptions, Guides
from flax_layers.serving.api.http import Limits, Served, create_app
from flax_layers.serving.demo_model import ByteTokenizer
from flax_layers.serving.server import Launch, Server, bind
from tests.support import evaluation

CONFIG = ModelConfig(
    vocabulary=256, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8, layers=(LayerConfig(),),
    max_positions=1024, initializer_range=0.5,
)  # fmt: skip
SIZES = EngineOptions(max_requests=4, max_step_tokens=32, num_pages=513, page_size=8)
SERVED = Served("tiny")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "The prefix of a prompt, longer than two pages."
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@functools.cache
def model() -> Decoder:
    return Decoder(CONFIG, implementation="xla", rngs=nnx.Rngs(0))


@contextlib.contextmanager
def running() -> Iterator[Engine]:
    """An engine that runs in its thread."""
    with evaluation.compiled_in_haste(True):
        engine = Engine(model(), SIZES, Guides(ByteTokenizer(), CONFIG.vocabulary))
        engine.start()
        yield engine
        engine.stop()


def idle(engine: Engine) -> None:
    """Waits until nothing runs; then every page is free or cached."""
    ends = time.monotonic() + 120
    while (stats := engine.stats()).running or stats.waiting:
        assert time.monotonic() < ends
        time.sleep(0.005)
    engine.check()
    assert stats.used_pages == 0
    assert stats.free_pages + stats.cached_pages == engine.options.num_pages - 1


def app_of(engine: Engine, served: Served = SERVED):
    return create_app(engine, ByteTokenizer(), served)


@contextlib.contextmanager
def listening(app=None, limits: Limits = Limits(), engine: Engine | None = None) -> Iterator[tuple[str, int]]:  # noqa: B008  frozen
    """A server in a thread of its own, by default for an engine that has not run; yields its address."""
    engine = Engine(model(), SIZES) if engine is None else engine
    app, bound, ready = app_of(engine) if app is None else app, bind("127.0.0.1", 0), threading.Event()
    server = Server(app, Launch(engine, ready=ready.set), grace=1, limits=limits)
    address = bound.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(120)
        yield address
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()


def exchange(address: tuple[str, int], *pieces: bytes, pause: float = 0.0) -> bytes:
    """Sends bytes, with pauses between them, and returns all that comes until the server closes the connection."""
    with socket.create_connection(address, timeout=30) as connection:
        for piece in pieces:
            with contextlib.suppress(OSError):  # it has closed it
                connection.sendall(piece)
                time.sleep(pause)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
        return received


def client(app, **options) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60, **options)


def ask(app, path: str, body: Any = None, method: str | None = None, **options) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(app) as session:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            verb = method or ("GET" if body is None else "POST")
            return await session.request(verb, path, content=content, **options)

    return asyncio.run(run())


def events_of(answer: httpx.Response) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts_of(events: list[dict]) -> list[str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return [texts[index] for index in sorted(texts)]


def schema(value: dict) -> dict[str, Any]:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "value", "schema": value, "strict": True}}


def regex(pattern: str) -> dict[str, Any]:
    """A `response_format`."""
    return {"type": "regex", "pattern": pattern}


def completion(engine: Engine, **body) -> dict:
    answer = ask(app_of(engine), COMPLETIONS, {**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


class Connection:
    """A client at the level of ASGI: it sends a body, sees what comes, and may leave or stop to read."""

    def __init__(self, app, path: str, body: dict):
        self._app, self._body, self._path = app, json.dumps(body).encode(), path
        self.leave, self.read, self.seen = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.read.set()
        self.messages: list[dict] = []
        self._sent = False

    async def run(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": self._path, "raw_path": self._path.encode(), "query_string": b"", "headers": [], "scheme": "http",
        }  # fmt: skip
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message) -> None:
        await self.read.wait()
        self.messages.append(message)
        if message["type"] == "http.response.body" and message["body"]:
            self.seen.set()
