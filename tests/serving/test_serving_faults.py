"""Faults around the server, in process: clients that stall and leave, failed steps, a full queue, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from unittest.mock import Mock

import httpx
import pytest

from flax_layers.serving import Engine, Request
from flax_layers.serving.api.choices import wake_all
from tests.cases.engine_cases import fail_once
from tests.support.served import (
    CHATS,
    COMPLETIONS,
    GREEDY,
    HELLO,
    SERVED,
    SIZES,
    Connection,
    app_of,
    ask,
    client,
    completion,
    events_of,
    idle,
    model,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("no_page_is_lost")


def test_a_full_queue_and_a_closed_engine():
    engine = Engine(model(), dataclasses.replace(SIZES, max_waiting=0))
    app = app_of(engine)
    for _ in range(SIZES.max_requests - 1):  # all can start
        engine.submit(Request((1,)), lambda event: None)
    answer = ask(app, COMPLETIONS, GREEDY | {"prompt": ["ab", "abc"]})  # there is room for one of them
    assert (answer.status_code, engine.stats().waiting) == (429, SIZES.max_requests - 1)
    engine.submit(Request((1,)), lambda event: None)
    answer = ask(app, COMPLETIONS, GREEDY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    engine.stop()
    for answer in (
        ask(app, COMPLETIONS, GREEDY),
        ask(app, COMPLETIONS, GREEDY | {"stream": True}),
        ask(app, "/health"),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "shutting down" in answer.json()["error"]["message"]


def test_health(engine):
    assert ask(app_of(engine), "/health").json() == {"status": "running"}
    compiling = dataclasses.replace(SERVED, is_starting=lambda: True)
    answer = ask(app_of(engine, compiling), "/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "compiling"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step(stream, engine, monkeypatch):
    fail_once(monkeypatch, engine, 3)
    answer = ask(app_of(engine), COMPLETIONS, GREEDY | {"stream": stream})
    assert answer.status_code == (200 if stream else 500)
    error = (events_of(answer)[-1] if stream else answer.json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "server_error")
    assert "RuntimeError: injected" in error["message"]
    assert completion(engine)["usage"]["completion_tokens"] == 20


LONG = GREEDY | {"max_tokens": 900}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_client_that_leaves_is_cancelled(path, stream, engine):
    app = app_of(engine)

    async def run() -> None:
        connection = Connection(app, path, LONG | HELLO | {"stream": stream, "n": 2})
        task = asyncio.create_task(connection.run())
        before = engine.stats().steps
        while engine.stats().steps < before + 5:
            await asyncio.sleep(0.001)
        connection.leave.set()
        await asyncio.wait_for(task, 120)

    before = engine.stats().generated_tokens
    asyncio.run(run())
    idle(engine)
    assert engine.stats().generated_tokens - before < 2 * LONG["max_tokens"]
    assert 'jflex_requests_total{finish_reason="cancelled"} 2.0' in ask(app, "/metrics").text


def test_a_client_that_does_not_read_holds_nobody_up(engine):
    app = app_of(engine)

    async def run() -> None:
        stalled = Connection(app, COMPLETIONS, LONG | {"max_tokens": 200, "stream": True})
        stalled.read.clear()
        task = asyncio.create_task(stalled.run())
        async with client(app) as session:
            answer = await session.post(COMPLETIONS, json=GREEDY)
            assert answer.status_code == 200
        while engine.stats().running or engine.stats().waiting:
            await asyncio.sleep(0.005)
        stalled.read.set()
        await asyncio.wait_for(task, 120)
        assert len(stalled.messages) < 10  # what came meanwhile is one event
        assert b'"finish_reason":"length"' in b"".join(x.get("body", b"") for x in stalled.messages)

    asyncio.run(run())


def chunks_of(messages: list[dict]) -> list[dict]:
    """The events of a stream, without the last one."""
    *events, last, rest = b"".join(x.get("body", b"") for x in messages).decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.full
@pytest.mark.parametrize("leaves", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_backlog_is_written_in_turns(leaves, engine, monkeypatch):
    """Others have their turn between two of them, and a client that leaves meanwhile is noticed."""
    monkeypatch.setattr("flax_layers.serving.api.choices._TURN", 40)
    body = GREEDY | {"max_tokens": 100, "n": 4, "logprobs": 2, "stream": True}

    async def run() -> None:
        stalled = Connection(app_of(engine), COMPLETIONS, body)
        stalled.read.clear()
        task = asyncio.create_task(stalled.run())
        before = engine.stats().generated_tokens
        while engine.stats().generated_tokens < before + 400:
            await asyncio.sleep(0.005)
        stalled.read.set()
        turns = []
        while not task.done():
            turns.append(len(stalled.messages))
            if leaves and len(turns) == 3:
                stalled.leave.set()
            await asyncio.sleep(0)
        await task
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 10
        if leaves:
            assert len(stalled.messages) < 40
        else:
            choices = [choice for event in chunks_of(stalled.messages) for choice in event["choices"]]
            assert sum(len(x["logprobs"]["tokens"]) for x in choices if x["logprobs"]) == 400
            assert len(choices) >= 40

    asyncio.run(run())


@pytest.mark.full
def test_a_client_that_is_far_behind_loses_no_token_but_gets_no_more(engine, monkeypatch):
    whole = completion(engine, max_tokens=300)["choices"][0]["text"]
    monkeypatch.setattr("flax_layers.serving.api.http.MAX_BACKLOG", 60)

    async def run() -> list[dict]:
        stalled = Connection(app_of(engine), COMPLETIONS, LONG | {"stream": True})
        stalled.read.clear()
        task = asyncio.create_task(stalled.run())
        while not (stats := engine.stats()).running:
            await asyncio.sleep(0.001)
        while engine.stats().running:
            await asyncio.sleep(0.005)
        assert engine.stats().generated_tokens - stats.generated_tokens < 300
        stalled.read.set()
        await asyncio.wait_for(task, 120)
        return chunks_of(stalled.messages)

    *events, error = asyncio.run(run())
    text = texts_of(events)[0]
    assert len(text.encode()) >= 40
    assert whole.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert error["error"]["type"] == "timeout_error"
    assert "more than 60 tokens and log probabilities wait" in error["error"]["message"]
    assert ask(app_of(engine), COMPLETIONS, LONG).json()["usage"]["completion_tokens"] == 900  # not streamed


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_shutdown_under_load_ends_each_request(grace):
    engine = Engine(model(), SIZES)
    engine.start()
    app = app_of(engine)

    async def run() -> tuple[list[httpx.Response], list[httpx.Response]]:
        async with client(app) as session:
            post = lambda stream: session.post(COMPLETIONS, json=GREEDY | {"max_tokens": 100, "stream": stream})
            early = [asyncio.create_task(post(number % 2 == 1)) for number in range(12)]
            while engine.stats().running < 4:
                await asyncio.sleep(0.001)
            ending = asyncio.create_task(asyncio.to_thread(engine.stop, grace))
            while engine.is_running:  # until it takes no more
                await asyncio.sleep(0.001)
            late = [await post(False), await post(True), await session.get("/health")]
            await ending
            return await asyncio.gather(*early), late

    early, late = asyncio.run(run())
    assert [answer.status_code for answer in late] == [503] * 3
    taken = [answer for answer in early if answer.status_code == 200]  # others came when no request was taken any more
    assert {answer.status_code for answer in early} <= {200, 503}
    whole = [answer.json() for answer in taken if not answer.headers["content-type"].startswith("text/event-stream")]
    streamed = [events_of(answer) for answer in taken if answer.headers["content-type"].startswith("text/event-stream")]
    ended = lambda event: "error" not in event and event["choices"][0]["finish_reason"] == "length"
    assert all(map(ended, whole))
    if grace:
        assert len(taken) >= 4
        assert all(ended(events[-1]) for events in streamed)
    else:
        assert len(whole) < 6
        assert all("error" in events[-1] or ended(events[-1]) for events in streamed)
    idle(engine)


def test_a_step_wakes_the_loop_once_for_all_requests():
    engine, loop, closed, request, woken = Engine(model(), SIZES), Mock(), asyncio.new_event_loop(), Mock(), {}
    engine.after_step.append(lambda: wake_all(woken))
    closed.close()
    for one in (loop, closed, loop):  # a loop that is gone does not matter to others
        engine.submit(Request((1,), max_tokens=2), lambda event, one=one: woken.setdefault(one, []).append(request))
    while engine.step():
        pass
    assert loop.call_soon_threadsafe.call_count == 2
    for call in loop.call_soon_threadsafe.call_args_list:
        call.args[0]()
    assert request.wake.call_count == 4


def test_a_loop_that_is_gone_does_not_break_the_engine(engine):
    """The event loop of a request may be closed before the engine knows that it is cancelled."""

    async def abandon() -> None:
        connection = Connection(app_of(engine), COMPLETIONS, LONG | {"stream": True})
        task = asyncio.create_task(connection.run())
        await connection.seen.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(abandon())
    idle(engine)
    assert engine.is_running
