"""StreamingLLM: a decoding step over a rolling cache of raw keys, which are rotated as they are loaded, or before.

All attend to the same sinks and the same window, at the positions within the cache. None writes the token's own key
and value, which takes each of them equally long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax_serving import Program, normal, on_gpu_or_xla
from benchmarks.problems import Problem
from flax_layers.attention.streaming import Streaming, attend
from jflex.rotary import rotate

SINKS = 4
# (query, cache, batch, streaming, implementation) -> out
_Attend = Callable[[jax.Array, jflex.paged.PagedCache, jflex.paged.PagedBatch, Streaming, str | None], jax.Array]


def program(peer: str, problem: Problem) -> Program:
    """A peer's function and its arguments."""
    if peer not in _PEERS:
        raise NotImplementedError(f"{peer} is not measured with the rolling cache of StreamingLLM.")
    query, cache, batch, streaming = _inputs(problem)

    def attended(captured: Any, query: Any, cache: Any, batch: Any) -> Any:
        return _PEERS[peer](query, cache, batch, streaming, on_gpu_or_xla(None))

    return attended, ({}, query, cache, batch)


def _inputs(problem: Problem) -> tuple[Any, ...]:
    """Query, cache of raw keys, batch and sizes: each sequence has a page of sinks, and those of its whole window."""
    sinks, window, page = SINKS, problem.S - SINKS, problem.page
    first = -(-sinks // page)
    columns = first - (-window // page)
    places = np.random.default_rng(0).permutation(np.arange(1, 1 + problem.B * columns))
    table = jnp.asarray(places.reshape(problem.B, columns), jnp.int32)
    shape = (1 + problem.B * columns, page, problem.Hkv, problem.D)
    cache = jflex.paged.PagedCache(normal(1, shape, problem), normal(2, shape, problem))
    lengths = jnp.full(problem.B, first * page + window, jnp.int32)
    batch = jflex.paged.PagedBatch(jnp.arange(problem.B + 1, dtype=jnp.int32), lengths, table)
    query = normal(0, (problem.B, problem.Hq, problem.D), problem)
    return query, cache, batch, Streaming(sinks, window)


def _of_layers(
    query: jax.Array,
    cache: jflex.paged.PagedCache,
    batch: jflex.paged.PagedBatch,
    streaming: Streaming,
    implementation: str | None,
) -> jax.Array:
    """As the layers of `flax_layers`: one call over raw keys."""
    parts = streaming.parts(batch, query.shape[0], jflex.rope())
    return attend(query, cache, parts, implementation=implementation)


def _sinks_and_window(streaming: Streaming) -> jflex.MaskMod:
    return lambda b, h, q_idx, kv_idx: (kv_idx < streaming.sinks) | (kv_idx > q_idx - streaming.window)


def _gaps(batch: jflex.paged.PagedBatch, streaming: Streaming) -> jax.Array:
    """Slots between the sinks and the window, of each request."""
    return jnp.maximum(batch.kv_lengths - streaming.size, 0)


def _at_the_end(query: jax.Array, streaming: Streaming) -> jax.Array:
    """The query rotated at the last position of the cache."""
    return rotate(query, jnp.full(query.shape[0], streaming.size - 1, jnp.int32))


def _raw_keys(
    query: jax.Array,
    cache: jflex.paged.PagedCache,
    batch: jflex.paged.PagedBatch,
    streaming: Streaming,
    implementation: str | None,
) -> jax.Array:
    """One call written for this batch: each request is known to have one token, at the end of its cache."""
    gaps, rope = _gaps(batch, streaming), jflex.rope()

    def key_mod(key: Any, b: Any, h: Any, kv_idx: Any) -> Any:
        return rope(key, b, h, jnp.where(kv_idx < streaming.sinks, kv_idx, kv_idx - gaps[b]))

    how: dict[str, Any] = {"mask_mod": _sinks_and_window(streaming), "implementation": implementation}
    return jflex.paged_attention(_at_the_end(query, streaming), cache, batch, key_mod=key_mod, **how)


def _rerotating(
    query: jax.Array,
    cache: jflex.paged.PagedCache,
    batch: jflex.paged.PagedBatch,
    streaming: Streaming,
    implementation: str | None,
) -> jax.Array:
    """Separate kernels: XLA rotates all raw keys into a new array, then one call."""
    gaps = _gaps(batch, streaming)
    columns = jnp.arange(batch.page_table.shape[1] * cache.page_size, dtype=jnp.int32)[None]
    positions = jnp.where(columns < streaming.sinks, columns, columns - gaps[:, None])
    by_page = jnp.zeros(cache.k.shape[:2], jnp.int32)
    by_page = by_page.at[batch.page_table].set(positions.reshape(*batch.page_table.shape, cache.page_size))
    cache = dataclasses.replace(cache, k=rotate(cache.k, by_page))
    how: dict[str, Any] = {"mask_mod": _sinks_and_window(streaming), "implementation": implementation}
    return jflex.paged_attention(_at_the_end(query, streaming), cache, batch, **how)


_PEERS: dict[str, _Attend] = {
    "jflex": _of_layers,
    "jflex-raw-keys": _raw_keys,
    "jflex-rerotating": _rerotating,
}
