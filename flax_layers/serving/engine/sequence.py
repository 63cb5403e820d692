"""A request in progress: its tokens, its pages, and how many positions are computed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int32

from flax_layers.serving.device.step import TokenLogprobs, read_row
from flax_layers.serving.engine.constraints import Guide
from flax_layers.serving.engine.drafts import Draft, PromptLookup
from flax_layers.serving.engine.exclusions import Exclusions
from flax_layers.serving.engine.requests import Deliver, FinishReason, Request
from jflex.paged import PrefixHit

PageCopy = tuple[int, int]
"""A page to read, and one to write."""


@dataclasses.dataclass(eq=False)
class Sequence:
    """The state of a request on the host.

    The host runs ahead of the device by one step, so a token that was sampled may not be known yet: it is pending, and
    the next step takes it from the device.
    """

    request: Request
    limit: int  # tokens to generate at most
    deliver: Deliver
    # its parameters, packed for each step by `packing.pack_request`
    words: Int32[np.ndarray, " words"] = dataclasses.field(repr=False)
    number: int = 0  # counts sequences in the order of arrival, which is the order of service
    tokens: list[int] = dataclasses.field(default_factory=list)  # the known tokens, prompt first
    pending: int = 0  # tokens that were sampled and have not been read
    computed: int = 0  # positions whose keys and values are in the cache, or will be when the dispatched steps have run
    prefix: PrefixHit | None = None  # its cached prefix, locked while it runs
    # pages of its positions, in order: of the prefix, then private ones; 0 for dropped pages
    pages: list[int] = dataclasses.field(default_factory=list)
    dropped: int = 0  # with `streaming`, tokens behind the sinks whose pages are not in `pages` any more
    slot: int | None = None  # its index in the state on the device; None while it waits
    is_edited: bool = False  # whether the device knows its penalties, in this slot
    # tokens that it need not compute when it is admitted first: they are in the prefix cache, or another sample of the
    # prompt computes them; None before
    hit: int | None = None
    lookup: PromptLookup | None = None  # drafts its next tokens; None: it is not speculated
    finish_reason: FinishReason | None = None  # None until it ends
    # follows its constraint; None without one. It has taken the known tokens after the prompt
    guide: Guide | None = None
    exclusions: Exclusions | None = None  # tokens that may not come next; None: there are none
    # the samples of its prompt that were submitted together, itself included; empty if it is the only one
    samples: list[Sequence] = dataclasses.field(default_factory=list, repr=False)
    copies: tuple[PageCopy, ...] = ()  # pages to copy for its next chunk: source and destination
    fault: Exception | None = None  # an error on the host, which ends it when its next token is read
    # log probabilities of the first tokens of the prompt, None for the very first; empty once they are delivered
    scores: list[TokenLogprobs | None] = dataclasses.field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.scores = [] if self.request.prompt_logprobs is None else [None]
        self._stops = frozenset(self.request.stop_tokens)

    def append(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Makes a pending token known, and the tokens after accepted drafts, whose keys are in the cache.

        Returns the tokens to deliver, and why the sequence ends; tokens after its end are dropped.
        """
        self.pending -= 1
        self.computed += len(tokens) - 1
        for number, token in enumerate(tokens):
            self.tokens.append(token)
            if token in self._stops:
                return tokens[:number], "stop"
            if self.guide is not None:
                self.guide.advance(token)
                if self.guide.is_complete:
                    return tokens[: number + 1], "stop"
            if len(self.tokens) - len(self.request.prompt) == self.limit:
                return tokens[: number + 1], "length"
        return tokens, None

    def score(self, first: int, rows: Int32[np.ndarray, "N fields"], drafts: int) -> None:
        """Takes the log probabilities after the tokens of a chunk, but for known ones; `drafts` as for `read_row`."""
        prompt, top = len(self.request.prompt), self.request.prompt_logprobs or 0
        for position, row in enumerate(rows, first + 1):
            if position == len(self.scores) < prompt:
                self.scores.append(read_row(row, top, drafts)[1])

    def take_scores(self) -> tuple[TokenLogprobs | None, ...]:
        """The log probabilities of the prompt, once."""
        scores, self.scores = tuple(self.scores), []
        return scores

    def draft(self, most: int) -> Draft:
        """Drafts at most `most` of its next tokens."""
        assert self.lookup is not None
        with self.alone():
            return self.lookup.draft(self.tokens, most)
        return Draft()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps an error on the host as the `fault` of this sequence, so that the step goes on."""
        try:
            yield
        except Exception as error:  # any error of a constraint or a look-up
            self.fault = error

    @property
    def length(self) -> int:
        """Tokens, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def missing(self) -> int:
        """Tokens that a step must compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        """Tokens that were sampled, pending ones included."""
        return self.length - len(self.request.prompt)

    @property
    def private_pages(self) -> list[int]:
        """The pages that belong to the sequence, not to the prefix cache."""
        return [page for page in self.pages[0 if self.prefix is None else len(self.prefix.pages) :] if page]

    @property
    def is_done(self) -> bool:
        """True if nothing remains to dispatch: it has ended, or ends when its pending tokens are read."""
        return self.finish_reason is not None or self.generated >= self.limit

    @property
    def runs_ahead(self) -> bool:
        """True if its next step can be dispatched before the last one is read: it depends on no token but by value."""
        needs_tokens = self.exclusions is not None and self.exclusions.needs_tokens
        return self.guide is None and self.lookup is None and not needs_tokens

    @property
    def is_limited(self) -> bool:
        """True if not every token may be sampled in the planned step, which has counted it as pending."""
        return self.guide is not None or (self.exclusions is not None and self.exclusions.is_active(self.generated - 1))

    def allowed(self, vocabulary: int) -> Int32[np.ndarray, " words"]:
        """Bits of the tokens that may be sampled in the planned step."""
        allowed = None if self.guide is None else self.guide.allowed
        if self.exclusions is None:
            assert allowed is not None
            return allowed
        known = self.tokens[len(self.request.prompt) :]
        return self.exclusions.keep_allowed(allowed, known, self.generated - 1, vocabulary)

    @property
    def top_logprobs(self) -> int:
        """Number of top tokens with log probabilities; -1: no log probabilities, not even of the sampled token."""
        return -1 if self.request.logprobs is None else self.request.logprobs


class Ticket:
    """A submitted request, which it cancels."""

    def __init__(self, sequence: Sequence, cancel: Callable[[Sequence], None]):
        self._sequence, self._cancel = sequence, cancel

    def cancel(self) -> None:
        """Ends the request before the next step, from any thread; does nothing if it has ended."""
        self._cancel(self._sequence)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._sequence.request.prompt)

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache, or that another sample of it computed."""
        return self._sequence.hit or 0
