"""`response_format` of both endpoints: answers match it, whole and streamed; and the official client reads them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading

import pytest

from flax_layers.serving import Engine
from flax_layers.serving.demo_model import ByteTokenizer
from flax_layers.serving.engine import constraints as constraints_module
from flax_layers.serving.engine.constraints import Guides
from tests.cases.constraint_cases import PERSON, is_valid
from tests.support.served import (
    CHATS,
    COMPLETIONS,
    CONFIG,
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
def test_stop_strings_lengths_and_log_probabilities(engine):
    whole = completion(engine, max_tokens=200, response_format=schema(PERSON), logprobs=1)["choices"][0]
    assert "".join(whole["logprobs"]["tokens"][:9]) == '{"name":"'
    cut = completion(engine, max_tokens=200, response_format=schema(PERSON), stop='"age"')["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole["text"].partition('"age"')[0], "stop")
    short = completion(engine, max_tokens=12, response_format=schema(PERSON))["choices"][0]
    assert short["finish_reason"] == "length"
    assert whole["text"].startswith(short["text"].rstrip("\N{REPLACEMENT CHARACTER}"))
    with pytest.raises(json.JSONDecodeError):
        json.loads(short["text"])


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


@pytest.mark.full
def test_a_step_that_cannot_go_on(engine, monkeypatch):
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=20, verbose_errors=False)
    monkeypatch.setattr(engine._guides, "_limits", limits)
    body = {**GREEDY, "temperature": 1, "seed": 0, "max_tokens": 99, "response_format": regex("[ab]*a[ab]{12}c")}
    answer = ask(app_of(engine), COMPLETIONS, body)
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert "`response_format` cannot be followed any further: lexer error: too many states" in message


def test_an_engine_without_guides():
    found = ask(app_of(Engine(model(), SIZES)), COMPLETIONS, {**GREEDY, "response_format": regex("a")})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == "response_format"
    assert error["message"].startswith("`response_format` is not supported by this engine")


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs llguidance for this: pip install 'jflex\[serve\]'"):
        Guides(ByteTokenizer(), CONFIG.vocabulary)


@pytest.mark.full
def test_the_official_client_reads_models_of_pydantic(engine):
    import openai
    import pydantic

    class Step(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")

        number: int = pydantic.Field(ge=0, le=99)
        kind: str = pydantic.Field(pattern="^(add|remove)$")

    class Plan(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")

        steps: list[Step] = pydantic.Field(max_length=2)
        is_safe: bool

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=client(app)) as session:
            said = await session.chat.completions.parse(
                model="tiny", messages=[{"role": "user", "content": "Plan"}], response_format=Plan, n=4, seed=1,
                max_tokens=600,
            )  # fmt: skip
            assert [type(choice.message.parsed) for choice in said.choices] == [Plan] * 4
            with pytest.raises(openai.BadRequestError, match="unclosed group") as wrong:
                await session.completions.create(model="tiny", prompt="a", extra_body={"response_format": regex("(")})
            assert wrong.value.param == "response_format"

    app = app_of(engine)
    asyncio.run(run())
