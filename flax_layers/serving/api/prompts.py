"""Tokenizes the texts of requests: beside the event loop, few at a time, and no text that cannot fit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flax_layers.models.checkpoint.optional import needs
from flax_layers.models.checkpoint.tokenizer import BYTE_NAMES, TEMPLATE_ERRORS
from flax_layers.models.text_stream import TextStream
from flax_layers.serving.api.answers import ServedTokenizer
from flax_layers.serving.api.transport import ApiError, Json

Result = TypeVar("Result")

LONG_BODY = 1 << 18
"""Bytes from which a body is long. A text of 4 MB takes a CPU 2 to 5 s and 0.4 GB."""

LONG_BYTES = 1 << 26
"""Bytes of all long bodies that are read or wait for it, at most; a single one may have more."""

_CONTRACTION = 4
"""Code points that NFC and NFKC make one at most: no canonical decomposition is longer."""


class Prompts:
    """Tokenizes prompts in threads: four for short bodies, and one for long ones, so that these delay no other.

    The tokenizer should not hold the GIL for long. A prompt must be shorter than `context` tokens, each below
    `vocabulary`.
    """

    def __init__(self, tokenizer: ServedTokenizer, context: int, vocabulary: int):
        self._tokenizer, self._context, self._vocabulary = tokenizer, context, vocabulary
        self._longest = longest_token(tokenizer.serialized())
        self._threads = concurrent.futures.ThreadPoolExecutor(4, "jflex-prompts")
        self._long_thread = concurrent.futures.ThreadPoolExecutor(1, "jflex-long-prompts")
        self._long_bytes = 0

    async def in_thread(self, raw: bytes, function: Callable[[bytes], Result]) -> Result:
        """Calls a function of a body in a thread. Raises ApiError 429 if too many long bodies are being read."""
        loop = asyncio.get_running_loop()
        if len(raw) < LONG_BODY:
            return await loop.run_in_executor(self._threads, function, raw)
        if self._long_bytes and self._long_bytes + len(raw) > LONG_BYTES:
            raise ApiError(
                429, f"Long bodies of {self._long_bytes} bytes are being read. Try again later, or send less at once."
            )
        self._long_bytes += len(raw)
        try:
            return await loop.run_in_executor(self._long_thread, function, raw)
        finally:
            self._long_bytes -= len(raw)

    def tokens(self, text: str | Sequence[int], param: str = "prompt", *, special_tokens: bool = True) -> Sequence[int]:
        """Tokenizes the text of a parameter, or checks its tokens.

        Raises ApiError 400 if it is certainly longer than the context, or a token is out of the vocabulary.
        """
        size, covered = len(text), self._longest if isinstance(text, str) else 1
        if covered is not None and size > (self._context - 1) * covered:
            least = f"{size} characters, at least {-(-size // covered)} tokens" if isinstance(text, str) else f"{size}"
            raise ApiError(
                400,
                f"`{param}` must be shorter than {self._context} tokens, the context length, so that a token can "
                f"follow. Got {least}. Shorten it.",
                code="context_length_exceeded",
            )
        if isinstance(text, str):
            return self._tokenizer.encode(text, special_tokens=special_tokens).tolist()
        return self._checked(text, param)

    def stream(self, tokens: Sequence[int]) -> TextStream:
        """The stream of the text after tokens, of which the last ones say whether a space begins it."""
        stream = self._tokenizer.text_stream()
        stream.push(tokens[-8:])
        stream.finish()
        return stream

    def offsets(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Tokens, each with the offset of its text in the text of all."""
        stream, offset, offsets = self._tokenizer.text_stream(), 0, []
        for token in tokens:
            offsets.append((token, offset))
            offset += len(stream.push([token]))
        return offsets

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of words, by themselves and after a space."""
        encode = lambda word: tuple(self._tokenizer.encode(word, special_tokens=False).tolist())
        spellings = (x for word in words for x in (encode(word), encode(f" {word.lstrip()}")))
        return tuple(dict.fromkeys(filter(None, spellings)))

    def text(self, tokens: Sequence[int], param: str, *, special_tokens: bool = False) -> str:
        """The text of tokens. Raises ApiError 400 for a token out of the vocabulary."""
        return self._tokenizer.decode(self._checked(tokens, param), special_tokens=special_tokens)

    def _checked(self, tokens: Sequence[int], param: str) -> Sequence[int]:
        wrong = next((x for x in tokens if not 0 <= x < self._vocabulary), None)
        if wrong is not None:
            raise ApiError(400, f"`{param}` must hold tokens from 0 to {self._vocabulary - 1}. Got {wrong}.")
        return tokens

    def template(self, *, has_tools: bool) -> tuple[str, str]:
        """Name and text of the chat template. Raises ApiError 400 without one."""
        templates = self._tokenizer.chat_templates
        if not templates:
            raise ApiError(400, "`messages` needs a chat template. The model has none. Use `/v1/completions`.")
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
        return name, templates.get(name, "")

    def chat(self, messages: Sequence[Json], **values: object) -> str:
        """Renders a chat. Raises ApiError 400 if the messages do not fit the chat template."""
        try:
            return self._tokenizer.chat(messages, **values)
        except TEMPLATE_ERRORS as error:
            raise ApiError(400, f"`messages` do not fit the chat template of the model. {error}") from error


def longest_token(serialized: str) -> int | None:
    """The most characters of a text that one token of a `tokenizer.json` covers; None if there is no bound.

    A bound exists if every part of the tokenizer is known to keep each character: then the tokens of a text cover all
    of it. Parts that drop characters or make one token of any number of them (strippers, pre-tokenizers that remove
    white space, models that fuse unknown characters, tokens that take the spaces beside them) have none.

    Example:
        >>> from flax_layers.serving.demo_model import ByteTokenizer
        >>> longest_token(ByteTokenizer().serialized())
        1
    """
    parts = json.loads(serialized)
    normalizers, pre_tokenizers = (list(_flat(parts.get(name))) for name in ("normalizer", "pre_tokenizer"))
    contractions = [_contraction(x) for x in normalizers]
    is_byte_level = any(x["type"] == "ByteLevel" for x in (*normalizers, *pre_tokenizers))
    model, added = parts["model"], parts["added_tokens"]
    vocabulary = model["vocab"] if isinstance(model["vocab"], dict) else dict(model["vocab"])
    is_bounded = (
        None not in contractions
        and all(_keeps_characters(x) for x in pre_tokenizers)
        and _covers_characters(model, vocabulary, is_byte_level)
        and not any(x["lstrip"] or x["rstrip"] for x in added)
    )
    if not is_bounded:
        return None
    texts = [x["content"] for x in added]
    texts += _normalized(serialized, texts) if normalizers else []
    longest = max(map(len, [*vocabulary, *texts]))
    for contraction in contractions:
        longest *= contraction or 1
    return longest


def _normalized(serialized: str, texts: Sequence[str]) -> list[str]:
    """The texts of added tokens as they are looked for in normalized text."""
    with needs("tokenizers"):
        import tokenizers
    normalizer = tokenizers.Tokenizer.from_str(serialized).normalizer
    return [normalizer.normalize_str(text) for text in texts]


def _flat(part: Json | None) -> Iterator[Json]:
    """The parts of a sequence, or a part by itself."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _flat(inner)
    else:
        yield part


def _contraction(normalizer: Json) -> int | None:
    """The most characters that a normalizer makes one; None: any number, or it drops some."""
    match normalizer:
        case {"type": "NFC" | "NFKC"}:
            return _CONTRACTION
        case {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)} if after:
            return -(-len(before) // len(after))
    return None


def _keeps_characters(pre_tokenizer: Json) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
    return False


def _covers_characters(model: Json, vocabulary: Json, is_byte_level: bool) -> bool:
    """True if the tokens of a model cover each character of a text."""
    has_bytes = is_byte_level and vocabulary.keys() >= BYTE_NAMES.keys()
    falls_back = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if model["type"] == "Unigram":
        return bool(falls_back)
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    return bool(has_bytes or falls_back or (model["unk_token"] is not None and not model["fuse_unk"]))
