"""Bodies of requests but chats, checked. Nothing that changes the answer is ignored in silence."""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

from flax_layers.models.checkpoint.optional import needs
from flax_layers.sampling import Sampling
from flax_layers.serving.api.foreign import check_foreign
from flax_layers.serving.api.transport import ApiError
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.engine.constraints import Constraint
from flax_layers.serving.engine.requests import MAX_BAD_WORDS, MAX_STOP_TOKENS, Request

with needs("pydantic", "serve"):
    from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

Unchecked = Any
"""A value of a JSON body, before its type is checked."""

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters of requests that leave them out, unless the model has others; as in OpenAI's API."""

MAX_PROMPTS, MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH, MAX_SALT = 1 << 16, 128, 16, 256, 256


def _stops(value: Unchecked) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(x, str) and 0 < len(x) <= MAX_STOP_LENGTH for x in stops):
        raise ValueError(
            f"`stop` must be a text of 1 to {MAX_STOP_LENGTH} characters, or a list of such texts. Got "
            f"{reprlib.repr(value)}. Leave it out for none."
        )
    if len(stops) > MAX_STOPS:
        raise ValueError(f"`stop` must hold at most {MAX_STOPS} texts. Got {len(stops)}. Leave some out.")
    return stops


def _biases(value: Unchecked) -> tuple[tuple[int, float], ...]:
    """Parses `logit_bias`: a JSON object, whose keys are tokens as strings."""
    biases = {} if value is None else value
    is_bias = lambda token, bias: re.fullmatch("[0-9]{1,10}", token) is not None and type(bias) in (int, float)
    if isinstance(biases, dict) and all(is_bias(*pair) for pair in biases.items()):
        return tuple((int(token), bias) for token, bias in biases.items())
    raise ValueError(
        f'`logit_bias` must be an object of tokens and numbers, as {{"50256": -100}}. Got {reprlib.repr(value)}.'
    )


def _constraint(value: Unchecked) -> Constraint | None:
    """Parses `response_format`: the types of OpenAI's chats, and the types `regex` and `lark`."""
    try:
        match value:
            case None:
                return None
            case {"type": "text"} if len(value) == 1:
                return None
            case {"type": "json_object"} if len(value) == 1:
                return Constraint.json_object()
            case {"type": "json_schema", "json_schema": {"schema": bool() | dict() as schema}}:
                return Constraint.json_schema(schema)
            case {"type": "regex", "pattern": str(pattern)}:
                return Constraint.regex(pattern)
            case {"type": "lark", "grammar": str(grammar)}:
                return Constraint.lark(grammar)
    except ValueError as error:
        raise ValueError(re.sub("^`(schema|constraint)`", "`response_format`", str(error))) from None
    raise ValueError(
        '`response_format` must be {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": '
        '{"name": "...", "schema": {...}}}, {"type": "regex", "pattern": "..."} or {"type": "lark", "grammar": "..."}. '
        f"Got {reprlib.repr(value)}."
    )


