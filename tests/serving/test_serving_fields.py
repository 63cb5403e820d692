"""Fields of a request: those that the server lacks are refused by name, and any JSON numbers harm no other request."""

from __future__ import annotations

import asyncio
import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_layers.serving.api.bodies import CompletionBody, StreamOptions, TokenizeBody
from flax_layers.serving.api.chats import ChatBody
from flax_layers.serving.api.foreign import FOREIGN
from flax_layers.serving.engine.exclusions import Exclusions
from flax_layers.serving.engine.requests import Request, token_limit
from tests.support.served import COMPLETIONS, GREEDY, PROMPT, app_of, ask, client, completion

pytestmark = pytest.mark.usefixtures("no_page_is_lost")

LABELS = dict.fromkeys((
    "custom_labels", "include_obfuscation", "metadata", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "return_mm_kwargs", "safety_identifier", "service_tier",
    "session_id", "truncation_side", "user",
), "me")  # fmt: skip
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"},
    "best_of": 1, "min_p": 0, "n": None, "stop": None, "unheard_of": {"a": 1}, "messages": [], **LABELS,
    "min_tokens": 0, "bad_words": [], "include_stop_str_in_output": False, "prompt_logprobs": None,
    **{name: field.neutral[0] if field.neutral else None for name, field in FOREIGN.items()},
}  # fmt: skip


def test_neutral_values_and_unknown_fields(engine):
    assert completion(engine, **NEUTRAL)["choices"] == completion(engine)["choices"]


