"""The pages of sequences: allocated from a pool, shared through a prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items

import numpy as np
from jaxtyping import Int32

from flax_layers.models import ModelConfig
from flax_layers.serving.device.options import EngineOptions
from flax_layers.serving.engine.sequence import Sequence
from jflex.paged import OutOfPages, PagePool, PrefixCache, PrefixHit


class Pages:
    """Allocates and releases the pages of sequences.

    Keys and values that a step has been dispatched to write count as written: steps run in the order of dispatch. So a
    prefix is shared as soon as its chunk is scheduled, even with a chunk of the same step, for each layer writes the
    keys of all chunks before any of them attends.

    If all layers of the model have windows, pages of a sequence that no later token attends to are dropped. Pages
    of its shared prefix stay until it ends.

    The samples of a prompt compute it once. They share its full pages through the prefix cache. The last page, if it is
    partly filled, is copied, because each of them goes on in it.

    With `streaming`, all pages between the sinks and the window are dropped, and a prompt gets its pages chunk by
    chunk. A prefix that is shared is at most as long as sinks and window, and is given up when the window has left it.

    Args:
        window: Keys that a token attends to at most, itself included; None: all before it.

    Attributes:
        longest: Tokens of the longest sequence that can end.

    Raises:
        ValueError: The pages do not hold the sinks and the window of one sequence.
    """

    def __init__(self, options: EngineOptions, config: ModelConfig, window: int | None = None):
        self._pool = PagePool(options.num_pages, options.page_size)
        self._cache = PrefixCache(self._pool)
        self._shares = options.prefix_cache
        self._streaming = options.streaming
        self._window, self._sink_pages, self._shared = window, 0, None
        usable, least = options.num_pages - 1, options.least_pages(config)
        self._least = least
        self.longest = usable * options.page_size
        if self._streaming is None:
            return
        if usable < least:
            raise ValueError(
                f"`num_pages` must be at least {least + 1}: page 0, and the pages of {self._streaming.sinks} sinks and "
                f"a window of {self._streaming.window} tokens. Got {options.num_pages}. Raise it, or lower the window."
            )
        self.longest = options.context_of(config)
        self._window, self._sink_pages = self._streaming.window, self._pool.pages_for(self._streaming.sinks)
        shared = min(self._streaming.size, self.longest) // options.page_size
        if usable < self._pool.pages_for(self.longest):  # then the window must fit beside a prefix that is still read
            shared = min(shared, usable - self._pool.pages_for(self._window - 1) - 1)
        self._shared = shared * options.page_size

    @property
    def free(self) -> int:
        """Free pages."""
        return self._pool.num_free

    @property
    def cached(self) -> int:
        """Pages of the prefix cache."""
        return self._cache.num_cached

    @property
    def used(self) -> int:
        """Pages that belong to sequences."""
        return self._pool.num_pages - 1 - self.free - self.cached

    def begin(self, sequence: Sequence, samples: Items[Sequence], spare: int) -> bool:
        """Allocates pages for all tokens of a sequence without pages, the first from the prefix cache.

        If there is another sample of its prompt, in `samples`, and all pages before the last one are cached, the last
        one is copied. Only the last token is computed then. With `streaming`, not more than sinks and window need:
        `room` allocates the others.

        Returns False, and changes nothing, if that leaves less than `spare` pages.
        """
        prefix = self._match(sequence)
        missing = self._pool.pages_for(sequence.length)
        missing = (missing if self._streaming is None else min(missing, self._least)) - len(prefix.pages)
        if missing + spare > self._pool.num_free + self._cache.num_evictable:
            self._cache.unlock(prefix)
            return False
        sequence.prefix = prefix
        sequence.pages = [*prefix.pages, *self._cache.alloc(missing)]
        sequence.computed = prefix.num_tokens
        page, offset = divmod(len(sequence.request.prompt) - 1, self._pool.page_size)
        sources = [x.pages[page] for x in samples if x.pages[page]] if self._streaming is None else []
        if sources and offset and page == len(prefix.pages) and not sequence.generated:
            sequence.copies = ((sources[0], sequence.pages[page]),)
            sequence.computed += offset
        return True

    def fork(self, sequence: Sequence, first: Sequence, spare: int) -> bool:
        """Allocates the pages of a sample in the step that completes its prompt and computes the last token of `first`.

        Returns False, and changes nothing, if that leaves less than `spare` pages, or full ones are not shared.
        """
        if self._streaming is not None:
            return False
        self.share(first)
        prefix = self._match(sequence, sequence.length)
        full, offset = divmod(sequence.length, self._pool.page_size)
        missing = 1 if offset else 0
        if len(prefix.pages) < full or missing + spare > self._pool.num_free + self._cache.num_evictable:
            self._cache.unlock(prefix)
            return False
        sequence.prefix, sequence.computed = prefix, sequence.length
        sequence.pages = [*prefix.pages, *self._cache.alloc(missing)]
        sequence.copies = tuple(zip(first.pages[full : full + missing], sequence.pages[full:], strict=True))
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Allocates a page for the next token of a running sequence if it is missing; False if there is none."""
        self._drop_unseen(sequence)
        if sequence.length - sequence.dropped <= len(sequence.pages) * self._pool.page_size:
            return True
        try:
            sequence.pages += self._cache.alloc(1)
        except OutOfPages:
            return False
        return True

    def room(self, sequence: Sequence, count: int, spare: int) -> int:
        """Allocates the pages of a chunk of a prompt, as far as `begin` has not.

        Returns the number of its tokens, `count` at most, that have pages. `spare` pages remain available.
        """
        if self._streaming is None:
            return count
        self._drop_unseen(sequence)
        begun = sequence.computed - sequence.dropped
        missing = self._pool.pages_for(begun + count) - len(sequence.pages)
        available = self._pool.num_free + self._cache.num_evictable - spare
        sequence.pages += self._cache.alloc(max(0, min(missing, available)))
        return min(count, len(sequence.pages) * self._pool.page_size - begun)

    def extend_for_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Allocates available pages for drafts after the last token of a sequence; returns the drafts that have one."""
        missing = self._pool.pages_for(sequence.computed + drafts) - len(sequence.pages)
        sequence.pages += self._cache.alloc(max(0, min(missing, self._pool.num_free + self._cache.num_evictable)))
        return min(drafts, len(sequence.pages) * self._pool.page_size - sequence.computed)

    def trim(self, sequence: Sequence) -> None:
        """Releases the pages of a running sequence behind its last token: only rejected drafts are on them."""
        needed = self._pool.pages_for(sequence.length)
        self._pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def skip_cached(self, sequence: Sequence) -> None:
        """Skips tokens that another sequence has computed since this one began."""
        if not self._shares or sequence.dropped:
            return
        assert sequence.prefix is not None
        prefix = self._match(sequence)
        if prefix.num_tokens <= sequence.computed:
            self._cache.unlock(prefix)
            return
        duplicates = sequence.pages[len(sequence.prefix.pages) : len(prefix.pages)]
        self._cache.unlock(sequence.prefix)
        self._pool.release(duplicates)
        sequence.prefix = prefix
        sequence.pages[: len(prefix.pages)] = prefix.pages
        sequence.computed = prefix.num_tokens

    def share(self, sequence: Sequence) -> None:
        """Puts the full pages of a sequence into the prefix cache."""
        assert sequence.prefix is not None
        known = min(sequence.computed, len(sequence.tokens))
        known = known if self._shared is None else min(known, self._shared)
        first, end = len(sequence.prefix.pages), known // self._pool.page_size
        if not self._shares or sequence.dropped or end <= first or not all(sequence.pages[first:end]):
            return
        sequence.prefix = self._cache.insert(sequence.tokens[:known], sequence.pages[:end], sequence.prefix)
        sequence.pages[: len(sequence.prefix.pages)] = sequence.prefix.pages

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Releases the pages of a sequence; with `keep`, its full pages stay in the prefix cache."""
        if keep:
            self.share(sequence)
        assert sequence.prefix is not None
        self._cache.unlock(sequence.prefix)
        self._pool.release(sequence.private_pages)
        sequence.prefix, sequence.pages, sequence.dropped, sequence.copies = None, [], 0, ()

    def _match(self, sequence: Sequence, limit: int | None = None) -> PrefixHit:
        """The cached prefix of a sequence, as far as it may be shared; locked. By default without its last token."""
        # All tokens are computed whose log probabilities are asked for.
        tokens = sequence.tokens if self._shares and sequence.request.prompt_logprobs is None else []
        if self._shared is not None:
            limit = min(self._shared, max(0, len(tokens) - 1))
        return self._cache.match(tokens[:limit], namespace=sequence.request.namespace, limit=limit)

    def _drop_unseen(self, sequence: Sequence) -> None:
        if self._window is None or sequence.prefix is None:
            return
        end = max(0, sequence.computed - sequence.dropped - self._window + 1) // self._pool.page_size
        if self._streaming is not None:
            self._drop_streamed(sequence, end)
            return
        first = len(sequence.prefix.pages)
        unseen = [page for page in sequence.pages[first:end] if page]
        self._pool.release(unseen)
        sequence.pages[first:end] = [0] * max(0, end - first)

    def _drop_streamed(self, sequence: Sequence, end: int) -> None:
        """Takes the pages between the sinks and the page `end` out of the list of a sequence.

        A shared prefix is given up when the window has left it, but for the sinks. It stays in the cache until it is
        evicted.
        """
        prefix, sinks = sequence.prefix, self._sink_pages
        assert prefix is not None
        if len(prefix.pages) > sinks:
            if end < len(prefix.pages):
                return
            limit = sinks * self._pool.page_size
            namespace = sequence.request.namespace
            sequence.prefix = self._cache.match(sequence.tokens[:limit], namespace=namespace, limit=limit)
            self._cache.unlock(prefix)
        if end > sinks:
            self._pool.release(sequence.pages[max(sinks, len(prefix.pages)) : end])
            del sequence.pages[sinks:end]
            sequence.dropped += (end - sinks) * self._pool.page_size

    def clear(self, namespaces: Iterable[Hashable] | None = None) -> None:
        """Forgets the prefixes of namespaces without running sequences, by default of all."""
        if namespaces is None:
            self._cache.reset()
            return
        for namespace in namespaces:
            self._cache.clear(namespace)

    def free_mask(self) -> Int32[np.ndarray, " P"]:
        """1 for each free page, else 0."""
        owners = self._pool.owner_counts(np.arange(1, self._pool.num_pages))
        return np.concatenate([np.zeros(1, np.int32), (owners == 0).astype(np.int32)])

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises unless every page is free, cached or used by one of the running sequences."""
        self._cache.check([sequence.private_pages for sequence in running])
