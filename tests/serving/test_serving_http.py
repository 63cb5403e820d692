"""The server's endpoints, in process: texts, streams, parameters, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import httpx
import pytest

from flax_layers.serving import Request
from flax_layers.serving.api.http import Limits, Served, create_app
from flax_layers.serving.demo_model import ByteTokenizer
from tests.support.served import (
    CHATS,
    COMPLETIONS,
    GREEDY,
    HELLO,
    PROMPT,
    SERVED,
    SIZES,
    app_of,
    ask,
    client,
    completion,
    events_of,
    idle,
    regex,
    schema,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("no_page_is_lost")


def test_the_text_is_that_of_the_engine(engine):
    tokens, ended = [], []

    def deliver(event):
        tokens.extend(event.tokens)
        if event.finish_reason:
            ended.append(event.finish_reason)

    engine.submit(Request(tuple(PROMPT.encode()), max_tokens=20), deliver)
    idle(engine)
    found = completion(engine, model="tiny")
    [choice] = found["choices"]
    assert choice["text"] == bytes(tokens).decode(errors="replace")
    assert choice["finish_reason"] == ended[0] == "length"
    assert (found["object"], found["model"]) == ("text_completion", "tiny")
    cached = found["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert found["usage"] == {"prompt_tokens": 46, "completion_tokens": 20, "total_tokens": 66}
    assert cached == 40


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 0}, marks=pytest.mark.full),
        {"n": 3, "seed": 5},
        pytest.param({"logprobs": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_deltas_are_the_whole_text(path, options, engine):
    is_chat = path == CHATS
    body = {"max_tokens": 30, "seed": 1} | (HELLO if is_chat else {"prompt": PROMPT}) | options
    if is_chat and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": 2}
    whole = ask(app_of(engine), path, body).json()
    answer = ask(app_of(engine), path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, usage = events_of(answer)
    of_whole = [x["message"]["content"] if is_chat else x["text"] for x in whole["choices"]]
    assert texts_of(events) == of_whole
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 30 * body.get("n", 1)
    assert all(event["usage"] is None for event in events)
    assert {event["object"] for event in events} == {"chat.completion.chunk" if is_chat else "text_completion"}
    for index in range(body.get("n", 1)):
        chunks = [x for event in events for x in event["choices"] if x["index"] == index]
        assert [x["finish_reason"] for x in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert not is_chat or chunks[0]["delta"] == {"role": "assistant", "content": ""}
    if "logprobs" in options:
        kind = "content" if is_chat else "token_logprobs"
        pieces = [x["choices"][0]["logprobs"] for x in events if x["choices"][0]["logprobs"]]
        assert [one for piece in pieces for one in piece[kind]] == whole["choices"][0]["logprobs"][kind]
        assert sum(len(piece[kind]) for piece in pieces) == 30


def test_log_probabilities(engine):
    found = completion(engine, logprobs=2, max_tokens=5)["choices"][0]["logprobs"]
    assert {len(x) for x in found.values()} == {5}
    assert all(
        max(top.values()) == own for own, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    )
    body = {**HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 3, "temperature": 0}
    content = ask(app_of(engine), CHATS, body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content] == [True] * 3
    said = ask(app_of(engine), CHATS, body).json()["choices"][0]["message"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace") == said


def test_seeds(engine):
    drawn = lambda **options: [x["text"] for x in completion(engine, temperature=1, **options)["choices"]]
    three = drawn(seed=7, n=3)
    assert three == [drawn(seed=seed)[0] for seed in (7, 8, 9)]
    assert len(set(three)) == 3
    assert drawn(seed=-1) == drawn(seed=(1 << 32) - 1)
    assert len({*drawn(n=2), *drawn(n=2)}) == 4  # without a seed: others each time


def test_several_prompts(engine):
    prompts = [PROMPT, "x"]
    found = completion(engine, prompt=prompts, n=2, temperature=1, seed=3)
    alone = [
        x["text"]
        for prompt in prompts
        for x in completion(engine, prompt=prompt, n=2, temperature=1, seed=3)["choices"]
    ]
    assert [x["text"] for x in found["choices"]] == alone
    assert [x["index"] for x in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == len("".join(prompts))
    tokens = [list(prompt.encode()) for prompt in prompts]
    assert [x["text"] for x in completion(engine, prompt=tokens, n=2, temperature=1, seed=3)["choices"]] == alone
    assert completion(engine, prompt=tokens[0])["choices"] == completion(engine)["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(stream, engine):
    text = completion(engine, max_tokens=200)["choices"][0]["text"]
    stop = text[10:14]  # each character is a token, or more
    answer = ask(app_of(engine), COMPLETIONS, {**GREEDY, "max_tokens": 900, "stop": [stop, "never"], "stream": stream})
    choices = [x["choices"][0] for x in events_of(answer)] if stream else answer.json()["choices"]
    assert "".join(x["text"] for x in choices) == text[: text.find(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    before = engine.stats().generated_tokens
    idle(engine)
    assert engine.stats().generated_tokens - before < 400  # it was cancelled


def test_stop_tokens_and_ignore_eos(engine):
    app = app_of(engine, dataclasses.replace(SERVED, stop_tokens=tuple(range(256))))
    [choice] = ask(app, COMPLETIONS, GREEDY).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    [choice] = ask(app, COMPLETIONS, {**GREEDY, "ignore_eos": True}).json()["choices"]
    assert choice == completion(engine)["choices"][0]


def test_default_lengths(engine):
    assert completion(engine, max_tokens=None)["usage"]["completion_tokens"] == 16
    long = {"messages": [{"role": "user", "content": "x" * 1000}]}
    assert ask(app_of(engine), CHATS, long).json()["usage"]["completion_tokens"] == 24
    assert ask(app_of(engine), CHATS, {**long, "max_completion_tokens": 3}).json()["usage"]["completion_tokens"] == 3


def test_penalties_biases_and_stop_tokens(engine):
    biased = {"logit_bias": {"97": 100, "98": 92}, "max_tokens": 12}
    assert completion(engine, **biased)["choices"][0]["text"] == "a" * 12
    assert set(completion(engine, **biased, frequency_penalty=2)["choices"][0]["text"]) == {"a", "b"}
    stopped = completion(engine, **biased, stop_token_ids=[97])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    greedy = completion(engine)["choices"]
    assert completion(engine, temperature=2.0, min_p=1.0, seed=3)["choices"] == greedy


BAD: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": (COMPLETIONS, b"{", 400, "must be JSON in UTF-8"),
    "a list": (COMPLETIONS, b"[]", 400, r"must be a JSON object. Got \[\]"),
    "bad UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}', 400, "must be JSON in UTF-8"),
    "half a surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "must be JSON in UTF-8"),
    "deep": (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000, 400, "must be JSON in UTF-8"),
    "no prompt": (COMPLETIONS, {}, 400, "`prompt` is required"),
    "no tokens": (COMPLETIONS, {"prompt": ""}, 400, "`prompt` must hold at least one token"),
    "repetition": (COMPLETIONS, {**GREEDY, "repetition_penalty": 0}, 400, "`repetition_penalty` must be from 1e-06 to"),
    "bias": (COMPLETIONS, {**GREEDY, "logit_bias": {"a": 1}}, 400, "`logit_bias` must be an object of tokens"),
    "bias of no token": (COMPLETIONS, {**GREEDY, "logit_bias": {"256": 1}}, 400, "`logit_bias` must be of tokens from"),
    "more format": (COMPLETIONS, GREEDY | {"response_format": {"type": "json_object", "schema": {}}}, 400, "`respon"),
    "format": (COMPLETIONS, {**GREEDY, "response_format": {"type": "xml"}}, 400, "`response_format` must be .*'xml'"),
    "no schema": (CHATS, {**HELLO, "response_format": {"type": "json_schema", "json_schema": {}}}, 400, "must be"),
    "bad schema": (COMPLETIONS, {**GREEDY, "response_format": schema({"not": {}})}, 400, '`resp.*Unimpl.*"not"'),
    "bad pattern": (COMPLETIONS, {**GREEDY, "response_format": regex("(a")}, 400, "`response_format`.*unclosed group"),
    "long pattern": (COMPLETIONS, {**GREEDY, "response_format": regex("a" * 200_000)}, 400, "`resp.* Got 200000"),
    "vast schema": (CHATS, {**HELLO, "response_format": schema({"enum": [float("inf")]})}, 400, "`resp.*must be JSON"),
    "vast prompts": (COMPLETIONS, {"prompt": [[1]] * 70_000}, 400, "`prompt` must be at most 65536 texts. Got 70000"),
    "mixed prompts": (COMPLETIONS, {"prompt": ["a", 1]}, 400, "`prompt` must be a text, a list of texts"),
    "foreign token": (COMPLETIONS, {"prompt": [256]}, 400, "`prompt` must hold tokens from 0 to 255.*256"),
    "scored token": (COMPLETIONS, {"prompt": [-1], "prompt_logprobs": 0}, 400, "`prompt` must hold tokens.* Got -1"),
    "long prompt": (COMPLETIONS, {"prompt": "x" * 1024}, 400, "shorter than 1024 tokens.* Got 1024"),
    "long answer": (COMPLETIONS, {"prompt": "xxx", "max_tokens": 1022}, 400, "at most 1024 tokens.* Got 3 and 1022"),
    "temperature": (COMPLETIONS, GREEDY | {"temperature": -1}, 400, "`temperature` must be .* Got -1"),
    "top_k": (COMPLETIONS, GREEDY | {"top_k": -2}, 400, "`top_k` must be at least 0"),
    "n": (COMPLETIONS, GREEDY | {"n": 0}, 400, "`n` must be from 1 to 128. Got 0"),
    "max_tokens": (COMPLETIONS, GREEDY | {"max_tokens": 0}, 400, "`max_tokens` must be at least 1. Got 0"),
    "max_completion_tokens": (CHATS, HELLO | {"max_completion_tokens": 0}, 400, "`max_completion_tokens` must"),
    "hidden scores": (COMPLETIONS, GREEDY | {"prompt_logprobs": -1, "echo": True, "logprobs": 1}, 400, "`prompt_logpr"),
    "stop": (COMPLETIONS, GREEDY | {"stop": [""]}, 400, "`stop` must be a text of 1 to 256 characters"),
    "logprobs": (COMPLETIONS, GREEDY | {"logprobs": 21}, 400, "`logprobs` must be from 0 to 20. Got 21"),
    "usage": (COMPLETIONS, GREEDY | {"stream_options": {}}, 400, "`stream_options` may be given only with `stream`"),
    "model": (COMPLETIONS, GREEDY | {"model": "gpt"}, 404, "`model` must be 'tiny'.* Got 'gpt'"),
    "too many": (COMPLETIONS, {"prompt": ["a"] * 20, "n": 128}, 400, "together must make at most 1028 texts. Got 2560"),
    "no messages": (CHATS, {"messages": []}, 400, "`messages` must .*at least 1 item"),
    "no role": (CHATS, {"messages": [{"content": "a"}]}, 400, r"`messages\[0\].role` is required"),
    "a picture": (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text alone"),
    "top_logprobs": (CHATS, HELLO | {"top_logprobs": 2}, 400, "`top_logprobs` may be given only with `logprobs`"),
    "top count": (CHATS, HELLO | {"logprobs": True, "top_logprobs": 21}, 400, "`top_logprobs` must be from 0 to 20"),
    "tokenize": ("/tokenize", {}, 400, "`prompt` is required"),
    "path": ("/v1/nothing", {}, 404, "There is no `/v1/nothing`"),
    "other model": ("/v1/models/other", None, 404, "`model` must be 'tiny'"),
    "method": (COMPLETIONS, None, 405, "`/v1/completions` takes POST. Got GET"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_requests(name, engine):
    path, body, status, message = BAD[name]
    answer = ask(app_of(engine), path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(message, error["message"], re.DOTALL), error
    assert len(error["message"]) < 400
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_parts_of_a_message(engine):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = lambda content: ask(
        app_of(engine), CHATS, {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    ).json()["choices"]
    assert said(parts) == said("Hello")


def test_templates_that_fail(engine):
    class Refusing(ByteTokenizer):
        error: Exception

        def chat(self, messages, **values):
            raise self.error

    tokenizer = Refusing()
    for error in (ValueError("no system role"), TypeError("no"), ZeroDivisionError("no")):
        tokenizer.error = error
        answer = ask(create_app(engine, tokenizer, SERVED), CHATS, HELLO)
        assert answer.status_code == 400
        assert f"do not fit the chat template of the model. {error}" in answer.json()["error"]["message"]
    tokenizer.chat_templates = {}
    answer = ask(create_app(engine, tokenizer, SERVED), CHATS, HELLO)
    assert (answer.status_code, "has none" in answer.text) == (400, True)


def test_large_bodies(engine):
    app = app_of(engine, dataclasses.replace(SERVED, limits=Limits(body_bytes=100)))

    async def chunks():
        for _ in range(100):
            yield b" " * 10

    async def chunked() -> httpx.Response:
        async with client(app) as session:
            return await session.post(COMPLETIONS, content=chunks())

    for answer in (ask(app, COMPLETIONS, b" " * 101), asyncio.run(chunked())):
        assert answer.status_code == 413
        assert "at most 100 bytes" in answer.json()["error"]["message"]
    assert ask(app, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_slow_bodies(engine):
    app = app_of(engine, dataclasses.replace(SERVED, limits=Limits(body_seconds=0.1)))

    async def chunks():
        yield b"{"
        await asyncio.sleep(30)

    async def slow() -> httpx.Response:
        async with client(app) as session:
            return await session.post(COMPLETIONS, content=chunks())

    answer = asyncio.run(slow())
    assert answer.status_code == 408
    assert "within 0.1 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer one", 200), ("bearer zwö", 200), ("Bearer on", 401), ("Basic one", 401), ("Bearer ", 401), (None, 401)],
)
def test_keys(header, status, engine):
    app = app_of(engine, dataclasses.replace(SERVED, keys=("one", "zwö")))
    headers = {} if header is None else {"Authorization": header.encode()}
    for path, body in ((COMPLETIONS, GREEDY), ("/v1/models", None), ("/metrics", None), ("/stats", None)):
        answer = ask(app, path, body, headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "invalid_api_key"
    assert ask(app, "/health").status_code == ask(app, "/").status_code == 200
    assert "one" not in repr(Served("m", keys=("one",)))


def test_models_tokens_and_the_page(engine):
    app = app_of(engine)
    [entry] = ask(app, "/v1/models").json()["data"]
    assert entry == ask(app, "/v1/models/tiny").json()
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny", "model", 1024)
    tokens = ask(app, "/tokenize", {"prompt": "né", "model": "tiny"}).json()
    assert tokens == {"tokens": [110, 195, 169], "count": 3, "max_model_len": 1024}
    page = ask(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "innerHTML" not in page.text
    assert not re.search(r"https?://|src=", page.text)
    stats = ask(app, "/stats").json()
    assert {"model", "status", "chat", "free_pages", "cached_pages", "hit_tokens"} <= set(stats)


def test_metrics(engine):
    app = app_of(engine)
    for _ in range(2):
        assert ask(app, COMPLETIONS, GREEDY).status_code == 200
    lines = ask(app, "/metrics").text.splitlines()
    read = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    stats = engine.stats()
    assert float(read['jflex_requests_total{finish_reason="length"}']) == 2
    assert float(read["jflex_time_to_first_token_seconds_count"]) == 2
    assert float(read["jflex_inter_token_latency_seconds_count"]) == 38
    assert float(read["jflex_generated_tokens_total"]) == stats.generated_tokens
    assert float(read["jflex_hit_tokens_total"]) == stats.hit_tokens
    for name in ("drafted_tokens", "accepted_tokens"):
        assert float(read[f"jflex_{name}_total"]) == getattr(stats, name) == 0
    assert sum(float(read[f'jflex_pages{{state="{x}"}}']) for x in ("free", "cached", "used")) == SIZES.num_pages - 1
    app_of(engine)  # a second one: no name is registered twice
