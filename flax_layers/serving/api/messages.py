"""Takes the text of an answer apart, as it comes: reasoning, content, and calls of tools."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import NamedTuple

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.api.tools import ToolFormat
from flax_layers.serving.api.transport import Json

with needs("pydantic", "serve"):
    from pydantic_core import from_json

THINK, THOUGHT = "<think>", "</think>"
"""Marks around the reasoning of a model."""

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class MessageStyle(NamedTuple):
    """The parts of a model's text, and their marks."""

    marks_reasoning: bool = False  # its template has the marks of reasoning
    begins_in_reasoning: bool = False  # the prompt ends with the first of them
    format: ToolFormat | None = None  # of calls; None: there are none
    functions: Collection[str] = ()  # names of the functions that may be called
    has_one_call: bool = False  # further calls are left out


class MessageParser:
    r"""Parses the text of one choice. Fields of its deltas, joined, are the fields of the whole text.

    White space around reasoning and calls is left out. A call of an unknown function, or one that is no JSON, is text.

    Example:
        >>> parser = MessageParser(MessageStyle(marks_reasoning=True))
        >>> [parser.push(text) for text in ("<thi", "nk>\nSo", " </think", ">\n\nYes")]
        [{}, {'reasoning_content': 'So'}, {}, {'content': 'Yes'}]
    """

    def __init__(self, style: MessageStyle):
        self._style, self._format = style, style.format
        self._text, self._delta, self.calls = "", Json(), 0
        self._object = _ObjectEnd()
        self._skips_space = style.begins_in_reasoning
        opening = self._reasoning if style.begins_in_reasoning else self._opening
        self._read = opening if style.marks_reasoning else self._content

    def push(self, text: str, *, ends: bool = False) -> Json:
        """Takes new text, the last of all if it `ends`, and returns new fields of the message."""
        self._text += text
        self._delta = {}
        while self._read(ends):
            pass
        return self._delta

    # Each of the following reads one part. It returns True if the next part begins, and False if it needs more text.

    def _opening(self, ends: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text, self._skips_space, self._read = text[len(THINK) :], True, self._reasoning
        elif THINK.startswith(text) and not ends:
            return False
        else:
            self._read = self._content
        return True

    def _reasoning(self, ends: bool) -> bool:
        has_ended = self._show_until(THOUGHT, "reasoning_content", ends)
        self._read = self._content if has_ended else self._read
        return has_ended

    def _content(self, ends: bool) -> bool:
        if self._format is None:
            self._show("content", self._text)
            self._text = ""
            return False
        if self._format.begin:
            has_call = self._show_until(self._format.begin, "content", ends)
        else:
            text = self._text.lstrip(" \r\n\t;" if self.calls else None)
            if not text and (self.calls or not ends):
                return False
            has_call = text.startswith("{")
            if not has_call:
                self._format = None  # it goes on as text
                return True
            self._text = text
        self._object, self._read = _ObjectEnd(), self._call if has_call else self._read
        return has_call

    def _call(self, ends: bool) -> bool:
        assert self._format is not None
        head = _HEAD.match(self._text)
        if head is not None and head[1] in self._style.functions:
            self._open(head[1])
            self._text, self._object, self._read = self._text[head.end() :], _ObjectEnd(), self._arguments
            return True
        end = self._format.end
        closed = self._text.index(end) + len(end) if end and end in self._text else None
        size = self._object.find(self._text[:closed]) or closed
        if size is None and not ends:
            return False
        written, self._text = (self._text, "") if size is None else (self._text[:size], self._text[size:])
        call = _read_call(written)
        if call is not None and call[0] in self._style.functions:
            self._open(call[0])
            self._show_arguments(call[1])
            self._read = self._closing
            return True
        self._show("content", self._format.begin + written)
        self._read, self._format = self._content, self._format if end else None
        return True

    def _arguments(self, ends: bool) -> bool:
        size = self._object.find(self._text)
        self._show_arguments(self._text[:size])
        self._text, self._object.read = "" if size is None else self._text[size:], 0
        self._read = self._arguments if size is None else self._closing
        return size is not None

    def _closing(self, ends: bool) -> bool:
        assert self._format is not None
        if self._format.end:
            _, end, text = self._text.partition(self._format.end)
            if not end:
                return False
        else:
            text = self._text.lstrip()
            if not text:
                return False
            text = text.removeprefix("}")
        self._text, self._skips_space = text, True
        self._read = self._rest if self._style.has_one_call else self._content
        return True

    def _rest(self, ends: bool) -> bool:
        self._text = ""
        return False

    def _show_until(self, tag: str, field: str, ends: bool) -> bool:
        """Shows the text before a tag; True if the tag has come. What may be part of it, or space before it, waits."""
        before, mark, after = self._text.partition(tag)
        if mark:
            self._show(field, before.rstrip())
            self._text, self._skips_space = after, True
            return True
        part = next((n for n in range(len(tag) - 1, 0, -1) if before.endswith(tag[:n])), 0)
        shown = before if ends else before[: len(before) - part].rstrip()
        self._show(field, shown)
        self._text = before[len(shown) :]
        return False

    def _show(self, field: str, text: str) -> None:
        text = text.lstrip() if self._skips_space else text
        if text:
            self._skips_space = False
            self._delta[field] = self._delta.get(field, "") + text

    def _open(self, name: str) -> None:
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._delta.setdefault("tool_calls", []).append({"index": self.calls, **call})
        self.calls += 1

    def _show_arguments(self, text: str) -> None:
        deltas, index = self._delta.setdefault("tool_calls", []), self.calls - 1
        if not deltas or deltas[-1]["index"] != index:
            deltas.append({"index": index, "function": {"arguments": ""}})
        deltas[-1]["function"]["arguments"] += text


class _ObjectEnd:
    """Finds where an object of JSON ends, in a text that comes piece by piece."""

    def __init__(self) -> None:
        self.read = 0  # characters that were read, of the text that the next call gets
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The index after the end of the object in a text that has grown; None if it goes on.

        >>> _ObjectEnd().find('{"a": "}"} and more')
        10
        """
        for x in text[self.read :]:
            self.read += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = x == "\\", x != '"'
            elif x == '"':
                self._in_string = True
            elif x in "{}":
                self._depth += 1 if x == "{" else -1
                if self._depth <= 0:
                    return self.read
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, whose keys have any order; the arguments as JSON, which has no NaN."""
    try:
        call = from_json(text)
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return (str(call.get("name")), written) if isinstance(arguments, dict) else None
