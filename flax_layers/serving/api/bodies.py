"""Bodies of requests, checked. Nothing that changes the answer is ignored in silence."""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Hashable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from flax_layers.models.checkpoint.optional import needs
from flax_layers.sampling import Sampling
from flax_layers.serving.api.transport import ApiError
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.device.step import MAX_LOGPROBS
from flax_layers.serving.engine.constraints import Constraint
from flax_layers.serving.engine.requests import MAX_STOP_TOKENS, Request

with needs("pydantic", "serve"):
    from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

Unchecked = Any
"""A value of a JSON body, before its type is checked."""

MAX_PROMPTS, MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH, MAX_SALT = 1 << 16, 128, 16, 256, 256


class ForeignField(NamedTuple):
    """A field that is not supported: the values that change nothing, beside null, and the remedy for others."""

    neutral: tuple[object, ...]
    remedy: str


def _fields(remedy: str, **neutral: tuple[object, ...]) -> dict[str, ForeignField]:
    return {name: ForeignField(values, remedy) for name, values in neutral.items()}


FOREIGN = {
    **_fields(
        "Constrain the text with `response_format`.",
        ebnf=(), guided_choice=(), guided_decoding_backend=(), guided_grammar=(), guided_json=(),
        guided_json_object=(False,), guided_regex=(), guided_whitespace_pattern=(), json_schema=(), regex=(),
        structural_tag=(), structured_outputs=(),
    ),
    **_fields(
        "Set `logit_bias` to -100 for tokens that must not occur.", allowed_token_ids=(), bad_words=([],)
    ),
    **_fields("Use `stop` with texts, or `stop_token_ids`.", stop_regex=([],)),
    **_fields("Append the stop string yourself.", include_stop_str_in_output=(False,), no_stop_trim=(False,)),
    **_fields("Prepend the prompt yourself.", echo=(False,)),
    **_fields("Use `max_tokens`.", max_completion_tokens=(), max_new_tokens=()),
    **_fields("`ignore_eos` gives a text `max_tokens` tokens.", min_new_tokens=(0,), min_tokens=(0,)),
    **_fields("Use `seed`.", sampling_seed=()),
    **_fields("Use `logprobs` with a number of tokens.", logprob_token_ids=(), top_logprobs=()),
    **_fields("Use `/tokenize` for the tokens of a text.", return_token_ids=(False,), return_token_offsets=(False,),
              return_token_strs=(False,), return_tokens_as_token_ids=(False,)),
    **_fields("Use `/v1/completions`, whose prompts are texts or tokens.", input_ids=(), prompt_embeds=()),
    **_fields("Shorten the prompt yourself.", truncate_prompt_tokens=()),
    **_fields("Describe tools in a message; calls of them are text.", function_call=("none", "auto"), functions=([],),
              tool_choice=("none", "auto"), tools=([],)),
    **_fields(
        "Render the chat yourself, and send it to `/v1/completions`.",
        add_generation_prompt=(True,), chat_template=(), chat_template_kwargs=({},), continue_final_message=(False,),
        documents=([],), reasoning=({},), reasoning_effort=("none",), task=(), thinking_token_budget=(-1,),
    ),
    **_fields("Send the header `x-request-id`.", request_id=(), rid=()),
    **_fields("Use `cache_salt`.", extra_key=()),
    **_fields("Serve the adapter merged into its model.", lora_path=()),
    **_fields("Set `stream_options.include_usage`, which counts once, at the end.", continuous_usage_stats=(False,)),
    **_fields(
        "Leave it out.",
        audio=(), bootstrap_host=(), bootstrap_port=(), bootstrap_room=(), custom_logit_processor=(),
        custom_params=({},), data_parallel_rank=(), disagg_prefill_dp_rank=(), ec_transfer_params=({},),
        images_config=({},), include_reasoning=(True,), kv_transfer_params=({},), length_penalty=(1,),
        logits_processors=([],), max_dynamic_patch=(), media_io_kwargs=({},), min_dynamic_patch=(),
        mm_processor_kwargs=({},), modalities=(["text"],), moderation=(), ngram_corpus_id=(), prediction=(),
        priority=(0,), prompt_logprobs=(), repetition_detection=(), return_cached_tokens_details=(False,),
        return_hidden_states=(False,), return_meta_info=(False,), return_prompt_text=(False,),
        return_prompt_token_ids=(False,), return_routed_experts=(False,), routed_dp_rank=(),
        routed_experts_prompt_start=(0,), routed_experts_start_len=(0,), separate_reasoning=(True,),
        session_params=({},), skip_special_tokens=(True,), spaces_between_special_tokens=(True,), store=(False,),
        stream_interval=(1,), stream_reasoning=(True,), suffix=("",), use_audio_in_video=(False,),
        use_beam_search=(False,), verbosity=("medium",), vllm_xargs=({},), watermarking=(False,),
        web_search_options=(),
    ),
}  # fmt: skip
"""Fields of OpenAI's, vLLM's and SGLang's APIs by name, from openai 3.57, vLLM at 002032e with names that it has
dropped, and SGLang at 004c82e. Labels of requests, as `user` and `metadata`, are not among them: they change no
answer."""


