"""Log probabilities of prompts, echoes, defaults of checkpoints, and what lm-evaluation-harness asks a server for."""

from __future__ import annotations

import dataclasses
import json
import re

import httpx
import jax
import numpy as np
import openai
import pytest

from flax_layers.serving.api.http import create_app
from flax_layers.serving.command import load_served, parser, sampling_defaults
from flax_layers.serving.demo_model import ByteTokenizer
from tests.support.golden_models import logits_of
from tests.support.served import (
    CHATS,
    COMPLETIONS,
    GREEDY,
    HELLO,
    PROMPT,
    SERVED,
    app_of,
    ask,
    completion,
    events_of,
    listening,
    model,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("no_page_is_lost")

TOKENS = [*PROMPT.encode()]


def expected(tokens: list[int]) -> np.ndarray:
    """Log probabilities of all tokens after each token."""
    return np.asarray(jax.nn.log_softmax(logits_of(model(), np.array([tokens], np.int32))[0]))


@pytest.mark.full
@pytest.mark.parametrize("prompt", [PROMPT, TOKENS], ids=["text", "tokens"])
def test_requests_of_lm_evaluation_harness(prompt, engine):
    """As its `local-completions` sends them, and reads the answers."""
    body = {"model": "tiny", "prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    [choice] = ask(app_of(engine), COMPLETIONS, {**body, "echo": True}).json()["choices"]
    logprobs, rows = choice["logprobs"], expected(TOKENS)
    of_prompt = [row[token] for row, token in zip(rows, TOKENS[1:], strict=False)]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], of_prompt, atol=1e-4)
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:-1]]
    np.testing.assert_allclose(best, rows[:-1].max(1), atol=1e-4)
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [*range(len(TOKENS) + 1)]
    assert choice["text"] == PROMPT + completion(engine, max_tokens=1)["choices"][0]["text"]


def test_echoes(engine):
    plain = completion(engine, n=2)["choices"]
    body = {**GREEDY, "n": 2, "echo": True}
    assert texts_of([{"choices": plain}]) == [
        x["text"].removeprefix(PROMPT) for x in completion(engine, **body)["choices"]
    ]
    whole = completion(engine, **body, logprobs=2)["choices"]
    events = events_of(ask(app_of(engine), COMPLETIONS, {**body, "logprobs": 2, "stream": True}))
    assert texts_of(events) == [x["text"] for x in whole] == [PROMPT + x["text"] for x in plain]
    tokens = [x for event in events for one in event["choices"] if not one["index"] for x in one["logprobs"]["tokens"]]
    assert tokens == whole[0]["logprobs"]["tokens"]
    [only] = completion(engine, echo=True, max_tokens=0, logprobs=0)["choices"]
    assert (only["text"], len(only["logprobs"]["tokens"]), only["finish_reason"]) == (PROMPT, len(TOKENS), "length")
    assert completion(engine, echo=True, max_tokens=0)["usage"]["completion_tokens"] == 0
    stop = plain[0]["text"][0]
    assert completion(engine, echo=True, stop=[stop, PROMPT[:3]])["choices"][0]["text"] == PROMPT


def test_spaces_that_tokenizers_strip(engine):
    """Llama 2's tokenizer strips a space at the beginning of an answer; a continuation of a prompt keeps it."""

    class Stripping(ByteTokenizer):
        def decode(self, tokens, *, special_tokens=False):
            return super().decode(tokens).removeprefix(" ")

    app, body = create_app(engine, Stripping(), SERVED), {"logit_bias": {"32": 100}, "max_tokens": 3}
    of = lambda **more: ask(app, COMPLETIONS, {"prompt": PROMPT, **body, **more}).json()["choices"]
    assert [x["text"] for x in of(n=2)] == ["   "] * 2
    assert [x["text"] for x in of(prompt=[[97], [98, 32]], echo=True)] == ["a   ", "b    "]
    assert of(prompt=[0xC3])[0]["text"] == "  "  # it begins no character
    assert ask(app, CHATS, HELLO | body).json()["choices"][0]["message"]["content"] == "  "


