"""Answers of both endpoints, whole and in chunks, as OpenAI's API words them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from flax_layers.models.text_stream import TextStream
from flax_layers.serving.generation import Usage
from flax_layers.serving.requests import finite
from flax_layers.serving.text import Piece, TokenText, TokenTexts


class ServedTokenizer(Protocol):
    """What the server needs of a tokenizer: `flax_layers.models.Tokenizer` has it."""

    chat_templates: dict[str, str]

    def serialized(self) -> str:
        """The text of its `tokenizer.json`, which constraints need."""
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> Any:
        """An array of tokens."""
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

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of a chat."""
        ...


class Answer:
    """The answer to one request of `/v1/completions`.

    Args:
        model: Its name.
        token_texts: Show single tokens of log probabilities.
        include_usage: Whether chunks have usage.
    """

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    source = "prompt"  # the parameter that the tokens come from

    def __init__(self, model: str, token_texts: TokenTexts, *, include_usage: bool):
        self._texts, self._include_usage, self._model = token_texts, include_usage, model
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The object of an answer that is not streamed.

        Args:
            pieces: The text of each choice.
            usage: Token counts of all choices.

        Returns:
            It, for JSON.
        """
        choices = [self._choice(index, piece, whole=True) for index, piece in enumerate(pieces)]
        return self._object(self.whole_kind, choices, usage=_usage(usage))

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice; None for none."""
        return None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk.

        Args:
            index: Index of the choice.
            piece: What is new.

        Returns:
            It, for JSON.
        """
        return self._chunk(self._choice(index, piece, whole=False))

    def closing(self, usage: Usage) -> dict[str, Any] | None:
        """The final chunk with the usage, if `stream_options.include_usage` is set."""
        return self._object(self.chunk_kind, [], usage=_usage(usage)) if self._include_usage else None

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._object(self.chunk_kind, [choice], **({"usage": None} if self._include_usage else {}))

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    def _choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.text(x.token) for x in tokens],
            "token_logprobs": [finite(x.logprobs.logprob) for x in tokens],
            "top_logprobs": [self._top(x) for x in tokens],
            "text_offset": [x.offset for x in tokens],
        }

    def _top(self, token: TokenText) -> dict[str, float]:
        keys = self._texts.keys([one for one, _ in token.logprobs.top])
        return {key: finite(logprob) for key, (_, logprob) in zip(keys, token.logprobs.top, strict=True)}


class ChatAnswer(Answer):
    """The answer to one request of `/v1/chat/completions`."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    source = "messages"

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice: the role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:
        if whole:
            said = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        else:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        content = [
            {
                **self._entry(x.token, x.logprobs.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in x.logprobs.top],
            }
            for x in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": finite(logprob), "bytes": list(self._texts.raw(token))}


def server_sent(value: dict[str, Any] | str) -> bytes:
    r"""A server-sent event.

    Args:
        value: For JSON; a text is sent as it is.

    Returns:
        Its bytes.

    Example:
        >>> server_sent({"a": 1}), server_sent("[DONE]")
        (b'data: {"a":1}\n\n', b'data: [DONE]\n\n')
    """
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {value}\n\n".encode()


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
