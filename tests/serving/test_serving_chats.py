"""Chats of agents: tools, reasoning, and what templates get; a real server with the official client."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from flax_layers.models.checkpoint import chat_template
from flax_layers.serving import Constraint, Engine, Guides
from flax_layers.serving.api.chats import ChatBody
from flax_layers.serving.api.http import create_app
from flax_layers.serving.api.messages import MessageParser, MessageStyle, _ObjectEnd
from flax_layers.serving.api.tools import tool_format
from flax_layers.serving.demo_model import ByteTokenizer
from tests.support.served import CONFIG, HELLO, SERVED, SIZES, listening, model, regex

MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
MESSAGES += "{% endfor %}{% endfor %}<assistant>"
TOOLS = "{% if tools %}{{ tools | tojson }}"
QWEN = (
    TOOLS + '<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>{% endif %}'
)
QWEN += MESSAGES + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
LLAMA3 = TOOLS + '{{ \'{"name": function name, "parameters": dictionary of argument name and its value}\' }}{% endif %}'
LLAMA3 += MESSAGES
R1 = MESSAGES + "<think>\n{# </think> #}"
TEMPLATES = {"qwen": QWEN, "llama": LLAMA3, "r1": R1, "effort": MESSAGES + "{{ reasoning_effort }}", "plain": MESSAGES}
TEMPLATES["coder"] = QWEN + "<tool_call><function=name>"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


CITY = tool("weather", city={"$ref": "#/$defs/city"})
CITY["function"]["parameters"]["$defs"] = {"city": {"enum": ["Oslo", "Rome"]}}
TWO = [CITY, tool("add", a={"type": "integer", "minimum": 0, "maximum": 99})]


class Templated(ByteTokenizer):
    """Renders one of the templates, which a test sets, and keeps the last text."""

    def use(self, name: str) -> None:
        self.chat_templates = {"default": TEMPLATES[name]}

    def chat(self, messages, **values):
        self.text = chat_template.render(self.chat_templates["default"], "test", {"messages": messages, **values})
        return self.text


@pytest.fixture(scope="module")
def server():
    tokenizer = Templated()
    engine = Engine(model(), SIZES, Guides(tokenizer, CONFIG.vocabulary))
    app = create_app(engine, tokenizer, SERVED)
    with (
        listening(app, engine=engine) as (host, port),
        openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, tokenizer


def chat(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """The message of a chat with its `finish_reason`, after the stream of it said the same."""
    body: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 300, **HELLO, **options}
    whole = client.chat.completions.create(**body).choices[0]
    joined: dict[str, Any] = {"content": None}
    for chunk in client.chat.completions.create(stream=True, **body):
        joined["finish_reason"] = chunk.choices[0].finish_reason
        for name, value in chunk.choices[0].delta.to_dict().items():
            if name == "tool_calls":
                calls = joined.setdefault(name, [])
                for call in value:
                    calls += [call] if call["index"] == len(calls) else []
                    if "id" not in call:
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            elif value:
                joined[name] = (joined.get(name) or "") + value
    message = whole.message.to_dict() | {"finish_reason": whole.finish_reason}
    for calls in (message.get("tool_calls", ()), joined.get("tool_calls", ())):
        assert all(re.fullmatch("call_[0-9a-f]{24}", call.pop("id")) for call in calls)
        assert [call.pop("index", n) for n, call in enumerate(calls)] == [*range(len(calls))]
    assert {**joined, "refusal": None, "content": joined["content"] or message["content"]} == message
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.full
@pytest.mark.parametrize("template", ["qwen", "llama"])
def test_forced_calls(template, server):
    client, tokenizer = server
    tokenizer.use(template)
    named = chat(client, tools=TWO, tool_choice={"type": "function", "function": {"name": "weather"}})
    [(name, arguments)] = calls_of(named)
    assert (name, arguments["city"] in ("Oslo", "Rome"), named["finish_reason"]) == ("weather", True, "tool_calls")
    assert (named["content"], '"weather"' in tokenizer.text) == (None, True)
    several = chat(client, tools=TWO, tool_choice="required")  # the model never stops
    assert (several["finish_reason"], len(several["tool_calls"]) > 1) == (
        ("length", True) if template == "qwen" else ("tool_calls", False)
    )
    several["tool_calls"] = several["tool_calls"][: -1 if template == "qwen" else None]
    [one] = calls_of(chat(client, tools=TWO, tool_choice="required", parallel_tool_calls=False))
    for name, arguments in [*calls_of(several), one]:
        assert arguments.keys() == ({"city"} if name == "weather" else {"a"})


def call(name: str = "add", key: str = "arguments", a: object = 1) -> str:
    return json.dumps({"name": name, key: {"a": a}})


def shown(*values: object) -> list[tuple[str, dict]]:
    return [("add", {"a": value}) for value in values]


UNKNOWN = f"<tool_call>{call('rm')}</tool_call>"
TAGGED = f"<tool_call>\n{call()}\n</tool_call>"
FIRST = '<tool_call>{"arguments": {"a": %s}, "name": "add"}</tool_call>'
PARTS: dict[str, tuple[str, str, str | None, str | None, list]] = {
    "text": ("qwen", "Hello.\n", None, "Hello.\n", []),
    "reasoning": ("qwen", "<think>\nSo {\n</think>\n\nYes <b>", "So {", "Yes <b>", []),
    "reasoning that the prompt begins": ("r1", "Hm.\n\n</think>\nYes", "Hm.", "Yes", []),
    "reasoning without an end": ("r1", "Hm </thin", "Hm </thin", None, []),
    "a call": ("qwen", TAGGED, None, None, shown(1)),
    "reasoning, text, calls": ("qwen", f"<think>a</think> So:\n{TAGGED}\n{TAGGED}\n", "a", "So:", shown(1, 1)),
    "arguments first": ("qwen", '<tool_call>{"arguments": {"a": "}"}, "name": "add"}', None, None, shown("}")),
    "half a surrogate": ("qwen", FIRST % '"\\ud800"', None, FIRST % '"\\ud800"', []),
    "a surrogate pair": ("qwen", FIRST % '"\\ud83d\\ude00"', None, None, shown("😀")),
    "no number": ("qwen", FIRST % "[NaN, 1e999]", None, FIRST % "[NaN, 1e999]", []),
    "strings": ("qwen", f"<tool_call>{call(a='}{</tool_call>')}</tool_call>", None, None, shown("}{</tool_call>")),
    "an end inside": ("qwen", FIRST % '"</tool_call>"', None, FIRST % '"</tool_call>"', []),
    "no end": ("qwen", f"<tool_call>\n{call()}", None, None, shown(1)),
    "unknown function": ("qwen", UNKNOWN, None, UNKNOWN, []),
    "no JSON": ("qwen", "a <tool_call>{b</tool_call> c", None, "a<tool_call>{b</tool_call> c", []),
    "a head": ("qwen", '<tool_call>{"name": "a', None, '<tool_call>{"name": "a', []),
    "Llama": ("llama", call(key="parameters", a={"b": "\\"}), None, None, shown({"b": "\\"})),
    "several of Llama": ("llama", f" {call(key='parameters')}; {call(key='parameters', a=2)}", None, None, shown(1, 2)),
    "a last semicolon": ("llama", f"{call(key='parameters')};\n", None, None, shown(1)),
    "JSON of Llama": ("llama", '{"a": 1} {"name": "add"}', None, '{"a": 1} {"name": "add"}', []),
    "text of Llama": ("llama", f" So: {call()}", None, f" So: {call()}", []),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_text(name):
    """However it is cut into pieces."""
    template, text, *expected = PARTS[name]
    source = TEMPLATES[template]
    style = MessageStyle("</think>" in source, template == "r1", tool_format(source), ("add", "weather"))
    for size in (*range(1, len(text)), len(text)):
        parser, found, calls = MessageParser(style), {}, []
        for first in range(0, len(text), size):
            delta = parser.push(text[first : first + size], ends=first + size >= len(text))
            for part in delta.pop("tool_calls", ()):
                calls += [["", ""]] * (part["index"] + 1 - len(calls))
                name, arguments = calls[part["index"]]
                function = part["function"]
                calls[part["index"]] = [name + function.get("name", ""), arguments + function["arguments"]]
            found = {key: found.get(key, "") + delta.get(key, "") for key in {*found, *delta}}
        parsed = [(name, json.loads(arguments)) for name, arguments in calls]
        assert [found.get("reasoning_content"), found.get("content"), parsed] == expected


def test_long_calls_are_read_once(monkeypatch):
    """A call of an unknown function, which is text in the end."""
    find, sizes = _ObjectEnd.find, []

    def counted(end, text):
        before = end.read
        size = find(end, text)
        sizes.append(end.read - before)
        return size

    monkeypatch.setattr(_ObjectEnd, "find", counted)
    parser = MessageParser(MessageStyle(format=tool_format(QWEN), functions=("add",)))
    parser.push('<tool_call>{"name": "rm", "arguments": {"a": "')
    assert not any(parser.push("x") for _ in range(10_000))
    assert len(content := parser.push('"}}</tool_call>')["content"]) > 10_000
    assert sum(sizes) < len(content)


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Makes the model write a text."""
    grammar = Constraint.lark(f"start: {json.dumps(text)}")
    monkeypatch.setattr(ChatBody, "constraint", lambda self, template: grammar)