def check_foreign(fields: dict[str, object] | None, prefix: str = "") -> None:
    """Raises ValueError if one of the fields that the server does not know would change the answer.

    Example:
        >>> check_foreign({"echo": False, "nobody_defines_this": 1})
        >>> check_foreign({"min_tokens": 3})
        Traceback (most recent call last):
        ValueError: `min_tokens` is not supported by this server: it can only be 0. Got 3. `ignore_eos` gives a ...
    """
    for name, value in (fields or {}).items():
        field = FOREIGN.get(name)
        if field is None or value is None or value in field.neutral:
            continue
        only = " or ".join(map(repr, field.neutral))
        rule = f"it can only be {only}" if only else "it must be left out"
        raise ValueError(
            f"`{prefix}{name}` is not supported by this server: {rule}. Got {reprlib.repr(value)}. {field.remedy}"
        )


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

    def requests(self, prompt: Sequence[int], stop_tokens: Sequence[int], tenant: Hashable = None) -> list[Request]:
        """The engine requests of this body for a tokenized prompt: one for each choice, with different seeds.

        A tenant shares cached prefixes with no other one. Raises ValueError for a value that is out of range.
        """
        first = secrets.randbits(32) if self.seed is None else self.seed
        top_k = 0 if self.top_k in (None, -1) else self.top_k
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        penalties = Penalties(
            self.presence_penalty or 0.0,
            self.frequency_penalty or 0.0,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.logit_bias,
        )
        tokens = tuple(prompt)
        return [
            Request(
                tokens,
                max_tokens=self.token_limit,
                sampling=Sampling(temperature, top_k, top_p, (first + choice) % (1 << 32), self.min_p or 0.0),
                penalties=penalties,
                stop_tokens=(*(self.stop_token_ids or ()), *(() if self.ignore_eos else stop_tokens)),
                logprobs=self.top,
                namespace=self.cache_salt if tenant is None else (tenant, self.cache_salt),
                constraint=self.response_format,
            )
            for choice in range(self.choices)
        ]


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """16 unless `max_tokens` says otherwise, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """See `logprobs`."""
        return self.logprobs


class Message(BaseModel):
    """A message of a chat. Other fields are passed to the chat template, too."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[str, PlainValidator(_content)] = ""


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_special_tokens: bool | None = None

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


class TokenizeBody(Body):
    """The body of `/tokenize`."""

    prompt: str
    add_special_tokens: bool | None = None


BodyKind = TypeVar("BodyKind", bound=Body)


def parse(kind: type[BodyKind], raw: bytes) -> BodyKind:
    """Parses a body from JSON, or raises ApiError 400, whose message names the first error.

    Example:
        >>> parse(CompletionBody, b'{"prompt": "a", "echo": true}')
        Traceback (most recent call last):
        flax_layers.serving.api.transport.ApiError: `echo` is not supported by this server: it can only be False. ...
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
