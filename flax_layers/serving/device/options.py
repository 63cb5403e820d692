"""Sizes of the engine, and the shapes that it compiles."""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

from flax_layers.attention.streaming import Streaming
from flax_layers.models import ModelConfig
from flax_layers.models.cache_dtype import check_cache_name

MAX_DRAFTS = 31
"""Drafts of one request in a step: with the last known token they are the 32 nodes of a tree."""

_SMALL_TABLE = 64
"""Pages of a request up to which all steps share one width of the table: 64 rows of it are 16 KB to transfer."""

_FARTHEST = 1 << 24
"""Tokens of a text at most: a request with penalties sends a number for each to the device."""

_EXCLUSIVE = {
    ("draft_tokens", "streaming"): "0 with `streaming`, which does not verify trees of drafts",
    ("draft_tokens", "batch_invariant"): "0 with `batch_invariant`: other requests decide how many drafts there is "
    "room for, and so how sums are ordered",
    ("streaming", "batch_invariant"): "None with `batch_invariant`: chunks of a prompt, whose sizes depend on other "
    "requests, decide where its splits begin",
}
"""Pairs of options that exclude each other, and what the first one must be, and why."""


class Shape(NamedTuple):
    """The shape of a step: packed tokens and rows of requests, with padding, and the width of the page table.

    A request has `drafts` drafted tokens at most; 0 for a program that verifies none.
    """

    tokens: int
    rows: int
    pages: int
    drafts: int = 0


