"""Checks requests before they wait, and makes sequences of them."""

from __future__ import annotations

from flax_layers.models import ModelConfig
from flax_layers.serving.device.options import EngineOptions
from flax_layers.serving.engine.constraints import Guide, Guides
from flax_layers.serving.engine.drafts import PromptLookup
from flax_layers.serving.engine.exclusions import Exclusions
from flax_layers.serving.engine.packing import pack_request
from flax_layers.serving.engine.requests import Deliver, Request, token_limit
from flax_layers.serving.engine.sequence import Sequence


class Admission:
    """Makes sequences for an engine, whose longest sequence has `longest` tokens in the cache."""

    def __init__(self, options: EngineOptions, config: ModelConfig, longest: int, guides: Guides | None):
        self._options, self._config, self._longest, self._guides = options, config, longest, guides

    def sequence(self, request: Request, deliver: Deliver) -> Sequence:
        """The sequence of a request. Raises ValueError if it can never run, or its constraint does not compile."""
        limit = token_limit(request, self._options.context_of(self._config), self._longest, self._config.vocabulary)
        if request.prompt_logprobs is not None and self._options.batch_invariant:
            raise ValueError(
                "`prompt_logprobs` is not supported by this engine, which has one program, for `batch_invariant`. Got "
                f"{request.prompt_logprobs}. Leave it out, as `echo` with `logprobs`."
            )
        is_speculated = self._options.draft_tokens > 0 and request.may_be_speculated
        return Sequence(
            request,
            limit,
            deliver,
            pack_request(request),
            lookup=PromptLookup(request.prompt, self._options.draft_match) if is_speculated else None,
            guide=self._guide(request),
            exclusions=Exclusions(request) if request.min_tokens or request.bad_words else None,
        )

    def _guide(self, request: Request) -> Guide | None:
        if request.constraint is None:
            return None
        if self._guides is None:
            raise ValueError(
                "`constraint` is not supported by this engine: it was made without `guides`. Leave it out, or make the "
                "engine with `guides=Guides(tokenizer, vocabulary)`."
            )
        return self._guides.begin(request.constraint, request.stop_tokens)