REFUSED = {
    **{name: ["what", {"no": "server"}, "has"] for name in FOREIGN if name != "echo"},
    "guided_json": {"type": "object"}, "tools": [{"type": "function"}], "suffix": "x",
    "best_of": 2, "min_new_tokens": 2, "reasoning_effort": "low", "return_token_ids": True,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_lacks_is_refused_by_name(name, engine):
    answer = ask(app_of(engine), COMPLETIONS, {**GREEDY, name: REFUSED[name]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert re.search(rf"^`{name}` (is not supported|must equal).* Got .*\..*\.$", error["message"])


def test_every_field_of_openai_is_known():
    """Each is supported, refused by name, or a label."""
    from openai.types import completion_create_params
    from openai.types.chat import chat_completion_stream_options_param
    from openai.types.chat import completion_create_params as chat_params

    for kind, params in (
        (CompletionBody, completion_create_params.CompletionCreateParamsBase),
        (ChatBody, chat_params.CompletionCreateParamsBase),
        (StreamOptions, chat_completion_stream_options_param.ChatCompletionStreamOptionsParam),
    ):
        assert params.__annotations__.keys() <= kind.model_fields.keys() | FOREIGN.keys() | LABELS.keys()
    assert FOREIGN.keys() & (CompletionBody.model_fields.keys() | TokenizeBody.model_fields.keys()) == {"echo"}
    assert FOREIGN.keys() & ChatBody.model_fields.keys() == {
        "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
        "reasoning_effort", "separate_reasoning",
    }  # fmt: skip


def test_options_of_streams(engine):
    stream = lambda **options: ask(app_of(engine), COMPLETIONS, GREEDY | {"stream": True, "stream_options": options})
    assert stream(include_obfuscation=False, continuous_usage_stats=False).status_code == 200
    error = stream(continuous_usage_stats=True).json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats"
    assert "can only be False. Got True. Set `stream_options.include_usage`" in error["message"]


class Counted(list):
    """A list that counts what slices of it hold."""

    count = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.count += len(found) if isinstance(index, slice) else 1
        return found


def test_few_of_many_long_bad_words_are_compared():
    """Each of the steps and samples of a request looks at them."""
    words = tuple((n, *[7] * 1000) for n in range(1000))
    request = Request((1,), bad_words=words)
    exclusions, known = Exclusions(request), Counted([5] * 4000)
    assert token_limit(request, 4096, 4096, 1000) == 4095
    assert exclusions.excluded(known, 4000) == []
    assert known.count == len(words)
    assert exclusions.excluded([3, *[7] * 999], 1000) == [7]


# --- numbers

EDGES = [
    "0", "-0.0", "1", "-1", "1.5", "2", "20", "21", "255", "256", "300", "1e-45", "1.2e-38", "1e-6", "3.4e38", "1e39",
    "1e308", "1e999", "-1e999", "NaN", "2147483647", "2147483648", "-2147483649", "4294967296", "9223372036854775808",
    "9" * 30, "9" * 400, "-" + "9" * 400, "9" * 5000, "true", "null", '"1"',
]  # fmt: skip
NUMBERS = st.sampled_from(EDGES) | st.sampled_from(EDGES) | st.integers().map(str) | st.floats().map(json.dumps)
FEW = st.sampled_from([x for x in EDGES if x not in ("20", "21", "255", "256", "300")])  # what runs for long
LISTS = st.lists(NUMBERS, max_size=3).map(lambda x: f"[{','.join(x)}]")
BIASES = st.dictionaries(NUMBERS, NUMBERS, max_size=3).map(
    lambda x: "{" + ",".join(f"{json.dumps(token)}:{bias}" for token, bias in x.items()) + "}"
)
FIELDS = {
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
         "seed", "logprobs", "best_of", "length_penalty", "min_tokens", "priority", "truncate_prompt_tokens"),
        NUMBERS,
    ),
    "max_tokens": FEW, "n": FEW, "stop_token_ids": LISTS, "prompt": LISTS, "logit_bias": BIASES,
}  # fmt: skip


@functools.lru_cache
def alone(engine) -> list[dict]:
    return completion(engine)["choices"]


def check(engine, fields: dict[str, str]) -> int:
    """The status of a request; its neighbor gets the text that it gets alone."""
    fields = {"prompt": json.dumps(PROMPT), "max_tokens": "3"} | fields
    body = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    expected, failures = alone(engine), engine.stats().failures

    async def run():
        async with client(app_of(engine)) as session:
            neighbor = session.post(COMPLETIONS, json=GREEDY)
            return await asyncio.gather(session.post(COMPLETIONS, content=body.encode()), neighbor)

    answer, neighbor = asyncio.run(run())
    assert answer.status_code in (200, 400), answer.text
    assert answer.json()["choices"] if answer.status_code == 200 else answer.json()["error"]["message"]
    assert neighbor.json()["choices"] == expected
    assert engine.stats().failures == failures
    return answer.status_code


@pytest.mark.full
@settings(max_examples=100)
@given(fields=st.lists(st.one_of([st.tuples(st.just(name), x) for name, x in FIELDS.items()]), max_size=2))
def test_any_numbers(fields, engine):
    check(engine, dict(fields))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"top_k": "2147483648"}, 200),
        pytest.param({"top_k": "9" * 400}, 200, marks=pytest.mark.full),
        pytest.param({"seed": "-" + "9" * 400}, 200, marks=pytest.mark.full),
        ({"repetition_penalty": "1e-45"}, 400),
        pytest.param({"repetition_penalty": "1e39"}, 400, marks=pytest.mark.full),
        pytest.param({"temperature": "1e39"}, 400, marks=pytest.mark.full),
        ({"logit_bias": '{"97":' + "9" * 400 + "}"}, 400),
        pytest.param({"logit_bias": '{"97":true}'}, 400, marks=pytest.mark.full),
        pytest.param({"logit_bias": '{"9999999999":1}'}, 400, marks=pytest.mark.full),
        pytest.param({"logit_bias": '{"\\uff11":1}'}, 400, marks=pytest.mark.full),
        ({"stop_token_ids": "[" + ",".join(["5"] * 513) + "]"}, 400),
        ({"stop_token_ids": "[256]"}, 400),
        pytest.param({"stop_token_ids": "[-1]"}, 400, marks=pytest.mark.full),
        pytest.param({"max_tokens": "9" * 400}, 400, marks=pytest.mark.full),
        pytest.param({"cache_salt": '"' + "x" * 257 + '"'}, 400, marks=pytest.mark.full),
    ],
    ids=lambda x: str(x)[:40],
)
def test_edges(fields, status, engine):
    assert check(engine, fields) == status
