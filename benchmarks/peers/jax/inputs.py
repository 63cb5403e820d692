"""Inputs of the JAX peers in serving: contiguous keys, or pages at random places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.problems import EIGHT_BITS, Problem
from benchmarks.requests import requests_of

Arrays = tuple[jax.Array | None, ...]
Cache = Any  # a `PagedCache` or a `LatentCache`
Program = tuple[Callable[..., jax.Array], tuple[object, ...]]  # a function, and its arguments
QK_HEAD_DIM = 192  # of a head before absorption: 128 and 64 rotated, in DeepSeek-V2 and V3


def on_gpu_or_xla(on_gpu: str | None) -> str | None:
    """The implementation that a call names on a GPU; None leaves the choice to jflex."""
    return on_gpu if jax.default_backend() == "gpu" else "xla"


def normal(seed: int, shape: tuple[int, ...], problem: Problem) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, problem.dtype)


def contiguous_inputs(problem: Problem) -> Arrays:
    """Query, key, value and the lengths, or None; where there are pages, their contents in order."""
    if problem.page:
        query, cache, batch = paged_inputs(problem)
        query = query.reshape(problem.B, problem.T, *query.shape[1:])
        rows = lambda x: x[batch.page_table].reshape(problem.B, -1, *x.shape[-2:])[:, : problem.S]
        return query, rows(cache.keys), rows(cache.values)[..., : problem.value_size], None
    query = normal(0, (problem.B, problem.T, problem.Hq, problem.D), problem)
    key, value = (normal(seed, (problem.B, problem.S, problem.Hkv, problem.D), problem) for seed in (1, 2))
    return query, key, value, jnp.asarray(requests_of(problem).keys) if problem.lengths else None


def paged_inputs(problem: Problem, prefix: int = 0) -> tuple[jax.Array, Cache, jflex.paged.PagedBatch]:
    """Packed queries, the cache and the batch; sequences share the pages of a prefix."""
    requests, shared = requests_of(problem), prefix // problem.page
    pages = -(-requests.keys // problem.page)
    count = 1 + shared + int((pages - shared).sum())  # page 0 is reserved
    places = np.random.default_rng(0).permutation(np.arange(1, count))
    table = np.zeros((problem.B, pages.max()), np.int32)
    table[:, :shared] = places[:shared]
    for row, unshared in zip(table, np.split(places[shared:], np.cumsum(pages - shared)[:-1]), strict=True):
        row[shared : shared + len(unshared)] = unshared
    shape = (count, problem.page, problem.Hkv, problem.D)
    if problem.keys == "latent":
        cache = jflex.paged.LatentCache(normal(1, shape, problem), problem.D - problem.value_size)
    else:
        cache = jflex.paged.PagedCache(normal(1, shape, problem), normal(2, shape, problem))
    if problem.keys in EIGHT_BITS:
        cache = jax.jit(functools.partial(_in_eight_bits, problem.keys))(cache)
    batch = jflex.paged.PagedBatch(*map(jnp.asarray, (requests.indptr, requests.keys, table)))
    return normal(0, (int(requests.queries.sum()), problem.Hq, problem.D), problem), cache, batch


def _in_eight_bits(dtype: str, cache: jflex.paged.PagedCache) -> jflex.paged.PagedCache:
    """Pages in eight bits, with a scale for each token and head."""
    pages, size, heads, D = cache.k.shape
    rows = lambda x: x.reshape(pages * size, heads, D)
    empty = jflex.paged.PagedCache.create(pages, size, heads, D, dtype=dtype)
    return jflex.paged.write(empty, rows(cache.k), rows(cache.v), jnp.arange(pages * size, dtype=jnp.int32))
