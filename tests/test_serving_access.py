"""Connections of a real server, by raw sockets: limits of time, and bodies with two lengths."""

from __future__ import annotations

import asyncio
import re
import socket
import time

import pytest

from flax_layers.serving.http import Limits
from tests.served import exchange, listening

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_the_head_of_a_request_has_a_limit_of_time():
    with listening(limits=Limits(head_seconds=0.3)) as address:
        whole = exchange(address, REQUEST[:20])
        assert whole.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in whole.lower()
        assert b"within 0.3 s" in whole
        drops = [REQUEST[n : n + 1] for n in range(len(REQUEST))]  # none of them begins the time anew
        assert exchange(address, *drops, pause=0.05).startswith(b"HTTP/1.1 408 ")
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
