"""Text of a request from its events: whole characters, cut where a stop string begins; and texts of single tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from flax_layers.models.text_stream import TextStream
from flax_layers.serving.engine.requests import Event, TokenLogprobs


class StopStrings:
    """Cuts a text that comes piece by piece where a stop string begins; if it `keeps` that, where it ends.

    The stop string that is complete first ends the text, however the text is cut into pieces. The end of a piece that
    may begin a stop string is held back until more is known.

    Example:
        >>> stops = StopStrings(["END"])
        >>> [stops.push(piece) for piece in ("abcE", "Nd", "efEN", "D and more")]
        ['abc', 'ENd', 'ef', '']
        >>> stops.has_ended
        True
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False):
        self._stops, self._keeps = tuple(stops), keeps
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self.has_ended = False

    def push(self, piece: str) -> str:
        """Takes the next piece, and returns the text that can be shown; none after a stop string."""
        if self.has_ended or not self._stops:
            return "" if self.has_ended else piece
        text = self._tail + piece
        starts = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if starts:
            self.has_ended, self._tail = True, ""
            return text[: min(starts)[0 if self._keeps else 1]]
        may_begin = lambda n: any(stop.startswith(text[n:]) for stop in self._stops)
        first = next(filter(may_begin, range(max(0, len(text) - self._longest + 1), len(text))), len(text))
        self._tail = text[first:]
        return text[:first]

    def finish(self) -> str:
        """Ends the text, and returns its withheld end."""
        tail, self._tail = self._tail, ""
        return tail


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A token with its log probabilities; its text begins `offset` characters after the beginning of the output."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt


class Piece(NamedTuple):
    """New text of an event."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()  # whose text has begun to be shown; only if log probabilities were asked for
    finish_reason: Literal["stop", "length"] | None = None  # None while the text goes on
    prompt: tuple[TokenText, ...] = ()  # tokens of the prompt, only in the first piece, and as for `tokens`

    def then(self, other: Piece) -> Piece:
        """One piece of both."""
        text, tokens, reason, prompt = other
        return Piece(self.text + text, self.tokens + tokens, reason, self.prompt + prompt)


class ChoiceText:
    r"""The text of one choice, from its events.

    Args:
        stream: Decodes the tokens as they come.
        stops: Stop strings, which end the text.
        keeps_stops: Whether the text ends with its stop string.
        min_tokens: Number of tokens in whose text stop strings are not looked for.
        echo: Text before that of the tokens.
        prompt: Tokens of the prompt with their offsets, if their log probabilities come with the first event.
        is_hidden: Whether generated tokens are left out.

    Example:
        >>> text = ChoiceText(TextStream(lambda tokens: bytes(tokens).decode()), ["\n"])
        >>> text.push(Event(tuple(b"ab"))).text, text.push(Event(tuple(b"c\nd")))
        ('ab', Piece(text='c', tokens=(), finish_reason='stop', prompt=()))
    """

    def __init__(
        self,
        stream: TextStream,
        stops: Sequence[str] = (),
        *,
        keeps_stops: bool = False,
        min_tokens: int = 0,
        echo: str = "",
        prompt: Sequence[tuple[int, int]] = (),
        is_hidden: bool = False,
    ):
        self._stream, self._stops, self._min_tokens = stream, StopStrings(stops, keeps=keeps_stops), min_tokens
        self._echo, self._prompt, self._is_hidden = echo, prompt, is_hidden
        self._waiting: list[TokenText] = []
        self._decoded = self._shown = 0
        self.is_done = False  # whether the text has ended
        self.num_tokens = 0  # tokens that were taken until then

    def push(self, event: Event) -> Piece:
        """Takes the next event, neither `cancelled` nor `error`. A stop string is the end of the text, too."""
        if self.is_done:
            return Piece()
        pieces, scores = [self._echo], event.prompt_logprobs
        prompt = tuple(TokenText(*pair, x) for pair, x in zip(self._prompt, scores, strict=False)) if scores else ()
        self._decoded += len(self._echo)
        self._echo = ""
        for number, token in enumerate(() if self._is_hidden else event.tokens):
            self.num_tokens += 1
            if event.logprobs:
                self._waiting.append(TokenText(token, self._decoded, event.logprobs[number]))
            pieces.append(self._add(self._stream.push([token])))
            if self._stops.has_ended:
                break
        reason = event.finish_reason
        assert reason not in ("cancelled", "error")
        if reason is not None and not self._stops.has_ended:
            pieces += [self._add(self._stream.finish()), self._stops.finish()]
        if self._stops.has_ended:
            reason = "stop"
        reason = "length" if reason and self._is_hidden else reason
        self.is_done = reason is not None
        text = "".join(pieces)
        self._shown += len(text)
        return Piece(text, self._release(), reason, prompt)

    def _add(self, text: str) -> str:
        self._decoded += len(text)
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)

    def _release(self) -> tuple[TokenText, ...]:
        """The tokens whose text has begun to be shown; at the end all that a stop string does not cut off."""
        ended = self.is_done and not self._stops.has_ended
        ready = [*itertools.takewhile(lambda token: ended or token.offset < self._shown, self._waiting)]
        del self._waiting[: len(ready)]
        return tuple(ready)


class TokenTexts:
    r"""Shows single tokens: as text, or as `bytes:\xNN` if they are parts of characters, as in OpenAI's API.

    Example:
        >>> texts = TokenTexts(lambda token: bytes([token]))
        >>> texts.text(97), texts.text(0xE2), texts.raw(0xE2)
        ('a', 'bytes:\\xe2', b'\xe2')
    """

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self.raw = functools.lru_cache(1 << 17)(token_bytes)
        self.text = functools.lru_cache(1 << 17)(self._text)

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """The keys of tokens in one object: their texts; of a second token with the same text `token_id:N`."""
        keys: dict[str, int] = {}
        for token in tokens:
            text = self.text(token)
            keys[f"token_id:{token}" if text in keys else text] = token
        return list(keys)

    def _text(self, token: int) -> str:
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
