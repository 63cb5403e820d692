"""Answers of both endpoints, whole and in chunks, as OpenAI's API words them."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from flax_layers.models.text_stream import TextStream
from flax_layers.serving.api.choices import Usage
from flax_layers.serving.api.messages import MessageParser, MessageStyle
from flax_layers.serving.api.text import Piece, TokenText, TokenTexts
from flax_layers.serving.api.transport import Json
from flax_layers.serving.device.step import TokenLogprobs
from flax_layers.serving.engine.constraints import SerializedTokenizer

Lists = dict[str, list[Any]]
"""Log probabilities as lists, by the names that the API gives them."""


class ServedTokenizer(SerializedTokenizer, Protocol):
    """The part of a tokenizer that the server needs: `flax_layers.models.Tokenizer` has it."""

    chat_templates: dict[str, str]
    special_tokens: dict[str, str]

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " T"]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of tokens."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token by itself."""
        ...

    def text_stream(self) -> TextStream:
        """The text of tokens as they come."""
        ...

    def chat(self, messages: Sequence[Json], **values: Any) -> str:
        """The text of a chat; `values` are variables of its template, and `template` is the name of that."""
        ...


@dataclasses.dataclass
class _Choice:
    """A choice of an answer that is not streamed."""

    text: list[str] = dataclasses.field(default_factory=list)
    logprobs: Lists = dataclasses.field(default_factory=dict)
    finish_reason: str | None = None
    prompt: tuple[TokenText, ...] = ()


class AnswerOptions(NamedTuple):
    """The model that answers, and which parts an answer has."""

    model: str
    choices: int = 1
    include_usage: bool = False  # a stream ends with its usage
    echoes: bool = False  # log probabilities begin with the prompt's
    lists_prompt: bool = False  # there are `prompt_logprobs`
    style: MessageStyle = MessageStyle()


class Answer:
    """The answer to one request of `/v1/completions`."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, token_texts: TokenTexts, options: AnswerOptions):
        self._texts, self._options = token_texts, options
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._choices = [_Choice() for _ in range(options.choices)]
        self._parsers = [MessageParser(options.style) for _ in self._choices]
        usage = {"usage": None} if options.include_usage else {}
        self._before, _, self._after = server_sent(self._object(self.chunk_kind, [0], **usage)).rpartition(b"0")

    def take(self, index: int, piece: Piece) -> None:
        """Adds text and tokens to a choice of an answer that is not streamed."""
        choice = self._choices[index]
        choice.text.append(piece.text)
        choice.finish_reason, choice.prompt = piece.finish_reason, piece.prompt or choice.prompt
        for name, values in self._logprobs(self._shown(piece)).items():
            choice.logprobs.setdefault(name, []).extend(values)

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """The JSON of an answer that is not streamed, in parts, since many choices take seconds."""
        yield _json(self._object(self.whole_kind, []))[:-2]  # without the end of the list and of the object
        for index, x in enumerate(self._choices):
            choice = self._choice(index, "".join(x.text), x.logprobs, x.finish_reason, whole=True)
            more = {"prompt_logprobs": self._prompt_logprobs(x.prompt)} if self._options.lists_prompt else {}
            yield b"," * (index > 0) + _json({**choice, **more})
        yield b'],"usage":' + _json(_usage(usage)) + b"}"

    def opening(self, index: int) -> bytes:
        """The first event of a choice; empty for none."""
        return b""

    def chunk(self, index: int, piece: Piece) -> bytes:
        """An event with new text and tokens of a choice."""
        logprobs = self._logprobs(self._shown(piece))
        return self._chunk(self._choice(index, piece.text, logprobs, piece.finish_reason, whole=False))

    def closing(self, usage: Usage) -> bytes:
        """The final event with the usage, if `stream_options.include_usage` is set; else empty."""
        last = self._object(self.chunk_kind, [], usage=_usage(usage))
        return server_sent(last) if self._options.include_usage else b""

    def _chunk(self, choice: Json) -> bytes:
        return self._before + _json(choice) + self._after

    def _object(self, kind: str, choices: list[Any], **more: object) -> Json:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._options.model}
        return {**head, "choices": choices, **more}

    def _choice(self, index: int, text: str, logprobs: Lists, reason: str | None, *, whole: bool) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs or None, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenText]) -> Lists:
        """Lists of log probabilities by name; none without tokens."""
        if not tokens:
            return {}
        return {
            "tokens": [self._texts.text(x.token) for x in tokens],
            "token_logprobs": [x.logprobs and _finite(x.logprobs.logprob) for x in tokens],
            "top_logprobs": [x.logprobs and self._top(x.logprobs) for x in tokens],
            "text_offset": [x.offset for x in tokens],
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        keys = self._texts.keys([one for one, _ in logprobs.top])
        return {key: _finite(logprob) for key, (_, logprob) in zip(keys, logprobs.top, strict=True)}

    def _shown(self, piece: Piece) -> Sequence[TokenText]:
        """Tokens whose log probabilities are shown."""
        return (*piece.prompt, *piece.tokens) if self._options.echoes else piece.tokens

    def _prompt_logprobs(self, tokens: Sequence[TokenText]) -> list[Json | None]:
        """Log probabilities at each token of the prompt, by tokens as strings, as in vLLM's API."""
        entry = lambda token, logprob, rank: {
            "logprob": _finite(logprob), "rank": rank, "decoded_token": self._texts.text(token)
        }  # fmt: skip
        shown: list[Json | None] = []
        for x in tokens:
            top = () if x.logprobs is None else x.logprobs.top
            best = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(top, 1)}
            shown.append(x.logprobs and {str(x.token): entry(x.token, x.logprobs.logprob, None), **best})
        return shown


class ChatAnswer(Answer):
    """The answer to one request of `/v1/chat/completions`."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        """The first event of a choice: the role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, index: int, text: str, logprobs: Lists, reason: str | None, *, whole: bool) -> Json:
        parser = self._parsers[index]
        delta = parser.push(text, ends=reason is not None)
        if whole:
            calls = [{name: x for name, x in call.items() if name != "index"} for call in delta.pop("tool_calls", ())]
            more = {"tool_calls": calls} if calls else {}
            content = None if delta or calls else ""
            delta = {"role": "assistant", "content": content, "refusal": None, **delta, **more}
        shown = {**logprobs, "refusal": None} if logprobs else None
        reason = "tool_calls" if reason == "stop" and parser.calls else reason
        return {"index": index, "message" if whole else "delta": delta, "logprobs": shown, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenText]) -> Lists:
        if not tokens:
            return {}
        entries = [
            {
                **self._entry(x.token, x.logprobs.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in x.logprobs.top],
            }
            for x in tokens
            if x.logprobs is not None
        ]
        return {"content": entries}

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self._texts.text(token), "logprob": _finite(logprob), "bytes": list(self._texts.raw(token))}


def server_sent(value: Json | str) -> bytes:
    r"""A server-sent event with a JSON value, or with a text as it is.

    Example:
        >>> server_sent({"a": 1}), server_sent("[DONE]")
        (b'data: {"a":1}\n\n', b'data: [DONE]\n\n')
    """
    return b"data: " + (value.encode() if isinstance(value, str) else _json(value)) + b"\n\n"


def _finite(logprob: float) -> float:
    """A log probability for JSON, which has no infinity: at least -9999.

    >>> _finite(float("-inf")), _finite(-0.5)
    (-9999.0, -0.5)
    """
    return max(logprob, -9999.0) if not math.isnan(logprob) else -9999.0


def _json(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
