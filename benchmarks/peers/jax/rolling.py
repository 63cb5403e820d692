"""StreamingLLM: a decoding step over a rolling cache of raw keys, which are rotated as they are loaded, or before.

All attend to the same sinks and the same window, at the positions within the cache. None writes the token's own key
and value, which takes each of them equally long.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax.attention import BoundMods
from benchmarks.peers.jax.served import Peers, Program, normal, on_gpu_or_xla
from benchmarks.problems import Problem
from flax_layers.attention.streaming import Streaming, attend
from jflex.paged import PagedBatch, PagedCache
from jflex.rotary import rotate

SINKS = 4


def _program(problem: Problem, mods: BoundMods, call: Callable[..., jax.Array]) -> Program:
    """Each sequence has a page of sinks, and the pages of its whole window."""
    streaming, page = Streaming(SINKS, problem.S - SINKS), problem.page
    first = -(-SINKS // page)
    columns = first - (-streaming.window // page)
    table = np.random.default_rng(0).permutation(np.arange(1, 1 + problem.B * columns)).reshape(problem.B, columns)
    shape = (1 + problem.B * columns, page, problem.Hkv, problem.D)
    cache = PagedCache(normal(1, shape, problem), normal(2, shape, problem))
    lengths = jnp.full(problem.B, first * page + streaming.window, jnp.int32)
    batch = PagedBatch(jnp.arange(problem.B + 1, dtype=jnp.int32), lengths, jnp.asarray(table, jnp.int32))
    query = normal(0, (problem.B, problem.Hq, problem.D), problem)
    return lambda captured, *inputs: call(*inputs, streaming), (query, cache, batch)


def _layers(query: jax.Array, cache: PagedCache, batch: PagedBatch, streaming: Streaming) -> jax.Array:
    """The call of the layers of `flax_layers`, over raw keys."""
    parts = streaming.parts(batch, query.shape[0], jflex.rope())
    return attend(query, cache, parts, implementation=on_gpu_or_xla(None))


def _attended(
    query: jax.Array, cache: PagedCache, batch: PagedBatch, streaming: Streaming, key_mod: Callable | None = None
) -> jax.Array:
    """One call on sinks and a window, with the query rotated at the last position of the cache."""
    query = rotate(query, jnp.full(query.shape[0], streaming.size - 1, jnp.int32))
    mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx < streaming.sinks) | (kv_idx > q_idx - streaming.window)
    options = {"mask_mod": mask_mod, "key_mod": key_mod, "implementation": on_gpu_or_xla(None)}
    return jflex.paged_attention(query, cache, batch, **options)


def _gaps(batch: PagedBatch, streaming: Streaming) -> jax.Array:
    """Slots between the sinks and the window, of each request."""
    return jnp.maximum(batch.kv_lengths - streaming.size, 0)


def _raw_keys(query: jax.Array, cache: PagedCache, batch: PagedBatch, streaming: Streaming) -> jax.Array:
    """One call written for this batch: each request is known to have one token, at the end of its cache."""
    gaps, rope = _gaps(batch, streaming), jflex.rope()
    place = lambda b, kv_idx: jnp.where(kv_idx < streaming.sinks, kv_idx, kv_idx - gaps[b])
    key_mod = lambda key, b, h, kv_idx: rope(key, b, h, place(b, kv_idx))
    return _attended(query, cache, batch, streaming, key_mod)


def _rerotating(query: jax.Array, cache: PagedCache, batch: PagedBatch, streaming: Streaming) -> jax.Array:
    """Separate kernels: XLA rotates all raw keys into a new array, then one call."""
    columns = jnp.arange(batch.page_table.shape[1] * cache.page_size, dtype=jnp.int32)[None]
    positions = jnp.where(columns < streaming.sinks, columns, columns - _gaps(batch, streaming)[:, None])
    by_page = jnp.zeros(cache.k.shape[:2], jnp.int32)
    by_page = by_page.at[batch.page_table].set(positions.reshape(*batch.page_table.shape, cache.page_size))
    return _attended(query, dataclasses.replace(cache, k=rotate(cache.k, by_page)), batch, streaming)


_CALLS = {"jflex": _layers, "jflex-raw-keys": _raw_keys, "jflex-rerotating": _rerotating}
ROLLING: Peers = {name: functools.partial(_program, call=call) for name, call in _CALLS.items()}