@pytest.mark.full
def test_chosen_calls_and_reasoning(server, monkeypatch):
    client, tokenizer = server
    tokenizer.use("qwen")
    script(monkeypatch, f"<think>\nHm.\n</think>\n\nI add.\n{TAGGED}\n{TAGGED}")
    found = chat(client, tools=TWO)
    assert (found["reasoning_content"], found["content"], found["finish_reason"]) == ("Hm.", "I add.", "tool_calls")
    assert calls_of(found) == shown(1, 1)
    assert calls_of(chat(client, tools=TWO, parallel_tool_calls=False)) == shown(1)
    plain = chat(client, extra_body={"separate_reasoning": False})
    assert plain["content"].startswith("<think>\nHm.\n</think>\n\nI add.\n<tool_call>")
    assert "tool_calls" not in chat(client, tools=TWO, tool_choice="none")
    assert '"tools"' not in tokenizer.text
    tokenizer.use("r1")
    script(monkeypatch, "Hm.\n</think>\nYes")
    found = chat(client)
    assert (found["reasoning_content"], found["content"], found["finish_reason"]) == ("Hm.", "Yes", "stop")
    tokenizer.use("llama")
    script(monkeypatch, call(key="parameters"))
    assert calls_of(chat(client, tools=TWO)) == shown(1)


