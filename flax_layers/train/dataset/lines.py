"""Lines of a `.jsonl` as documents: texts, prompts with completions, and chats; and how much each token counts."""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from flax_layers.models import Tokenizer
from flax_layers.models.checkpoint.tokenizer import TEMPLATE_ERRORS
from flax_layers.train.dataset.texts import Encoder, FolderEncoder
from flax_layers.train.errors import InputError

MARKS = ("\ufdd0", "\ufdd1")
"""Begin and end of a `{% generation %}` block while it is looked for: characters that Unicode keeps out of texts."""

Answer = tuple[int, int, float]
"""A part of a text: its begin, its end, and the weight of its tokens."""


class Document(NamedTuple):
    """Tokens that attend to one another alone, and how much the prediction of each counts; None: 1."""

    tokens: Int[np.ndarray, " T"]
    weights: Float32[np.ndarray, " T"] | None = None


def ended(tokens: np.ndarray, end_token: int | None) -> np.ndarray:
    """Adds the end token to tokens that do not end with it; an empty text has none."""
    if end_token is None or not len(tokens) or tokens[-1] == end_token:
        return tokens
    return np.append(tokens, np.uint32(end_token))


@dataclasses.dataclass(frozen=True)
class Lines:
    """Reads the documents in lines. Arguments as for `read_corpus`; `end_token` ends texts and completions."""

    encoder: Encoder
    end_token: int | None
    field: str | None
    weight_field: str | None
    option: str

    def read(self, path: pathlib.Path) -> Iterator[Document]:
        """Yields the documents of a file. Raises InputError with the number of a line that is none."""
        kinds = "`messages`, with `prompt` and `completion`, or with a string `text`"
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield self._weighted(json.loads(line))
                    except TEMPLATE_ERRORS as error:
                        raise InputError(
                            f"`{self.option}` must hold an object with {kinds} in each line. Got {error} in line "
                            f"{number} of {path}. Correct it, or name another field with `--field`."
                        ) from error

    def _weighted(self, record: object) -> Document:
        if not isinstance(record, dict):
            raise ValueError(type(record).__name__)
        document = self._document(record)
        if self.weight_field is None:
            return document
        weights = np.full(len(document.tokens), _weight(record.get(self.weight_field), self.weight_field), np.float32)
        return Document(document.tokens, weights if document.weights is None else weights * document.weights)

    def _document(self, record: dict) -> Document:
        content = record.get(self.field or "messages")
        if self.field is None and content is None:
            match record:
                case {"prompt": str(prompt), "completion": str(completion)}:
                    text = prompt + completion
                    return self._encoded(text, [(len(prompt), len(text), 1)])
                case {"prompt": list(prompt), "completion": list(completion)}:
                    content = [{**x, "weight": 0} for x in prompt] + completion
                case _:
                    content = record.get("text")
        if isinstance(content, list):
            return self._chat(content, record)
        if not isinstance(content, str):
            fields = ", ".join(f"{name} ({type(value).__name__})" for name, value in record.items())
            raise ValueError(f"an object with {fields or 'nothing'}")
        text = content.encode()
        return Document(ended(self.encoder.encode(text) if text else np.zeros(0, np.uint32), self.end_token))

    def _chat(self, messages: list[dict], record: dict) -> Document:
        for message in messages:  # templates take objects for the arguments of calls; OpenAI's files hold them as text
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = json.loads(function["arguments"])
        if not all(isinstance(message.get("role"), str) for message in messages):
            raise ValueError("messages without a `role`")
        values = {**(record.get("chat_template_kwargs") or {}), "tools": record.get("tools")}
        text, answers = find_answers(self._tokenizer, messages, values)
        return self._encoded(text, answers, is_chat=True)

    def _encoded(self, text: str, answers: Sequence[Answer], *, is_chat: bool = False) -> Document:
        """Weights each token by the answer that it has a character of. The end token is one of a completion."""
        tokens, spans = self._tokenizer.encode_spans(text, special_tokens=not is_chat)
        weights, (begins, ends) = np.zeros(len(tokens), np.float32), spans.T
        for begin, end, weight in answers:
            weights[(begins < end) & (ends > begin) & (begins < ends)] = weight
        if is_chat or self.end_token is None or not len(tokens):
            return Document(tokens, weights)
        tokens = ended(tokens, self.end_token)
        return Document(tokens, np.append(weights[: len(tokens) - 1], np.float32(1)))

    @property
    def _tokenizer(self) -> Tokenizer:
        if isinstance(self.encoder, FolderEncoder):
            return self.encoder.tokenizer
        raise ValueError("answers, for which `--tokenizer` must be a folder with a tokenizer.json,")


def find_answers(
    tokenizer: Tokenizer, messages: Sequence[Mapping], values: Mapping[str, object]
) -> tuple[str, list[Answer]]:
    """Renders a chat and finds its answers, each with the token that ends its turn.

    They are the `{% generation %}` blocks of the template. Of a template without, they are what the messages up to an
    answer add to the prompt for it; so the template must render the beginning of a chat as it does by itself. Raises
    ValueError if it does not, or refuses the messages. `values` are other variables of the template.
    """
    answering = {n: message for n, message in enumerate(messages) if message["role"] == "assistant"}
    weights = {n: _weight(message.get("weight", 1), "weight") for n, message in answering.items()}
    if not weights:
        raise ValueError("messages without one of the assistant")
    name = "tool_use" if values.get("tools") and "tool_use" in tokenizer.chat_templates else "default"
    render = functools.partial(tokenizer.chat, template=name, **values)
    text = render(messages, add_generation_prompt=False, generation_marks=MARKS)
    if MARKS[0] in text:
        return _marked_answers(text, [*weights.values()])
    answers = []
    for n in (n for n, weight in weights.items() if weight):
        prompt, turn = render(messages[:n]), render(messages[: n + 1], add_generation_prompt=False)
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise ValueError(
                f"message {n}, whose answer the chat template renders in another way if messages follow it, or after "
                "the prompt for it. Mark answers with {% generation %} in the template; or write a line for each "
                'answer, as its last message, and give the answers before it "weight": 0'
            )
        kept = turn.rstrip()  # a model writes no space after the token that ends its turn
        answers.append((len(prompt), len(kept if kept.endswith(tokenizer.added_tokens) else turn), weights[n]))
    return text, answers


def _marked_answers(marked: str, weights: Sequence[float]) -> tuple[str, list[Answer]]:
    """The text without marks, and the parts between them."""
    text, *pieces = marked.split(MARKS[0])
    if len(pieces) != len(weights) and len(set(weights)) > 1:
        raise ValueError(
            f"different weights of {len(weights)} answers, which the chat template renders as {len(pieces)} blocks of "
            "{% generation %}. Write one block for each answer, or give all the same weight"
        )
    answers = []
    for n, piece in enumerate(pieces):  # an answer may be several blocks
        answer, _, after = piece.partition(MARKS[1])
        answers.append((len(text), len(text) + len(answer), weights[n % len(weights)]))
        text += answer + after
    return text, answers


def _weight(value: object, name: str) -> float:
    if isinstance(value, int | float) and 0 <= value < math.inf:
        return value
    raise ValueError(f"{value!r} as `{name}`, where a number from 0 on is needed,")
