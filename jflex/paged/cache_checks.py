"""Checks of what is written to a paged cache."""

from __future__ import annotations

import jax
import numpy as np

from jflex._check.arguments import check_int32, describe_array, known_values
from jflex.paged.eight_bits import WRITTEN
from jflex.paged.store import PageStore, is_eight_bits
from jflex.types import AnyArray


def check_tokens(cache: PageStore, k: AnyArray, v: AnyArray, slots: AnyArray) -> None:
    """Raises unless keys and values of tokens fit a cache, and as many slots."""
    for name, x, pages in (("k", k, cache.keys), ("v", v, cache.values)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
        if is_eight_bits(pages.dtype):
            if str(x.dtype) not in WRITTEN:
                raise TypeError(
                    f"`{name}` must be one of {', '.join(WRITTEN)}: the cache holds {pages.dtype} with scales, and "
                    f"`write` rounds to it. Got {describe_array(x)}. Pass what is not yet quantised."
                )
        elif x.dtype != pages.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of the cache, {pages.dtype}. Got {describe_array(x)}. Cast it with "
                "`.astype`."
            )
        if x.ndim != 3 or x.shape[1:] != pages.shape[-2:]:
            raise ValueError(
                f"`{name}` must be [N, Hkv, {'D' if name == 'k' else 'Dv'}], with the heads of the cache: "
                f"[N, {pages.shape[-2]}, {pages.shape[-1]}]. Got {describe_array(x)}. Reshape batch and tokens to one "
                "axis."
            )
    check_int32("slots", slots, "slots")
    if not k.shape[:1] == v.shape[:1] == slots.shape:
        raise ValueError(
            "`k`, `v` and `slots` must be of the same tokens: [N, ...], [N, ...] and [N]. Got k: "
            f"{describe_array(k)}, v: {describe_array(v)}, slots: {describe_array(slots)}. Give padding the slot -1."
        )


def check_slots_differ(slots: AnyArray, num_pages: int, page_size: int, name: str) -> None:
    """Raises ValueError if known slots repeat: such a slot would hold either token."""
    known = known_values(slots)
    if known is None:
        return
    used, counts = np.unique(known, return_counts=True)
    twice = used[(counts > 1) & (used >= page_size) & (used < num_pages * page_size)]
    if twice.size:
        raise ValueError(
            f"`{name}` must not give a slot twice. Got slot {twice[0]} (page {twice[0] // page_size}) for "
            f"{counts[used == twice[0]][0]} tokens. Give all but one of them the slot -1."
        )


def check_copies(src: AnyArray, dst: AnyArray, num_pages: int) -> None:
    """Raises ValueError if known pages are read outside of the cache, or written twice."""
    sources, targets = known_values(src), known_values(dst)
    if sources is None or targets is None:
        return
    inside = (targets >= 0) & (targets < num_pages)
    wrong = sources[inside & ((sources < 0) | (sources >= num_pages))]
    if wrong.size:
        raise ValueError(f"`src` must hold pages within 0 and {num_pages - 1}, the last page. Got {wrong[0]}.")
    pages, counts = np.unique(targets[inside], return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"`dst` must not hold a page twice. Got page {pages[counts > 1][0]} more than once. Replace one by -1."
        )
