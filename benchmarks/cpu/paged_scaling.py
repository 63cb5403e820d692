"""Does attention over pages take time by the keys that it visits, and not by the cache and the tables?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.results import Figure
from benchmarks.timing import figure, ratios, take_turns

REQUESTS, PAGE = 4, 16


class Sizes(NamedTuple):
    """What is compared.

    Attributes:
      keys: Of each request: few, and many.
      capacity: Keys that a request's table and share of the cache hold: small, and large.
      seconds: For one comparison.
    """

    keys: tuple[int, int] = (2048, 16384)
    capacity: tuple[int, int] = (2048, 32768)
    seconds: float = 30.0


SIZES = Sizes()
TITLE = (f"`jflex.paged_attention` on `xla`: {REQUESTS} requests of one token, 8 heads over 2, D 64, float32, "
         f"pages of {PAGE} at random places, by keys and by what caches and tables hold")  # fmt: skip


def measure(sizes: Sizes = SIZES) -> list[Figure]:
    (few, many), (small, large) = sizes.keys, sizes.capacity
    return [
        *grown("the same keys, larger cache and tables", _call, (few, small), (few, large), 1, sizes.seconds),
        *grown("more keys, the same cache and tables", _call, (few, large), (many, large), many // few, sizes.seconds),
    ]


def grown(
    name: str,
    make: Callable[[int, int], Callable[[], Any]],
    less: tuple[int, int],
    more: tuple[int, int],
    visited: int,
    seconds: float,
) -> list[Figure]:
    """Two times, and their growth over that of the keys that are visited.

    Args:
      name: What grows.
      make: From the keys and the capacity of each sequence, a call that returns arrays.
      less: Keys and capacity.
      more: Likewise.
      visited: How many times more keys `more` visits.
      seconds: For all.
    """
    calls = {f"{keys} keys of {capacity}": make(keys, capacity) for keys, capacity in (more, less)}
    times = take_turns(calls, seconds)
    found = [figure(f"{name}: {which}", [t * 1e3 for t in values], "ms") for which, values in times.items()]
    share = [ratio / visited for ratio in ratios(*times.values())]
    return [*found, figure(f"{name}: growth of the time over that of visited keys", share, "x", 3, at_most=1.3)]


def _call(keys: int, capacity: int) -> Callable[[], Any]:
    """One step, whose cache and tables hold `capacity` keys of each request, of which there are `keys`."""
    pages = capacity // PAGE
    table = np.random.default_rng(0).permutation(np.arange(1, REQUESTS * pages + 1)).reshape(REQUESTS, pages)
    shape = (REQUESTS * pages + 1, PAGE, 2, 64)
    cache = jflex.paged.PagedCache(*(jax.random.normal(jax.random.key(number), shape) for number in (1, 2)))
    batch = jflex.paged.PagedBatch(jnp.arange(REQUESTS + 1, dtype=jnp.int32),
                                   jnp.full(REQUESTS, keys, jnp.int32), jnp.asarray(table, jnp.int32))  # fmt: skip
    query = jax.random.normal(jax.random.key(0), (REQUESTS, 8, 64))
    attend = jax.jit(functools.partial(jflex.paged_attention, implementation="xla"))
    return functools.partial(attend, query, cache, batch)
