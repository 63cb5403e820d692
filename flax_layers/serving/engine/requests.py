"""Requests to the engine, the events and errors that answer them, and counts of the engine."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

from flax_layers.sampling import Sampling, checked_integer
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.device.step import MAX_LOGPROBS, TokenLogprobs
from flax_layers.serving.engine.constraints import Constraint

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: a stop token was sampled, or the text of a constraint is complete. `length`: `max_tokens` or the context
length was reached. `cancelled`: by the client or by shutdown. `error`: the step of the request failed, or no token can
follow its constraint."""

MAX_STOP_TOKENS = 1024
"""Stop tokens of a request, at most."""

MAX_BAD_WORDS = 1024
"""Bad words of a request, at most."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: Its tokens, at least one.
        max_tokens: Maximum number of generated tokens; None: as many as the context and the cache hold.
        sampling: Temperature, truncation and seed.
        penalties: Changes of the logits before sampling.
        stop_tokens: Tokens that end the sequence, which are not part of the output. At most 1024.
        logprobs: Number of top tokens with log probabilities, beside the sampled ones; None: no log probabilities.
        namespace: Requests share cached prefixes only within a namespace: a tenant, an adapter, a salt.
        constraint: Language of the generated text; None for any text. The engine needs `guides` for it.
        prompt_logprobs: Number of top tokens with log probabilities at each token of the prompt, beside that token;
            None: no log probabilities. The whole prompt is computed, whatever the prefix cache holds.
        min_tokens: Number of tokens before which no stop token is sampled, as far as the constraint goes on.
        bad_words: Tokens of words that are not sampled, unless the constraint allows nothing else.

    Raises:
        TypeError: A field has a wrong type.
        ValueError: A field is out of range.

    Example:
        >>> Request((1, 2, 3), max_tokens=8).prompt
        (1, 2, 3)
        >>> Request(())
        Traceback (most recent call last):
        ValueError: `prompt` must hold at least one token. Got none. Begin it with the token that begins a text.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    penalties: Penalties = Penalties()  # noqa: RUF009  frozen
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    namespace: Hashable = None
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "stop_tokens"):
            tokens = tuple(getattr(self, name))
            if not all(type(x) is int for x in tokens):
                tokens = tuple(checked_integer(f"{name}[{n}]", x) for n, x in enumerate(tokens))
            object.__setattr__(self, name, tokens)
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f"`stop_tokens` must be at most {MAX_STOP_TOKENS} tokens. Got {len(self.stop_tokens)}. Leave some out."
            )
        if not self.prompt:
            raise ValueError(
                "`prompt` must hold at least one token. Got none. Begin it with the token that begins a text."
            )
        if self.max_tokens is not None and checked_integer("max_tokens", self.max_tokens) < 1:
            raise ValueError(
                f"`max_tokens` must be at least 1. Got {self.max_tokens}. Leave it out to use the whole context."
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= checked_integer(name, count) <= MAX_LOGPROBS:
                raise ValueError(
                    f"`{name}` must be from 0 to {MAX_LOGPROBS}. Got {count}. Ask for fewer, or leave it out."
                )
        most = math.inf if self.max_tokens is None else self.max_tokens
        if not 0 <= checked_integer("min_tokens", self.min_tokens) <= most:
            raise ValueError(f"`min_tokens` must be from 0 to `max_tokens`, {most}. Got {self.min_tokens}. Lower it.")
        if len(self.bad_words) > MAX_BAD_WORDS or not all(self.bad_words):
            raise ValueError(
                f"`bad_words` must be at most {MAX_BAD_WORDS} words, none empty. Got {len(self.bad_words)}. Leave some "
                "out."
            )

    @functools.cached_property
    def is_greedy(self) -> bool:
        """True if only the most probable tokens are needed: no draws, no log probabilities, no other logits."""
        return self.sampling.temperature == 0 and self.may_be_speculated and self.prompt_logprobs is None

    @property
    def may_be_speculated(self) -> bool:
        """True if its tokens may be drafted: no token changes the logits after it, and no log probabilities return."""
        is_free = self.constraint is None and not self.min_tokens and not self.bad_words
        return is_free and not self.penalties and self.logprobs is None


class Event(NamedTuple):
    """The result of a step for one request.

    Attributes:
        tokens: New tokens, without the one that stopped the sequence.
        logprobs: One for each of them, if the request asked for them.
        finish_reason: None while the sequence goes on. No event follows one that has a reason.
        error: Why the request failed, for `error` and for `cancelled` by a shutdown.
        prompt_logprobs: One for each token of the prompt, None for the first, in the first event of a request that
            asked for them.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


Deliver = Callable[[Event], None]
"""Takes the events of a request. The engine's thread calls it, so it must return at once. An error of it ends
the request."""


def token_limit(request: Request, context: int, cache_tokens: int, vocabulary: int) -> int:
    """The number of tokens that a request may generate: `max_tokens`, or all that fit if it is None.

    `context` is the positions of a sequence, `cache_tokens` the tokens that all pages together hold. Raises ValueError
    if the prompt or `max_tokens` does not fit, or a token is not in the vocabulary.
    """
    prompt, room = len(request.prompt), min(context, cache_tokens)
    least, most = min(request.prompt), max(request.prompt)
    if not 0 <= least <= most < vocabulary:
        raise ValueError(
            f"`prompt` must hold tokens from 0 to {vocabulary - 1}, the last one of the model. It holds {least} to "
            f"{most}. Use the model's own tokenizer."
        )
    changed = {"logit_bias": (x for x, _ in request.penalties.logit_bias), "bad_words": set().union(*request.bad_words)}
    for name, tokens in changed.items():
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"`{name}` must be of tokens from 0 to {vocabulary - 1}. Got {token}.")
    limit = "the context length" if context <= cache_tokens else "what the pages of the cache hold"
    if prompt >= room:
        raise ValueError(
            f"`prompt` must be shorter than {room} tokens, {limit}, so that a token can follow. Got {prompt}. Shorten "
            "it."
        )
    if request.max_tokens is None:
        return room - prompt
    if prompt + request.max_tokens > room:
        raise ValueError(
            f"`prompt` and `max_tokens` together must be at most {room} tokens, {limit}. Got {prompt} and "
            f"{request.max_tokens}. Shorten the prompt, or lower `max_tokens` to {room - prompt}."
        )
    return request.max_tokens


class QueueFull(RuntimeError):
    """The queue is full: `max_waiting` requests wait that cannot start. Try again later."""


class Closed(RuntimeError):
    """The engine takes no more requests: it is shutting down."""


COUNTED = ("generated_tokens", "drafted_tokens", "accepted_tokens", "steps", "cascade_steps", "failures")
"""Counts of the engine itself."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """The engine at one moment; counts are since it started.

    Attributes:
        running: Requests that have pages.
        waiting: Requests that have none yet.
        free_pages: Pages that no request and no prefix uses.
        cached_pages: Pages that the prefix cache holds.
        used_pages: Pages of running requests alone.
        prompt_tokens: Tokens of admitted prompts.
        hit_tokens: Tokens of prompts from the prefix cache, or that another sample of the prompt computed.
        generated_tokens: Sampled tokens that were delivered.
        drafted_tokens: Drafted tokens that were verified.
        accepted_tokens: Drafted tokens that were accepted.
        steps: Steps that were dispatched.
        cascade_steps: Steps in which requests read their shared prefix once for all.
        preemptions: Number of times that a request lost its pages and was computed again.
    """

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    used_pages: int
    prompt_tokens: int
    hit_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    steps: int
    cascade_steps: int
    preemptions: int
    failures: int