def _prompts(value: Unchecked) -> list[str | list[int]]:
    are_tokens = lambda x: isinstance(x, list) and bool(x) and all(type(token) is int for token in x)
    if isinstance(value, str) or are_tokens(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS:
        raise ValueError(f"`prompt` must be at most {MAX_PROMPTS} texts. Got {len(value)}. Send several requests.")
    if isinstance(value, list) and value and (all(isinstance(x, str) for x in value) or all(map(are_tokens, value))):
        return value
    raise ValueError(
        "`prompt` must be a text, a list of texts, a list of tokens, or a list of lists of tokens; no list may be "
        f"empty. Got {reprlib.repr(value)}."
    )


class Fields(BaseModel):
    """Fields of a JSON object. Null means the default. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    prefix: ClassVar[str] = ""

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        check_foreign(self.model_extra, self.prefix)
        return self


class Body(Fields):
    """The base of all bodies."""

    model: str | None = None


class StreamOptions(Fields):
    """Options of a streamed answer."""

    prefix: ClassVar[str] = "stream_options."

    include_usage: bool | None = None


class GenerationBody(Body):
    """Fields that both endpoints share."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS // 2)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_biases)] = ()
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT)
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] | None = Field(
        None, max_length=MAX_BAD_WORDS // 2
    )
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    response_format: Annotated[Constraint | None, PlainValidator(_constraint)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"`n` must be from 1 to {MAX_CHOICES}. Got {self.n}.")
        if self.best_of not in (None, self.choices):
            raise ValueError(
                f"`best_of` must equal `n`: choices are not ranked. Got {self.best_of} and {self.choices}. Leave it "
                "out."
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` may be given only with `stream`. Set `stream`, or leave it out.")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(
                f"`prompt_logprobs` must be left out with `stream`. Got {self.prompt_logprobs}. Leave `stream` out, or "
                "use `echo` and `logprobs`."
            )
        return self

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Tokens of each choice at most; None: as many as fit."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Top tokens with log probabilities, beside the sampled ones; None: no log probabilities."""
        return None

    @property
    def scored(self) -> int | None:
        """Top tokens with log probabilities at each token of the prompt; None: no log probabilities."""
        return self.prompt_logprobs

    def requests(
        self, prompt: Sequence[int], stop_tokens: Sequence[int], defaults: Mapping[str, float], **fields: Unchecked
    ) -> list[Request]:
        """The engine requests of this body for a tokenized prompt: one for each choice, with different seeds.

        `stop_tokens` and `defaults` of sampling are of the model, `fields` others of the requests. Raises ValueError if
        a value is out of range.
        """
        first = secrets.randbits(32) if self.seed is None else self.seed
        temperature, top_k, top_p, min_p, repetition = (
            default if getattr(self, name) is None else getattr(self, name)
            for name, default in (DEFAULTS | dict(defaults)).items()
        )
        penalties = Penalties(self.presence_penalty or 0.0, self.frequency_penalty or 0.0, repetition, self.logit_bias)
        common = {
            "max_tokens": self.token_limit, "penalties": penalties, "logprobs": self.top,
            "stop_tokens": (*(self.stop_token_ids or ()), *(() if self.ignore_eos else stop_tokens)),
            "prompt_logprobs": self.scored, "min_tokens": self.min_tokens or 0, **fields,
        }  # fmt: skip
        tokens, top_k = tuple(prompt), 0 if top_k == -1 else int(top_k)
        seeds = ((first + choice) % (1 << 32) for choice in range(self.choices))
        return [Request(tokens, sampling=Sampling(temperature, top_k, top_p, x, min_p), **common) for x in seeds]


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def is_only_echoed(self) -> bool:
        """True if the prompt is all of the answer; a token is generated nevertheless, and not shown."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scored(self) -> int | None:
        """See `prompt_logprobs`; `logprobs` cover the prompt too if it is echoed. The larger number counts."""
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((x for x in counts if x is not None), default=None)

    @property
    def token_limit(self) -> int | None:
        """16 unless `max_tokens` says otherwise, as in OpenAI's API."""
        return 16 if self.max_tokens is None else 1 if self.is_only_echoed else self.max_tokens

    @property
    def top(self) -> int | None:
        """See `logprobs`."""
        return self.logprobs


class TokenizeBody(Body):
    """The body of `/tokenize`."""

    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    tokens: list[int]


BodyKind = TypeVar("BodyKind", bound=Body)


def parse(kind: type[BodyKind], raw: bytes) -> BodyKind:
    """Parses a body from JSON, or raises ApiError 400, whose message names the first error.

    Example:
        >>> parse(CompletionBody, b'{"prompt": "a", "suffix": "b"}')
        Traceback (most recent call last):
        flax_layers.serving.api.transport.ApiError: `suffix` is not supported by this server: it can only be ''. ...
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
    error_type, rule, location = wrong["type"], wrong["msg"], wrong["loc"]
    path = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in location).removeprefix(".")
    param = str(location[0]) if location else None
    if error_type == "value_error":
        raise ApiError(400, str(wrong["ctx"]["error"]))  # pyright: ignore[reportTypedDictNotRequiredAccess]
    if error_type == "json_invalid":
        raise ApiError(400, f"The body must be JSON in UTF-8. {rule}.")
    if not location:
        raise ApiError(400, f"The body must be a JSON object. Got {reprlib.repr(wrong['input'])}.")
    if error_type == "missing":
        raise ApiError(400, f"`{path}` is required. The body has none.", param=param)
    rule = re.sub("^(Input|List|String) should", "must", rule).partition(" after validation")[0]
    raise ApiError(400, f"`{path}` {rule}. Got {_shown(wrong['input'])}.", param=param)


def _shown(value: Unchecked) -> str:
    """A value, or the size of one that is long."""
    return f"{len(value)}" if isinstance(value, list | str) and len(value) > MAX_SALT else reprlib.repr(value)
