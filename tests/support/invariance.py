"""Requests that are served in batches of many kinds: which bits each query gets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex import CascadeLevel
from jflex.paged import PagedBatch, PagedCache
from tests.support.dense_masks import causal

INT = functools.partial(jnp.asarray, dtype=jnp.int32)
HQ, HKV, D = 4, 2, 16
SLOPES = np.array([0.5, 0.25, 0.1, 0.05], np.float32) / 8


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hides whole splits in front of it."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 50)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score mod that captures an array."""
    return score - jnp.asarray(SLOPES)[h] * (q_idx - kv_idx).astype(jnp.float32)


MODS: dict[str, dict[str, Any]] = {
    "causal": {"mask_mod": causal},
    "window": {"mask_mod": window},
    "alibi": {"mask_mod": causal, "score_mod": alibi},
    "linear": {"mask_mod": causal, "normalize": "none"},
}


class Request(NamedTuple):
    """Queries, keys and values of all tokens of a sequence."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


class Row(NamedTuple):
    """A row of a batch: a request of which so many tokens exist, and how many of the last are queries."""

    request: int
    tokens: int
    queries: int = 1


@functools.cache
def requests(lengths: tuple[int, ...], dtype: str = "float32", size: int = D) -> tuple[Request, ...]:
    """Random ones."""
    rng = np.random.default_rng(3)
    draw = lambda n, heads: np.asarray(jnp.asarray(rng.normal(size=(n, heads, size)), dtype))
    return tuple(Request(draw(n, HQ), draw(n, HKV), draw(n, HKV)) for n in lengths)


def serve(
    drawn: Sequence[Request], rows: Sequence[Row], how: dict[str, Any], *, page: int = 16, seed: int = 0, spare: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Out and lse of the queries of each row, by `jflex.paged_attention`.

    Args:
      drawn: The requests.
      rows: The batch.
      how: Mods and options.
      page: Keys in a page.
      seed: Where pages lie; all that no request may read is NaN.
      spare: Entries of the page table beyond those of the longest request.
    """
    counts = [-(-row.tokens // page) for row in rows]
    total = 2 + sum(counts)
    places, dtype = np.random.default_rng(seed).permutation(np.arange(1, total)), drawn[0].q.dtype
    of_key = drawn[0].k.shape[1:]
    keys, values = (np.full((total, page, *of_key), np.nan, dtype) for _ in range(2))
    table, done = np.zeros((len(rows), max(counts) + spare), np.int32), 0
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        here = table[i, :count] = places[done : done + count]
        done += count
        for pages, x in ((keys, drawn[row.request].k), (values, drawn[row.request].v)):
            whole = np.full((count * page, *of_key), np.nan, dtype)
            whole[: row.tokens] = x[: row.tokens]
            pages[here] = whole.reshape(count, page, *of_key)
    q = np.concatenate([drawn[row.request].q[row.tokens - row.queries : row.tokens] for row in rows])
    ends = np.cumsum([0, *(row.queries for row in rows)])
    batch = PagedBatch(INT(ends), INT([row.tokens for row in rows]), INT(table))
    lse = how.get("normalize") != "none"
    call = jax.jit(functools.partial(jflex.paged_attention, return_lse=lse, **how))
    result = call(jnp.asarray(q), PagedCache(jnp.asarray(keys), jnp.asarray(values)), batch)
    return _rows(result if lse else (result, result), ends)


def cascade(
    drawn: Sequence[Request], prefix: int, rows: Sequence[Row], how: dict[str, Any]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Likewise, by `jflex.cascade_attention`; so many first keys are those of request 0, shared by all."""
    q = np.concatenate([drawn[row.request].q[row.tokens - row.queries : row.tokens] for row in rows])
    ends = np.cumsum([0, *(row.queries for row in rows)])
    shared = CascadeLevel.dense(*(jnp.asarray(x[None, :prefix]) for x in drawn[0][1:]), qo_indptr=INT([0, len(q)]))
    longest = max(row.tokens for row in rows) - prefix
    own = []
    for x in (1, 2):
        padded = np.full((len(rows), longest, HKV, D), np.nan, np.float32)
        for i, row in enumerate(rows):
            padded[i, : row.tokens - prefix] = drawn[row.request][x][prefix : row.tokens]
        own.append(jnp.asarray(padded))
    lengths = INT([row.tokens - prefix for row in rows])
    level = CascadeLevel.dense(*own, qo_indptr=INT(ends), lengths=lengths, start=prefix)
    positions = INT(np.concatenate([np.arange(row.tokens - row.queries, row.tokens) for row in rows]))
    call = jax.jit(functools.partial(jflex.cascade_attention, return_lse=True, **how))
    return _rows(call(jnp.asarray(q), [shared, level], positions=positions), ends)


def dense(
    drawn: Sequence[Request], rows: Sequence[Row], how: dict[str, Any], *, capacity: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Likewise, by `jflex.flex_attention` with `kv_lengths`; all rows have as many queries."""
    size = max(capacity, *(row.tokens for row in rows))
    keys, values = (np.full((len(rows), size, HKV, D), np.nan, np.float32) for _ in range(2))
    for i, row in enumerate(rows):
        keys[i, : row.tokens], values[i, : row.tokens] = (x[: row.tokens] for x in drawn[row.request][1:])
    q = np.stack([drawn[row.request].q[row.tokens - row.queries : row.tokens] for row in rows])
    lengths = INT([row.tokens for row in rows])
    begins = lengths - q.shape[1]
    mods = {name: jflex.with_offset(how[name], begins) for name in ("mask_mod", "score_mod") if name in how}
    call = jax.jit(functools.partial(jflex.flex_attention, return_lse=True, kv_lengths=lengths, **(how | mods)))
    out, lse = call(*map(jnp.asarray, (q, keys, values)))
    return [(np.asarray(x), np.asarray(y).swapaxes(0, 1)) for x, y in zip(out, lse, strict=True)]


def _rows(result: Sequence[jax.Array], ends: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    out, lse = map(np.asarray, result)
    return [(out[a:b], lse[a:b]) for a, b in itertools.pairwise(ends)]


def same_bits(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> None:
    """Raises unless out and lse of the queries that both have, their last ones, are equal to the last bit."""
    count = min(len(one[0]), len(other[0]))
    for x, y in zip(one, other, strict=True):
        assert not np.isnan(np.asarray(x, np.float32)).any()
        np.testing.assert_array_equal(np.asarray(x[-count:], np.float32), np.asarray(y[-count:], np.float32))
