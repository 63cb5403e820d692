"""Fields that the server does not support: refused by name, unless they change nothing."""

from __future__ import annotations

import re

import pytest

from flax_layers.serving.api.bodies import FOREIGN, ChatBody, CompletionBody, StreamOptions, TokenizeBody
from tests.support.served import COMPLETIONS, GREEDY, app_of, ask, completion

LABELS = dict.fromkeys((
    "custom_labels", "include_obfuscation", "metadata", "parallel_tool_calls", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "return_mm_kwargs", "safety_identifier", "service_tier",
    "session_id", "truncation_side", "user",
), "me")  # fmt: skip
NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"},
    "best_of": 1, "min_p": 0, "n": None, "stop": None, "unheard_of": {"a": 1}, "messages": [], **LABELS,
    **{name: field.neutral[0] if field.neutral else None for name, field in FOREIGN.items()},
}  # fmt: skip


def test_neutral_values_and_unknown_fields(engine):
    assert completion(engine, **NEUTRAL)["choices"] == completion(engine)["choices"]


REFUSED = {
    **{name: ["what", {"no": "server"}, "has"] for name in FOREIGN},
    "guided_json": {"type": "object"}, "tools": [{"type": "function"}], "suffix": "x", "echo": True,
    "best_of": 2, "prompt_logprobs": 1, "min_tokens": 2, "reasoning_effort": "low", "return_token_ids": True,
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
    assert not FOREIGN.keys() & (CompletionBody.model_fields.keys() | TokenizeBody.model_fields.keys())
    assert FOREIGN.keys() & ChatBody.model_fields.keys() == {"max_completion_tokens", "top_logprobs"}


def test_options_of_streams(engine):
    stream = lambda **options: ask(app_of(engine), COMPLETIONS, GREEDY | {"stream": True, "stream_options": options})
    assert stream(include_obfuscation=False, continuous_usage_stats=False).status_code == 200
    error = stream(continuous_usage_stats=True).json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats"
    assert "can only be False. Got True. Set `stream_options.include_usage`" in error["message"]
