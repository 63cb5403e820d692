"""Bodies of chats, checked: messages, tools, and what the chat template gets."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Self

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.api.bodies import GenerationBody, Unchecked
from flax_layers.serving.api.messages import THINK, THOUGHT, MessageStyle
from flax_layers.serving.api.tools import Schema, schemas, tool_format
from flax_layers.serving.api.transport import Json
from flax_layers.serving.device.step import MAX_LOGPROBS
from flax_layers.serving.engine.constraints import Constraint

with needs("pydantic", "serve"):
    from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
    from pydantic_core import from_json

MAX_TOOLS = 128
_OF_SERVER = frozenset(("messages", "tools", "template", "add_generation_prompt", "generation_marks", "self"))
"""Variables of chat templates that no request may set."""


def _content(value: Unchecked) -> str:
    """Parses the content of a message: a string, or a list of text parts."""
    if isinstance(value, str) or value is None:
        return value or ""
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(
                '`messages` must have a text as `content`, or a list of parts {"type": "text", "text": "..."}. Got '
                f"{reprlib.repr(part)}. The model reads text alone."
            )
    return "".join(part["text"] for part in parts)


def _calls(value: Unchecked) -> list[Json] | None:
    """Parses the calls of an earlier answer. Templates get their arguments as objects, as from `transformers`."""
    try:
        read = lambda x: from_json(x) if isinstance(x, str) else x
        functions = [{**call["function"], "arguments": read(call["function"]["arguments"])} for call in value or ()]
        if not all(isinstance(x["name"], str) and isinstance(x["arguments"], dict) for x in functions):
            raise TypeError
    except (LookupError, TypeError, ValueError):
        raise ValueError(
            '`messages` must have a list of {"id": "...", "type": "function", "function": {"name": "...", "arguments": '
            f'"..."}}}} as `tool_calls`, whose arguments are an object of JSON. Got {reprlib.repr(value)}.'
        ) from None
    return [{**call, "function": x} for call, x in zip(value or (), functions, strict=True)] or None


def _tools(value: Unchecked) -> list[Json]:
    tools = [] if value is None else value
    is_function = lambda x: (
        isinstance(x, dict)
        and isinstance(x.get("name"), str)
        and re.fullmatch(r"[\w.-]{1,64}", x["name"], re.ASCII) is not None
        and isinstance(x.get("parameters") or {}, dict)
        and (x.get("parameters") or {}).get("type", "object") == "object"
    )
    is_tool = lambda x: isinstance(x, dict) and x.get("type") == "function" and is_function(x.get("function"))
    if not isinstance(tools, list) or not all(map(is_tool, tools)) or len(tools) > MAX_TOOLS:
        raise ValueError(
            f'`tools` must be at most {MAX_TOOLS} objects {{"type": "function", "function": {{"name": "...", '
            '"parameters": {"type": "object", ...}}}, whose names have 1 to 64 letters, digits, _, - or dots. Got '
            f"{reprlib.repr(value)}."
        )
    if len(schemas(tools)) < len(tools):
        raise ValueError(
            f"`tools` must have different names. Got {reprlib.repr([x['function']['name'] for x in tools])}."
        )
    return tools


def _tool_choice(value: Unchecked) -> str | Json | None:
    match value:
        case None | "none" | "auto" | "required" | {"type": "function", "function": {"name": str()}}:
            return value
    raise ValueError(
        '`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}. Got '
        f"{reprlib.repr(value)}."
    )


class Message(BaseModel):
    """A message of a chat. Other fields are passed to the chat template, too."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[str, PlainValidator(_content)] = ""
    tool_calls: Annotated[list[Json] | None, PlainValidator(_calls)] = None


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_special_tokens: bool | None = None
    tools: Annotated[list[Json], PlainValidator(_tools)] = Field([])
    tool_choice: Annotated[str | Json | None, PlainValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = list(schemas(self.tools))
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError(f"`tool_choice` needs `tools`. Got {self.tool_choice!r} without any. Leave it out.")
        if isinstance(self.tool_choice, dict) and self.tool_choice["function"]["name"] not in names:
            raise ValueError(
                f"`tool_choice` must name one of `tools`, {reprlib.repr(names)}. Got "
                f"{reprlib.repr(self.tool_choice['function']['name'])}."
            )
        if self.callable_tools and self.response_format is not None:
            raise ValueError(
                "`response_format` must be left out with `tools`: it would be the form of the whole text, calls "
                'included. Leave one of them out, or set `tool_choice` to "none".'
            )
        taken = sorted(_OF_SERVER & set(self.chat_template_kwargs or {}))
        if taken:
            raise ValueError(f"`chat_template_kwargs` must not have {taken[0]!r}, which the server sets. Leave it out.")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` may be given only with `logprobs`. Set `logprobs`, or leave it out.")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"`top_logprobs` must be from 0 to {MAX_LOGPROBS}. Got {self.top_logprobs}.")
        return self

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or `max_tokens`, its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        """See `logprobs` and `top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def callable_tools(self) -> list[Json]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced(self) -> Mapping[str, Schema]:
        """Functions of which the answer must call one, with the schemas of their arguments."""
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            return {name: schemas(self.tools)[name]}
        return schemas(self.tools) if self.tool_choice == "required" else {}

    def template_values(self, template: str) -> Json:
        """The variables of a chat template, beside messages. Raises ValueError if it ignores `reasoning_effort`."""
        effort, reads = self.reasoning_effort, lambda name: re.search(rf"\b{name}\b", template) is not None
        values: Json = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            values["enable_thinking"] = False
        is_plain = effort == "none" and THOUGHT not in template
        if values and not is_plain and not any(map(reads, values)):
            raise ValueError(
                "`reasoning_effort` is not supported by this model: its chat template does not read it. Got "
                f"{effort!r}. Leave it out, or see which variables of `chat_template_kwargs` it reads."
            )
        tools = {"tools": self.callable_tools} if self.callable_tools else {}
        return {**values, **(self.chat_template_kwargs or {}), **tools}

    def style(self, template: str, prompt: str) -> MessageStyle:
        """The parts of the answer. Raises ValueError if it may have calls whose format is not known."""
        tools, form = self.callable_tools, tool_format(template)
        if tools and form is None:
            raise ValueError(
                "`tools` need a chat template with calls in the format of Hermes (`<tool_call>`, JSON) or of Llama 3 "
                "(JSON). This model's has neither. Describe the tools in a message, and use `response_format`."
            )
        thinks = THOUGHT in template and self.separate_reasoning is not False
        is_free = self.response_format is None and not self.forced  # a constraint leaves no room for reasoning
        return MessageStyle(
            thinks and is_free,
            prompt.rstrip().endswith(THINK),
            form if tools else None,
            schemas(tools),
            self.parallel_tool_calls is False,
        )

    def constraint(self, template: str) -> Constraint | None:
        """The constraint of the answer."""
        form = tool_format(template)
        if form is None or not self.forced:
            return self.response_format
        repeats = self.tool_choice == "required" and self.parallel_tool_calls is not False
        return form.grammar(self.forced, repeats=repeats)
