"""Checks of the sizes that a cache and its pool must agree on, and of lists of pages and tokens."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jflex.block_mask.lengths import checked_size

MAX_PAGE_SIZE = 256
_SLOT_LIMIT = 2**31


def checked_pages(num_pages: SupportsIndex, page_size: SupportsIndex) -> tuple[int, int]:
    """Number and size of pages as Python ints.

    Raises:
      TypeError: One of them is not an integer.
      ValueError: There is no page, a page holds fewer than 1 or more than 256 tokens, or slots would not fit in int32.

    >>> checked_pages(1024, 16)
    (1024, 16)
    """
    num_pages, page_size = checked_positive(num_pages, "num_pages"), checked_page_size(page_size)
    if num_pages * page_size >= _SLOT_LIMIT:
        raise ValueError(
            f"`num_pages` times `page_size` must be below 2**31, since slots are int32. Got {num_pages} * {page_size} "
            f"= {num_pages * page_size}. Take at most {(_SLOT_LIMIT - 1) // page_size} pages of this size."
        )
    return num_pages, page_size


def checked_page_size(page_size: SupportsIndex) -> int:
    """Tokens in a page as a Python int.

    Raises:
      TypeError: It is not an integer.
      ValueError: It is not within 1 and 256.

    >>> checked_page_size(16)
    16
    """
    page_size = checked_positive(page_size, "page_size")
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"`page_size` must be 1 to {MAX_PAGE_SIZE} tokens. Got {page_size}. Take smaller pages.")
    return page_size


def checked_positive(size: SupportsIndex, name: str) -> int:
    """A size of at least 1 as a Python int.

    Raises:
      TypeError: It is not an integer.
      ValueError: It is not positive.

    >>> checked_positive(8, "num_kv_heads")
    8
    """
    number = checked_size(size, name)
    if number == 0:
        raise ValueError(f"`{name}` must be at least 1. Got 0.")
    return number


def checked_integers(values: npt.ArrayLike, name: str) -> np.ndarray:
    """Integers as an array; none are an array of int64.

    Raises:
      TypeError: They are not integers.

    >>> checked_integers([3, 1], "ids"), checked_integers([], "ids").dtype
    (array([3, 1]), dtype('int64'))
    """
    array = np.asarray(values)
    if not array.size:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"`{name}` must hold integers. Got {array.dtype}.")
    return array
