"""What paged caches of any content share: pages of tokens, in one layer or in several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


class PageStore:
    """Pages of tokens: `PagedCache` or `LatentCache`. Pools, batches and page tables serve both."""

    @property
    def keys(self) -> Any:
        """The keys, [P, page_size, Hkv, D] or [L, P, page_size, Hkv, D]."""
        raise NotImplementedError

    @property
    def values(self) -> Any:
        """The values, likewise; the keys, if these hold them."""
        raise NotImplementedError

    @property
    def scales(self) -> tuple[Any, Any]:
        """Those of keys and values of eight bits; None where there are none."""
        return None, None

    @property
    def rope_keys(self) -> Any:
        """Rotated columns of the keys that are held apart; None where there are none."""
        return None

    def map_tokens(self, function: Callable[[Any], Any]) -> Self:
        """The cache that a function makes of each array [*L, P, page_size, ...]."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises TypeError or ValueError unless the arrays match."""
        raise NotImplementedError

    @property
    def num_pages(self) -> int:
        """P: total pages, page 0 included."""
        return self.keys.shape[-4]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.shape[-3]

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.keys.shape[-2]

    @property
    def layers(self) -> int | None:
        """L, or None for a cache without an axis of layers."""
        return self.keys.shape[0] if self.keys.ndim == 5 else None
