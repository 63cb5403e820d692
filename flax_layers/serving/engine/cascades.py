"""Cascades: requests of a step that share a prefix read its keys once for all of them, if that pays."""

from __future__ import annotations

import collections
from collections.abc import Sequence as Items

from flax_layers.nnx import SharedPrefix
from flax_layers.serving.device.options import EngineOptions, Shape
from flax_layers.serving.engine.scheduler import Chunk
from jflex.paged import PrefixHit

NO_PREFIX = SharedPrefix(0, 0)
"""The shared prefix of a step whose requests share none."""


class Cascades:
    """Chooses the shared prefix of a step, if a cascade pays.

    A cascade reads the prefix once instead of once for each request, and then merges two outputs. It saves
    `(requests - 1) * tokens * token_bytes` bytes of a layer, and is used if that is at least `cascade_bytes`. The
    reason is a measurement (H200, `benchmarks/results/h200/cascade.json`, 64 requests, 8 KV heads of 128): of 8192
    shared keys, 2.1 GB, it saves 219 us; of 1024, 264 MB, 17 us. That is 9.6 TB/s, since other requests find the pages
    in the L2 cache, less 10 us. So it begins to pay at 100 MB.

    Args:
        token_bytes: Bytes of a token's keys and values in one layer, on one device.
    """

    def __init__(self, options: EngineOptions, token_bytes: int):
        self._page_size, self._token_bytes = options.page_size, token_bytes
        self._least = options.cascade_bytes
        self._prefixes: list[PrefixHit | None] = []
        self._shared: tuple[int, int] | None = None

    def pays(self, requests: int, tokens: int) -> bool:
        """True if a cascade saves enough for a prefix of so many tokens, shared by so many requests."""
        return self._least is not None and (requests - 1) * tokens * self._token_bytes >= self._least

    def shapes(self, shapes: Items[Shape]) -> list[Shape]:
        """The shapes for which it may pay: of steps in which each request has one token."""
        width = lambda shape: shape.pages * self._page_size
        decoding = [shape for shape in shapes if shape.tokens == shape.rows and not shape.drafts]
        return [shape for shape in decoding if self.pays(shape.rows, width(shape))]

    def arrange(self, chunks: list[Chunk]) -> tuple[list[Chunk], SharedPrefix]:
        """Puts the requests that share a prefix first, if a cascade pays; each chunk must have one token."""
        prefixes = [chunk.sequence.prefix for chunk in chunks]
        if list(map(id, prefixes)) != list(map(id, self._prefixes)):  # a PrefixHit does not change
            self._prefixes, self._shared = prefixes, self._find(prefixes)
        if self._shared is None:
            return chunks, NO_PREFIX
        page, depth = self._shared
        shares = [len(x.pages) >= depth and x.pages[depth - 1] == page for x in prefixes if x is not None]
        ordered = sorted(zip(chunks, shares, strict=True), key=lambda pair: not pair[1])
        return [chunk for chunk, _ in ordered], SharedPrefix(sum(shares), depth * self._page_size)

    def _find(self, prefixes: Items[PrefixHit | None]) -> tuple[int, int] | None:
        """The page where the best shared prefix ends, and its pages; requests with that page share all before it."""
        counts: collections.Counter[int] = collections.Counter()
        depths: dict[int, int] = {}
        for prefix in prefixes:
            if prefix is not None:
                counts.update(prefix.pages)
                depths.update(zip(prefix.pages, range(1, len(prefix.pages) + 1), strict=True))
        page = max(counts, key=lambda page: (counts[page] - 1) * depths[page], default=None)
        if page is None or not self.pays(counts[page], depths[page] * self._page_size):
            return None
        return page, depths[page]