def test_what_templates_get(server):
    client, tokenizer = server

    def rendered(name: str, **options: Any) -> str:
        tokenizer.use(name)
        chat(client, max_tokens=1, **options)
        return tokenizer.text

    closed = "<assistant><think>\n\n</think>\n\n"
    assert not rendered("qwen").endswith(closed)
    assert rendered("qwen", extra_body={"chat_template_kwargs": {"enable_thinking": False}}).endswith(closed)
    assert rendered("qwen", reasoning_effort="none").endswith(closed)
    assert rendered("effort", reasoning_effort="high").endswith("<assistant>high")
    assert rendered("plain", reasoning_effort="none") == rendered("plain")
    past = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
    said = [
        {"role": "user", "content": "Add."}, {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]  # fmt: skip
    text = '<user>Add.<assistant>{"name": "add", "arguments": {"a": null}}<tool>2<assistant>'
    assert rendered("qwen", messages=said) == text


WITH = {"tools": TWO}
NAMED = {"type": "function", "function": {"name": "rm"}}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no format": ("plain", WITH, "`tools` need a chat template with calls in the format of Hermes"),
    "other format": ("coder", WITH, "`tools` need a chat template"),
    "no tools": ("qwen", {"tool_choice": "required"}, "`tool_choice` needs `tools`. Got 'required'"),
    "no such tool": ("qwen", WITH | {"tool_choice": NAMED}, "`tool_choice` must name one of .*'weather'.* Got 'rm'"),
    "choice": ("qwen", WITH | {"tool_choice": "any"}, '`tool_choice` must be "none", "auto", .* Got \'any\''),
    "a tool": ("qwen", {"tools": [{"type": "x"}]}, "`tools` must be at most 128 objects .*'type': 'x'"),
    "twice": ("qwen", {"tools": [CITY, CITY]}, "`tools` must have different names"),
    "no object": ("qwen", {"tools": [{**CITY, "function": {"name": "a", "parameters": {"type": "array"}}}]}, "`tools`"),
    "bad schema": ("qwen", {"tools": [tool("a", b={"not": {}})], "tool_choice": "required"}, '`tool_choice`.*"not"'),
    "long schema": ("qwen", {"tools": [tool("a", b={"const": "x" * 140_000})], "tool_choice": "required"},
                    "`tool_choice` must have at most 131072 characters"),
    "both": ("qwen", WITH | {"response_format": regex("a")}, "`response_format` must be left out with `tools`"),
    "calls": ("qwen", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "`messages` must"),
    "arguments": ("qwen", {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "a", "arguments": "{"}}]}]}, "`messages` must have .* an object of JSON"),
    "half a surrogate": ("qwen", {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "a", "arguments": '{"a": "\\ud800"}'}}]}]}, "`messages` must have .* an object of JSON"),
    "effort": ("qwen", {"reasoning_effort": "high"}, "`reasoning_effort` is not supported by this model.* Got 'high'"),
    "always": ("r1", {"reasoning_effort": "none"}, "`reasoning_effort` is not supported by this model"),
    "kwargs": ("qwen", {"extra_body": {"chat_template_kwargs": {"messages": []}}}, "must not have 'messages'"),
    "self": ("qwen", {"extra_body": {"chat_template_kwargs": {"self": 1}}}, "must not have 'self'"),
    "marks": ("qwen", {"extra_body": {"chat_template_kwargs": {"generation_marks": "ab"}}}, "not have 'generation_mar"),
    "streamed": ("qwen", {"stream": True, "extra_body": {"prompt_logprobs": 1}}, "must be left out with `stream`"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chats(name, server):
    client, tokenizer = server
    template, options, message = WRONG[name]
    tokenizer.use(template)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", **{**HELLO, **options})
    body = wrong.value.body
    assert re.search(message, body["message"], re.DOTALL), body
    assert body["param"] == re.search("`([a-z_]+)`", body["message"])[1]
