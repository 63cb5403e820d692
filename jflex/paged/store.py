"""Pages of tokens, in one layer or in several, and the sizes that a cache and its pool must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jflex._check.arguments import checked_positive
from jflex.types import AnyArray

MAX_PAGE_SIZE = 256
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}  # of eight bits, which have scales
_SLOT_LIMIT = 2**31


def checked_pages(num_pages: SupportsIndex, page_size: SupportsIndex) -> tuple[int, int]:
    """Number and size of pages as Python ints."""
    num_pages, page_size = checked_positive(num_pages, "num_pages"), checked_page_size(page_size)
    if num_pages * page_size >= _SLOT_LIMIT:
        raise ValueError(
            f"`num_pages` times `page_size` must be below 2**31, since slots are int32. Got {num_pages} * {page_size} "
            f"= {num_pages * page_size}. Take at most {(_SLOT_LIMIT - 1) // page_size} pages of this size."
        )
    return num_pages, page_size


def checked_page_size(page_size: SupportsIndex) -> int:
    """Tokens in a page as a Python int."""
    page_size = checked_positive(page_size, "page_size")
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"`page_size` must be 1 to {MAX_PAGE_SIZE} tokens. Got {page_size}. Take smaller pages.")
    return page_size


def checked_integers(values: npt.ArrayLike, name: str) -> np.ndarray:
    """Integers as an array; none are an array of int64.

    >>> checked_integers([3, 1], "ids"), checked_integers([], "ids").dtype
    (array([3, 1]), dtype('int64'))
    """
    array = np.asarray(values)
    if not array.size:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"`{name}` must hold integers. Got {array.dtype}.")
    return array


def is_eight_bits(dtype: DTypeLike) -> bool:
    """True if keys of this dtype have scales."""
    return str(jnp.dtype(dtype)) in LARGEST


class PageStore:
    """Pages of tokens: `PagedCache` or `LatentCache`. Pools, batches and page tables serve both."""

    @property
    def keys(self) -> AnyArray:
        """The keys, [P, page_size, Hkv, D] or [L, P, page_size, Hkv, D]."""
        raise NotImplementedError

    @property
    def values(self) -> AnyArray:
        """The values, likewise; the keys, if these hold them."""
        raise NotImplementedError

    @property
    def scales(self) -> tuple[AnyArray | None, AnyArray | None]:
        """Scales of keys and values of eight bits; None where there are none."""
        return None, None

    @property
    def rope_keys(self) -> AnyArray | None:
        """Rotated columns of the keys that are held apart; None where there are none."""
        return None

    def map_tokens(self, function: Callable[[jax.Array], jax.Array]) -> Self:
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
