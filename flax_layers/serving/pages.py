"""The pages of sequences: allocated from a pool, shared through a prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from flax_layers.serving.options import EngineOptions
from flax_layers.serving.sequence import Sequence
from jflex.paged import OutOfPages, PagePool, PrefixCache


class Pages:
    """Gives pages to sequences and takes them back.

    Keys and values that a step has been dispatched to write count as written: steps run in the order of dispatch. So a
    prefix is shared as soon as its chunk is scheduled, even with a chunk of the same step, for each layer writes the
    keys of all chunks before any of them attends.

    If all layers of the model have windows, pages of a sequence that no later token attends to are dropped. Those of
    its shared prefix stay until it ends.

    Args:
        options: Sizes of the cache, and whether prefixes are shared.
        window: How many keys a token attends to at most, its own included; None: all before it.
    """

    def __init__(self, options: EngineOptions, window: int | None = None):
        self._pool = PagePool(options.num_pages, options.page_size)
        self._cache = PrefixCache(self._pool)
        self._shares = options.prefix_cache
        self._window = window

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return self._pool.num_free

    @property
    def cached(self) -> int:
        """Pages of the prefix cache."""
        return self._cache.num_cached

    @property
    def used(self) -> int:
        """Pages that belong to sequences."""
        return self._pool.num_pages - 1 - self.free - self.cached

    def begin(self, sequence: Sequence, spare: int) -> bool:
        """Gives a sequence pages for all its tokens, the first ones from the prefix cache.

        Args:
            sequence: One without pages.
            spare: Pages that must remain available.

        Returns:
            Whether there were enough; if not, nothing has changed.
        """
        tokens = sequence.tokens if self._shares else []
        prefix = self._cache.match(tokens, namespace=sequence.request.namespace)
        missing = self._pool.pages_for(sequence.length) - len(prefix.pages)
        if missing + spare > self._pool.num_free + self._cache.num_evictable:
            self._cache.unlock(prefix)
            return False
        sequence.prefix = prefix
        sequence.pages = [*prefix.pages, *self._cache.alloc(missing)]
        sequence.computed = prefix.num_tokens
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Whether a running sequence has a page for its next token; allocates it if it is missing."""
        self._drop_unseen(sequence)
        if sequence.length <= len(sequence.pages) * self._pool.page_size:
            return True
        try:
            sequence.pages += self._cache.alloc(1)
        except OutOfPages:
            return False
        return True

    def extend_for_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Gives a running sequence pages for drafts after its last token, as far as any are available.

        Args:
            sequence: One whose last token has a page.
            drafts: How many there are.

        Returns:
            How many of them have a page.
        """
        missing = self._pool.pages_for(sequence.computed + drafts) - len(sequence.pages)
        sequence.pages += self._cache.alloc(max(0, min(missing, self._pool.num_free + self._cache.num_evictable)))
        return min(drafts, len(sequence.pages) * self._pool.page_size - sequence.computed)

    def trim(self, sequence: Sequence) -> None:
        """Takes the pages of a running sequence after that of its last token: only rejected drafts are on them."""
        needed = self._pool.pages_for(sequence.length)
        self._pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def skip_cached(self, sequence: Sequence) -> None:
        """Leaves out what another sequence has computed since this one began."""
        if not self._shares:
            return
        assert sequence.prefix is not None
        prefix = self._cache.match(sequence.tokens, namespace=sequence.request.namespace)
        if prefix.num_tokens <= sequence.computed:
            self._cache.unlock(prefix)
            return
        own = sequence.pages[len(sequence.prefix.pages) : len(prefix.pages)]
        self._cache.unlock(sequence.prefix)
        self._pool.release(own)
        sequence.prefix = prefix
        sequence.pages[: len(prefix.pages)] = prefix.pages
        sequence.computed = prefix.num_tokens

    def share(self, sequence: Sequence) -> None:
        """Puts the full pages of a sequence into the prefix cache."""
        assert sequence.prefix is not None
        known = min(sequence.computed, len(sequence.tokens))
        first = len(sequence.prefix.pages)
        if not self._shares or known // self._pool.page_size <= first or not all(sequence.pages[first:]):
            return
        sequence.prefix = self._cache.insert(sequence.tokens[:known], sequence.pages, sequence.prefix)
        sequence.pages[: len(sequence.prefix.pages)] = sequence.prefix.pages

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Takes the pages of a sequence.

        Args:
            sequence: One that has pages.
            keep: Whether its full pages stay in the prefix cache.
        """
        if keep:
            self.share(sequence)
        assert sequence.prefix is not None
        self._cache.unlock(sequence.prefix)
        self._pool.release(sequence.own_pages)
        sequence.prefix, sequence.pages = None, []

    def _drop_unseen(self, sequence: Sequence) -> None:
        if self._window is None or sequence.prefix is None:
            return
        first = len(sequence.prefix.pages)
        end = max(0, sequence.computed - self._window + 1) // self._pool.page_size
        unseen = [page for page in sequence.pages[first:end] if page]
        self._pool.release(unseen)
        sequence.pages[first:end] = [0] * max(0, end - first)

    def clear(self) -> None:
        """Forgets all prefixes; no sequence may have pages."""
        self._cache.reset()

    def free_mask(self) -> Int32[np.ndarray, " P"]:
        """1 for each page that nobody uses, else 0."""
        owners = self._pool.owner_counts(np.arange(1, self._pool.num_pages))
        return np.concatenate([np.zeros(1, np.int32), (owners == 0).astype(np.int32)])

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises unless every page is free, cached or used by one of the running sequences."""
        self._cache.check([sequence.own_pages for sequence in running])