class Program(NamedTuple):
    """A compiled step."""

    shape: Shape  # the shape of the step
    # all rows take the most probable token, without penalties, constraints and log probabilities: it neither draws nor
    # sorts
    is_greedy: bool = False
    is_cascade: bool = False  # the first rows share a prefix, which is read once, and each row has one token
    is_scoring: bool = False  # it computes the log probabilities of tokens of prompts, too


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine.

    Attributes:
        max_requests: Requests that run at once; others wait.
        max_step_tokens: Tokens of a step. Decoding requests get theirs first, one each; the others are for chunks
            of prompts. A larger budget shortens the time to the first token and lengthens decoding steps.
        num_pages: Pages of the cache, page 0 included, which holds no tokens.
        page_size: Tokens in a page, 1 to 256. Prefixes are shared in whole pages.
        cache_dtype: Dtype of keys and values in the cache: ``int8``, ``float8_e4m3fn`` or ``float8_e5m2``, with a scale
            for each token and head; of latent vectors ``float8_e4m3fn``. None: the dtype of the model. Eight bits take
            about half the memory of bfloat16 and round keys and values; the documentation says how much.
        context: Positions of a sequence, prompt included; None: the positions of the model.
        max_waiting: Requests that may wait, beside those that can start at once; more are refused.
        streaming: Sequences attend to sinks and a window alone, and keep no other pages. `context` may then be longer
            than the positions of the model and the cache. None: they attend to all their tokens.
        prefix_cache: Whether pages of prompts and outputs are kept for requests that begin alike.
        cascade_bytes: Requests that share a prefix read it once for all, if that saves so many bytes of a layer in a
            step; see `flax_layers.serving.engine.cascades`. None: never.
        draft_tokens: Tokens of a request that are drafted and verified in a step at most, 0 to 31; 0: no speculation.
            Drafts are earlier continuations of the last tokens of the request. They make steps fewer and larger:
            worth it for text that repeats its prompt, if a step takes as long for a few more tokens.
        draft_match: Tokens that must match for that.
        batch_invariant: A request gets the same bits, whatever else is in the batch, from a model whose
            `attention_config` has `batch_invariant`; the guide says how far that goes. There is one shape, with
            `max_step_tokens` tokens: a step of one token takes as long. There is one program, and no cascade.
        poison: Overwrites free pages with NaN before each step, so that a read of one shows in the output; for tests.

    Raises:
        ValueError: A size is out of range, or `cache_dtype` is another dtype.

    Example:
        >>> EngineOptions(max_requests=16, max_step_tokens=512, num_pages=1000).rows
        (1, 4, 16)
    """

    max_requests: int = 64
    max_step_tokens: int = 2048
    num_pages: int = 1024
    page_size: int = 64
    cache_dtype: str | None = None
    context: int | None = None
    max_waiting: int = 1024
    streaming: Streaming | None = None
    prefix_cache: bool = True
    cascade_bytes: int | None = 100_000_000
    draft_tokens: int = 0
    draft_match: int = 2
    batch_invariant: bool = False
    poison: bool = False

    def __post_init__(self) -> None:
        sizes = {"max_requests": 1, "max_step_tokens": 1, "num_pages": 2, "max_waiting": 0, "draft_match": 1}
        for name, least in sizes.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}. Got {getattr(self, name)}.")
        if self.cascade_bytes is not None and self.cascade_bytes < 1:
            raise ValueError(
                f"`cascade_bytes` must be at least 1. Got {self.cascade_bytes}. Pass None to read prefixes for each "
                "request."
            )
        if not 0 <= self.draft_tokens <= MAX_DRAFTS:
            raise ValueError(
                f"`draft_tokens` must be from 0 to {MAX_DRAFTS}. Got {self.draft_tokens}. Use 0 for no speculation."
            )
        for (name, other), rule in _EXCLUSIVE.items():
            if getattr(self, name) and getattr(self, other):
                got = getattr(self, name)
                raise ValueError(f"`{name}` must be {rule}. Got {got}. Leave one of them out.")
        check_cache_name(self.cache_dtype)
        if not 1 <= self.page_size <= 256:
            raise ValueError(f"`page_size` must be from 1 to 256. Got {self.page_size}. 16 to 64 suit most models.")
        if self.max_step_tokens < self.max_requests:
            raise ValueError(
                f"`max_step_tokens` must be at least `max_requests`, so that every request gets a token in each step. "
                f"Got {self.max_step_tokens} and {self.max_requests}."
            )

    @property
    def rows(self) -> tuple[int, ...]:
        """Buckets of decoding requests: powers of 4."""
        return _ladder(1, self.max_requests)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Buckets of tokens in a step that holds a chunk of a prompt: powers of 2, since padding takes time."""
        least = self.max_step_tokens if self.batch_invariant else min(128, self.max_step_tokens)
        return _ladder(least, self.max_step_tokens, 2)

    def context_of(self, config: ModelConfig) -> int:
        """Positions of a sequence: `context`, or the positions of the model.

        Raises:
            ValueError: `context` is out of range, or there is `streaming` for a model with latent attention.
        """
        context = config.max_positions if self.context is None else self.context
        if self.streaming is None:
            if not 2 <= context <= config.max_positions:
                raise ValueError(
                    f"`context` must be from 2 to the {config.max_positions} positions that the model was made for. "
                    f"Got {context}. `streaming` allows more."
                )
            return context
        if config.latent is not None:
            raise ValueError(
                "`streaming` must be None for a model with latent attention, whose cache holds keys that are rotated "
                f"already. Got {self.streaming}. Leave it out."
            )
        if self.streaming.size > config.max_positions:
            raise ValueError(
                f"`sinks` and `window` of `streaming` together must be at most the {config.max_positions} positions "
                f"that the model was made for. Got {self.streaming.sinks} and {self.streaming.window}. Lower `window`."
            )
        if not 2 <= context <= _FARTHEST:
            raise ValueError(
                f"`context` must be from 2 to {_FARTHEST} with `streaming`, the tokens that penalties count at most. "
                f"Got {context}."
            )
        return context

    def least_pages(self, config: ModelConfig) -> int:
        """Pages that a request needs to go on to the end of the context, if no prefix is shared."""
        return self._request_pages(config, 1)

    def most_pages(self, config: ModelConfig) -> int:
        """Pages that a request holds at most."""
        return self._request_pages(config, self.max_step_tokens)

    def _request_pages(self, config: ModelConfig, chunk: int) -> int:
        """Pages of the context; with `streaming` at most the sinks, or a shared prefix, and the windows of a chunk."""
        pages = lambda tokens: -(-tokens // self.page_size)
        context = pages(self.context_of(config))
        if self.streaming is None:
            return context
        shared = self.streaming.size // self.page_size if chunk > 1 else 0
        windows = pages(self.streaming.window + chunk - 2) + 1  # at any offset
        return min(context, max(pages(self.streaming.sinks), shared) + windows)

    def pages(self, config: ModelConfig) -> tuple[int, ...]:
        """Buckets of the pages of a request: all of the context, and a quarter of it if that makes tables much smaller.

        The width of a page table decides between the two sets of factors of LongRoPE. All steps must rotate keys alike,
        so such a model has one bucket, and `context` decides.
        """
        most = min(self.most_pages(config), self.num_pages - 1)
        has_one = most <= _SMALL_TABLE or len(config.context_limits) > 1 or self.batch_invariant
        return (most,) if has_one else (-(-most // 4), most)

    def shapes(self, config: ModelConfig) -> tuple[Shape, ...]:
        """All shapes that a step can have: `shape_for` returns no other."""
        widths = self.pages(config)
        mixed = [Shape(tokens, self.max_requests, pages) for tokens in self.tokens for pages in widths]
        if self.batch_invariant:
            return tuple(mixed)
        decoding = [Shape(rows, rows, pages) for rows in self.rows for pages in widths]
        drafted = []
        if self.draft_tokens:
            drafted = [Shape(self._drafted(rows), rows, pages, self.draft_tokens) for rows, _, pages, _ in decoding]
            drafted += [shape._replace(drafts=self.draft_tokens) for shape in mixed]
        return tuple(dict.fromkeys(decoding + mixed + drafted))

    def scoring_shapes(self, config: ModelConfig) -> tuple[Shape, ...]:
        """The shapes of steps that compute log probabilities of prompts; with `batch_invariant`, there are none."""
        if self.batch_invariant:
            return ()
        widths = self.pages(config)
        return tuple(Shape(n, self.max_requests, pages, self.draft_tokens) for n in self.tokens for pages in widths)

    def shape_for(
        self, tokens: int, rows: int, pages: int, config: ModelConfig, *, drafts: bool = False, forks: bool = False
    ) -> Shape:
        """The least shape that holds a step with so many tokens and requests, none with more `pages`.

        `drafts` tells that some of the tokens are drafted, `forks` that some of the requests have no token.
        """
        width, bucket = _least(self.pages(config), pages), _least(self.rows, rows)
        if drafts and tokens <= self._drafted(bucket):
            return Shape(self._drafted(bucket), bucket, width, self.draft_tokens)
        if tokens == rows and not forks and not self.batch_invariant:
            return Shape(bucket, bucket, width)
        return Shape(_least(self.tokens, tokens), self.max_requests, width, self.draft_tokens if drafts else 0)

    def _drafted(self, rows: int) -> int:
        """Tokens of so many requests with drafts."""
        return min(rows * (1 + self.draft_tokens), self.max_step_tokens)


def _ladder(first: int, last: int, factor: int = 4) -> tuple[int, ...]:
    """From the first to the last, each `factor` times the one before.

    >>> _ladder(1, 24)
    (1, 4, 16, 24)
    """
    steps = [first]
    while steps[-1] * factor < last:
        steps.append(steps[-1] * factor)
    return (*steps, *([last] if last > steps[-1] else []))


def _least(buckets: tuple[int, ...], size: int) -> int:
    return buckets[bisect.bisect_left(buckets, size)]
