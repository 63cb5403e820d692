"""Who may call the server: keys, hosts, web pages; request ids and the access log; connections, by raw sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import socket
import time

import pytest

from flax_layers.serving.api.access import Access
from flax_layers.serving.api.http import Limits
from tests.support.served import CHATS, COMPLETIONS, GREEDY, SERVED, app_of, ask, exchange, listening

PATHS = {"/": None, "/health": None, "/metrics": None, "/stats": None, "/v1/models": None, COMPLETIONS: {}, CHATS: {},
         "/tokenize": {"prompt": "a"}}  # fmt: skip


def statuses(engine, access: Access, **headers) -> set[int]:
    """Of all endpoints; those that generate have nothing to generate from."""
    app = app_of(engine, dataclasses.replace(SERVED, access=access))
    found = {path: ask(app, path, body, headers=headers).status_code for path, body in PATHS.items()}
    return {200 if path in (COMPLETIONS, CHATS) and status == 400 else status for path, status in found.items()}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:9000", 200), ("127.8.0.1", 200), ("[::1]:8000", 200),
        ("tiny.localhost:80", 200), ("named:8000", 200),
        ("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil", 403),
        ("192.168.1.2", 403), ("", 403), ("127.0.0.1@evil.example", 403), ("named.evil", 403), ("x named", 403),
    ],
)  # fmt: skip
def test_hosts(host, status, engine):
    assert statuses(engine, Access(hosts=("Named",)), host=host) == {status}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200), ("https://localhost:8000", 200), ("http://page.example", 200),
        ("http://localhost:3000", 403), ("http://localhost", 403), ("https://evil.example", 403), ("null", 403),
        ("http://page.example.evil", 403), ("http://localhost:8000.evil", 403), ("http://[", 403), ("", 403),
    ],
)  # fmt: skip
def test_origins(origin, status, engine):
    access = Access(hosts=(), origins=("http://page.example",))
    assert statuses(engine, access, host="localhost:8000", origin=origin) == {status}


def test_what_is_allowed_for_all(engine):
    assert statuses(engine, Access(), host="evil.example", origin="https://evil.example") == {200}
    assert statuses(engine, Access(("*",), ("*",)), host="any.example", origin="https://evil.example") == {200}
    error = ask(app_of(engine, dataclasses.replace(SERVED, access=Access(()))), "/stats").json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "forbidden")
    assert "Start the server with `--allow-host server`" in error["message"]


def test_pages_of_allowed_origins_read_answers(engine):
    app = app_of(engine, dataclasses.replace(SERVED, access=Access((), ("http://page.example",))))
    headers = {"host": "localhost", "origin": "http://page.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = ask(app, COMPLETIONS, method="OPTIONS", headers=headers | asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    for path, body in (("/tokenize", {"prompt": "a"}), (COMPLETIONS, {})):
        answer = ask(app, path, body, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        assert answer.headers["access-control-expose-headers"] == "x-request-id"
    assert "access-control-allow-origin" not in ask(app_of(engine), "/health", headers=headers).headers


@pytest.mark.parametrize("shares", [False, True])
def test_keys_are_tenants(shares, engine):
    """Their cached prefixes are their own, and salts divide them further."""
    app = app_of(engine, dataclasses.replace(SERVED, keys=("one", "two"), shares_prefixes=shares))
    prompt = f"A prompt of tenants, and long enough for some pages: {shares}"
    hits = []
    for key, salt in (("one", None), ("two", None), ("one", None), ("two", "a"), ("one", "a"), ("two", "a")):
        body = GREEDY | {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = ask(app, COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"}).json()["usage"]
        hits.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert hits == ([False, True, True, False, True, True] if shares else [False, False, True, False, False, True])


def test_request_ids_and_the_access_log(engine, caplog):
    app = app_of(engine, dataclasses.replace(SERVED, keys=("secret-key",)))
    caplog.set_level(logging.DEBUG, "flax_layers.serving.api.access")
    authorized = {"Authorization": "Bearer secret-key"}
    made = [ask(app, "/v1/models", headers=authorized | {"x-request-id": x}) for x in ("mine-7", "", "x" * 129, "a b")]
    ids = [answer.headers["x-request-id"] for answer in made]
    assert ids[0] == "mine-7"
    assert all(re.fullmatch("[0-9a-f]{32}", x) for x in ids[1:])
    assert len({*ids}) == 4
    others = {
        401: ask(app, COMPLETIONS, GREEDY), 404: ask(app, "/v1/nothing%0d%0aINFO?key=secret-key"),
        400: ask(app, COMPLETIONS, {}, headers=authorized), 200: ask(app, "/health"),
    }  # fmt: skip
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [line.split()[-1] for _, line in lines] == ids + [x.headers["x-request-id"] for x in others.values()]
    for (level, line), (status, answer) in zip(lines[4:], others.items(), strict=True):
        assert (answer.status_code, level) == (status, "DEBUG" if status == 200 else "INFO")
        assert re.fullmatch(rf'127\.0\.0\.1 "(GET|POST) /\S+" {status} \d+\.\d{{3}} s [0-9a-f]{{32}}', line), line
    assert "secret-key" not in caplog.text


@pytest.mark.parametrize("place", ["Choices", "ChoiceText.push"])
def test_a_fault_of_the_server_has_the_id_of_its_request(place, engine, monkeypatch):
    monkeypatch.setattr(f"flax_layers.serving.api.http.{place}", lambda *_: 1 / 0)
    answer = ask(app_of(engine), COMPLETIONS, GREEDY, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers.get("x-request-id")) == (500, "mine")
    assert answer.json()["error"]["message"].startswith("The server failed")


# --- connections of a real server


REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.full
def test_the_time_of_a_head_does_not_begin_anew():
    with listening(limits=Limits(head_seconds=0.3)) as address:
        drops = [REQUEST[n : n + 1] for n in range(len(REQUEST))]
        answer = exchange(address, *drops, pause=0.05)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer.lower()
        assert b"within 0.3 s" in answer
        second = exchange(address, REQUEST, REQUEST[:20], pause=0.2)  # on a connection that is kept
        assert re.findall(rb"HTTP/1.1 (\d+)", second) == [b"200", b"408"]
        assert exchange(address) == b""  # nothing has come


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
BODY = b'{"prompt": "a"}'


@pytest.mark.parametrize("length", [b"15", b"5", b"4000000000"])
def test_two_lengths_of_a_body_end_the_connection(length):
    """What follows would be another request for a server that believes the other length (RFC 9112, 6.1)."""
    both = CHUNKED % (b"Content-Length: " + length + b"\r\n", len(BODY), BODY)
    with listening(limits=Limits(head_seconds=0.5)) as address:
        answer = exchange(address, both + REQUEST)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"413" if length == b"4000000000" else b"200"]
        assert b"connection: close" in answer.lower()
        last = REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        one = exchange(address, CHUNKED % (b"", len(BODY), BODY) + last)
        assert re.findall(rb"HTTP/1.1 (\d+)", one) == [b"200", b"200"]
        assert one.lower().count(b"connection: close") == 1


@pytest.mark.full
@pytest.mark.parametrize("reads", [False, True])
def test_clients_that_read_nothing_are_left(reads):
    """A slow client may go on, as long as it reads something."""
    ended, sent = [], 0

    async def app(scope, receive, send):
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.create_task(receive_end(receive))
        for _ in range(60):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            sent += 1
            if leaving.done():
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        ended.append(leaving.done())
        leaving.cancel()

    async def receive_end(receive):
        while (await receive())["type"] != "http.disconnect":
            pass

    with listening(app, Limits(stall_seconds=0.4)) as address, socket.create_connection(address, timeout=30) as stalled:
        stalled.sendall(REQUEST)
        received, ends = 0, time.monotonic() + 30
        while not ended and time.monotonic() < ends:
            time.sleep(0.02)
            if reads:
                received += len(stalled.recv(1 << 20))
    assert ended == [not reads]
    assert reads == (sent == 60)
