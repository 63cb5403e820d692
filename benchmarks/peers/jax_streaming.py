"""StreamingLLM: a decoding step over a rolling cache, with the rotary embedding in three places.

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
from flax_layers.streaming_llm import Streaming
from jflex.rotary import rotate

SINKS = 4
POSITION = 1_000_000  # of the token, about
# (query, cache, batch, streaming, implementation) -> out
_Attend = Callable[[jax.Array, jflex.paged.PagedCache, jflex.paged.PagedBatch, Streaming, str | None], jax.Array]


def program(peer: str, problem: Problem) -> Program:
    """A peer's function and its arguments."""
    if peer not in _PEERS:
        raise NotImplementedError(f"{peer} is not measured with the rolling cache of StreamingLLM.")
    query, cache, batch, streaming = _inputs(problem)
    if peer == "jflex":
        cache = jax.jit(_stored_rotated)(cache, batch, streaming)
    attend, implementation = _PEERS[peer], on_gpu_or_xla(None)
    return lambda captured, *inputs: attend(*inputs, implementation), ({}, query, cache, batch, streaming)


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
    dropped = jnp.full(problem.B, POSITION // page * page, jnp.int32)
    query = normal(0, (problem.B, problem.Hq, problem.D), problem)
    return query, cache, batch, Streaming(sinks, window, dropped)


def _rotated(
    cache: jflex.paged.PagedCache, batch: jflex.paged.PagedBatch, sinks: int, moved: jax.Array, *, is_far: bool = False
) -> jflex.paged.PagedCache:
    """All keys rotated into a new array, those behind the sinks at positions that `moved` [B] shifts."""
    columns = jnp.arange(batch.page_table.shape[1] * cache.page_size, dtype=jnp.int32)[None]
    positions = jnp.where(columns < sinks, columns, columns + moved[:, None])
    by_page = jnp.zeros(cache.k.shape[:2], jnp.int32)
    by_page = by_page.at[batch.page_table].set(positions.reshape(*batch.page_table.shape, cache.page_size))
    return dataclasses.replace(cache, k=rotate(cache.k, by_page, is_far=is_far))


def _stored_rotated(
    cache: jflex.paged.PagedCache, batch: jflex.paged.PagedBatch, streaming: Streaming
) -> jflex.paged.PagedCache:
    """The cache as the layers write it: keys at their positions in the text."""
    assert streaming.dropped is not None
    return _rotated(cache, batch, streaming.sinks, streaming.dropped, is_far=True)


def _two_parts(
    query: jax.Array,
    cache: jflex.paged.PagedCache,
    batch: jflex.paged.PagedBatch,
    streaming: Streaming,
    implementation: str | None,
) -> jax.Array:
    """As the layers of `flax_layers`: the query is rotated for the window and for the sinks, and both are merged."""
    states = []
    for at, _, mask_mod in streaming.parts(streaming.positions(batch, query.shape[0]), None, None):
        how: dict[str, Any] = {"mask_mod": mask_mod, "implementation": implementation}
        found = jflex.paged_attention(rotate(query, at, is_far=True), cache, batch, return_lse=True, **how)
        states.append(jflex.AttentionState(*found))
    return jflex.merge_all(states).out


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
    """One call over raw keys, which a `key_mod` rotates as they are loaded."""
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
    turned = _rotated(cache, batch, streaming.sinks, -_gaps(batch, streaming))
    how: dict[str, Any] = {"mask_mod": _sinks_and_window(streaming), "implementation": implementation}
    return jflex.paged_attention(_at_the_end(query, streaming), turned, batch, **how)


_PEERS: dict[str, _Attend] = {
    "jflex": _two_parts,
    "jflex-raw-keys": _raw_keys,
    "jflex-rerotating": _rerotating,
}