def test_prompt_logprobs(engine):
    found = completion(engine, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    for token, row, entries in zip(TOKENS[1:], expected(TOKENS), found[1:], strict=False):
        best = np.argsort(-row)[:2]
        assert entries.keys() == {str(x) for x in (token, *best)}
        assert [entries[str(x)]["rank"] for x in best] == [1, 2]
        np.testing.assert_allclose(entries[str(token)]["logprob"], row[token], atol=1e-4)
    answer = ask(app_of(engine), CHATS, {**HELLO, "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert [list(x) for x in answer["choices"][0]["prompt_logprobs"][1:]] == [[str(x)] for x in b"ello"]


def test_lengths_and_words(engine):
    text = completion(engine)["choices"][0]["text"]
    stop = text[3:5]
    kept = completion(engine, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"]
    assert kept == text[: text.find(stop) + 2]
    later = completion(engine, stop=text[0], min_tokens=4)["choices"][0]["text"]
    assert later.startswith(text[:2])
    ends = app_of(engine, dataclasses.replace(SERVED, stop_tokens=tuple(range(128))))
    length = lambda **body: ask(ends, COMPLETIONS, {**GREEDY, **body}).json()["usage"]["completion_tokens"]
    assert length(min_tokens=7) >= 7 > length()
    word = next(x for x in text if x.isascii())
    assert word not in completion(engine, bad_words=[word])["choices"][0]["text"]
    for fields, message in (
        ({"min_tokens": 21}, "`min_tokens` must be from 0 to `max_tokens`, 20. Got 21"),
        ({"bad_words": [""]}, "`bad_words[0]` must have at least 1 character"),
        ({"bad_words": ["a", "b" * 257]}, "`bad_words[1]` must have at most 256 characters. Got 257"),
        ({"prompt_logprobs": 20, "n": 128, "prompt": [[7] * 400]}, "must be at most 1048576 numbers of all prompts"),
        ({"prompt_logprobs": 21}, "`prompt_logprobs` must be from 0 to 20. Got 21"),
    ):
        assert message in ask(app_of(engine), COMPLETIONS, {**GREEDY, **fields}).json()["error"]["message"]


def test_tokens_of_the_server(engine):
    app = app_of(engine)
    assert ask(app, "/detokenize", {"tokens": [110, 195, 169]}).json() == {"prompt": "né"}
    wrong = ask(app, "/detokenize", {"tokens": [256]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
    info = ask(app, "/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == (None, "the texts of the messages")


def test_defaults_of_a_checkpoint(engine):
    """An explicit field wins; without any, the defaults are OpenAI's."""
    served = dataclasses.replace(SERVED, sampling={"temperature": 0.0, "repetition_penalty": 1.3, "top_k": 5})
    ask_for = lambda app, **body: ask(app, COMPLETIONS, {"prompt": PROMPT, "seed": 1, **body}).json()["choices"]
    ours, openais = app_of(engine, served), app_of(engine)
    assert ask_for(ours) == ask_for(openais, temperature=0, repetition_penalty=1.3)
    explicit = {"temperature": 1, "repetition_penalty": 1, "top_k": -1}
    assert ask_for(ours, **explicit) == ask_for(openais) != ask_for(openais, top_k=5)


def test_generation_config(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2], "min_p": None}
    path.write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text('{"top_p": 2}')
    with pytest.raises(ValueError, match=re.escape(f"{path} must hold valid parameters. `top_p` must be")):
        load_served(parser().parse_args(["--model", str(tmp_path)]))


def test_the_official_client_reads_scores(engine):
    with listening() as (host, port), openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="x") as client:
        found = client.completions.create(model="tiny", prompt=TOKENS, echo=True, logprobs=1, max_tokens=2)
        logprobs = found.choices[0].logprobs
        assert (logprobs.token_logprobs[0], len(logprobs.tokens)) == (None, len(TOKENS) + 2)
        more = {"prompt_logprobs": 1, "min_tokens": 2, "bad_words": ["a"], "include_stop_str_in_output": True}
        scored = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, extra_body=more).choices[0]
        assert len(scored.prompt_logprobs) == len(TOKENS)
        greedy = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
        complete = lambda **more: client.completions.create(**greedy, extra_body=more).choices[0].text
        text = complete()
        stop, word = text[3:5], next(x for x in text if x.isascii())
        assert complete(stop=stop, include_stop_str_in_output=True) == text[: text.find(stop) + 2]
        assert complete(stop=text[0], min_tokens=4).startswith(text[:2])
        assert word not in complete(bad_words=[word])
        answer = httpx.post(f"http://{host}:{port}/detokenize", json={"tokens": [110, 195, 169]})
        assert answer.json() == {"prompt": "né"}
