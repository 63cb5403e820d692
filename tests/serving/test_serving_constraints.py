"""`response_format` of both endpoints: answers match it, whole and streamed; and the official client reads them."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import pytest

from flax_layers.serving import Engine
from flax_layers.serving.engine import constraints as constraints_module
from tests.cases.constraint_cases import PERSON, is_valid
from tests.support.served import (
    CHATS,
    COMPLETIONS,
    GREEDY,
    HELLO,
    PROMPT,
    SIZES,
    app_of,
    ask,
    client,
    completion,
    events_of,
    model,
    regex,
    schema,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("no_page_is_lost")


@pytest.mark.full
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_match_the_schema(path, stream, engine):
    start = HELLO if path == CHATS else {"prompt": PROMPT}
    body = {**start, "n": 3, "seed": 5, "max_tokens": 200, "stream": stream, "response_format": schema(PERSON)}
    answer = ask(app_of(engine), path, body)
    assert answer.status_code == 200, answer.text
    if stream:
        events = events_of(answer)
        texts = texts_of(events)
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["stop"] * 3
    else:
        choices = answer.json()["choices"]
        texts = [choice["message"]["content"] if path == CHATS else choice["text"] for choice in choices]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert all(is_valid(PERSON, text) for text in texts)
    assert len(set(texts)) == 3


@pytest.mark.full
def test_other_formats(engine):
    of = lambda **body: completion(engine, max_tokens=100, temperature=1, seed=3, **body)["choices"][0]
    assert re.fullmatch("(yes|no), .{3}", of(response_format=regex("(yes|no), .{3}"))["text"])
    grammar = {"type": "lark", "grammar": 'start: "a" start "b" | "c"'}
    assert re.fullmatch("a*cb*", of(response_format=grammar)["text"])
    found = of(response_format={"type": "json_object"})
    assert found["text"].startswith("{")
    assert found["finish_reason"] == "length" or isinstance(json.loads(found["text"]), dict)
    assert of(response_format={"type": "text"}) == of(response_format=None) == of()


@pytest.mark.full
def test_slow_grammars_delay_no_other_request(engine, monkeypatch):
    """Requests without constraints are answered while more grammars compile than there are threads for them."""
    opened = threading.Event()
    monkeypatch.setattr(constraints_module, "check", lambda constraint: opened.wait(60))
    app = app_of(engine)

    async def status(**body) -> int:
        async with client(app) as session:
            return (await session.post(COMPLETIONS, json={**GREEDY, **body})).status_code

    async def run() -> None:
        slow = [asyncio.create_task(status(response_format=regex(f"x{n}"))) for n in range(40)]
        while engine.stats().steps == before:
            assert await status() == 200
        assert not any(one.done() for one in slow)
        opened.set()
        assert await asyncio.gather(*slow) == [200] * 40

    before = engine.stats().steps
    asyncio.run(run())


def test_an_engine_without_guides():
    found = ask(app_of(Engine(model(), SIZES)), COMPLETIONS, {**GREEDY, "response_format": regex("a")})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == "response_format"
    assert error["message"].startswith("`response_format` is not supported by this engine")
