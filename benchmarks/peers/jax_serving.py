"""The JAX peers in serving: queries continue sequences in decoding, with uneven lengths, pages or shared prefixes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax_peers import BoundMods, Captured
from benchmarks.problems import EIGHT_BITS, Problem
from benchmarks.requests import requests_of
from benchmarks.variants import Mods

Program = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments
QK_HEAD_DIM = 192  # of a head before absorption: 128 and 64 rotated, in DeepSeek-V2 and V3


def served_program(peer: str, problem: Problem, mods: BoundMods, captured: Captured) -> Program:
    """A peer's function and its arguments for a problem that is `served`."""
    if problem.keys == "rolling":
        from benchmarks.peers import jax_streaming  # needs Flax

        return jax_streaming.program(peer, problem)
    if problem.selected:
        from benchmarks.peers import jax_sparse  # which imports this module

        return jax_sparse.program(peer, problem)
    function, inputs = _SERVED[peer](problem, mods)
    return function, (captured, *inputs)


def on_gpu_or_xla(on_gpu: str | None) -> str | None:
    """What a call names on a GPU; None leaves the choice to jflex."""
    return on_gpu if jax.default_backend() == "gpu" else "xla"


def _served_mods(problem: Problem, mods: Mods) -> Mods:
    """The last position attends to every key, so one token needs no mask, unless the problem is about the mask."""
    return mods if problem.T > 1 or problem.variant == "causal" else mods._replace(mask=None)


def normal(number: int, shape: tuple[int, ...], problem: Problem) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, problem.dtype)


def contiguous_inputs(problem: Problem) -> tuple[Any, ...]:
    """Query, key, value and the lengths, or None; where there are pages, their contents in order."""
    if problem.page:
        query, cache, batch = paged_inputs(problem)
        query = query.reshape(problem.B, problem.T, *query.shape[1:])
        rows = lambda x: x[batch.page_table].reshape(problem.B, -1, *x.shape[-2:])[:, : problem.S]
        key, value = rows(cache.keys), rows(cache.values)[..., : problem.value_size]
        return query, key, value, None
    query = normal(0, (problem.B, problem.T, problem.Hq, problem.D), problem)
    key, value = (normal(number, (problem.B, problem.S, problem.Hkv, problem.D), problem) for number in (1, 2))
    return query, key, value, jnp.asarray(requests_of(problem).keys) if problem.lengths else None


def _contiguous(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: jflex.Config | None = None
) -> Program:
    def attend(captured: Captured, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        begins = problem.S - problem.T if lengths is None else lengths - problem.T  # where q_idx 0 lies
        bound = _served_mods(problem, mods(captured))
        mask, score = (None if mod is None else jflex.with_offset(mod, begins) for mod in bound)
        known = {} if lengths is None else {"kv_lengths": lengths}
        return jflex.flex_attention(
            query, key, value, score, mask_mod=mask, implementation=on_gpu_or_xla(on_gpu), config=config, **known
        )

    return attend, contiguous_inputs(problem)


def _served_jax_nn(problem: Problem, mods: BoundMods, implementation: Any) -> Program:
    def attend(captured: Captured, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )

    return attend, contiguous_inputs(problem)


def _latents_jax_nn(problem: Problem, mods: BoundMods) -> Program:
    """Rows of latents as keys and as values, since `jax.nn` takes one head size; their rotated columns are dropped."""
    query, rows, _, _ = contiguous_inputs(problem)

    def attend(captured: Captured, query: Any, rows: Any) -> Any:
        begins = problem.S - problem.T
        mask = jnp.arange(problem.T)[:, None] + begins >= jnp.arange(problem.S)[None] if problem.T > 1 else None
        mask = None if mask is None else mask[None, None]
        out = jax.nn.dot_product_attention(query, rows, rows, mask=mask, scale=QK_HEAD_DIM**-0.5, implementation="xla")
        return out[..., : problem.value_size]

    return attend, (query, rows)


def paged_inputs(problem: Problem, prefix: int = 0) -> tuple[Any, ...]:
    """Packed queries, the cache and the batch; pages lie at random, and sequences share those of a prefix."""
    requests, shared = requests_of(problem), prefix // problem.page
    pages = -(-requests.keys // problem.page)
    count = 1 + shared + int((pages - shared).sum())  # page 0 is reserved
    places = np.random.default_rng(0).permutation(np.arange(1, count))
    table = np.zeros((problem.B, pages.max()), np.int32)
    table[:, :shared] = places[:shared]
    for row, own in zip(table, np.split(places[shared:], np.cumsum(pages - shared)[:-1]), strict=True):
        row[shared : shared + len(own)] = own
    shape = (count, problem.page, problem.Hkv, problem.D)
    if problem.keys == "latent":
        cache = jflex.paged.LatentCache(normal(1, shape, problem), problem.D - problem.value_size)
    else:
        cache = jflex.paged.PagedCache(normal(1, shape, problem), normal(2, shape, problem))
    if problem.keys in EIGHT_BITS:
        cache = jax.jit(functools.partial(_in_eight_bits, problem.keys))(cache)
    batch = jflex.paged.PagedBatch(*map(jnp.asarray, (requests.indptr, requests.keys, table)))
    return normal(0, (int(requests.queries.sum()), problem.Hq, problem.D), problem), cache, batch


def _in_eight_bits(dtype: str, cache: Any) -> Any:
    """The same pages in eight bits, with a scale for each token and head."""
    pages, size, heads, D = cache.k.shape
    rows = lambda x: x.reshape(pages * size, heads, D)
    empty = jflex.paged.PagedCache.create(pages, size, heads, D, dtype=dtype)
    return jflex.paged.write(empty, rows(cache.k), rows(cache.v), jnp.arange(pages * size, dtype=jnp.int32))


def _paged(
    problem: Problem,
    mods: BoundMods,
    on_gpu: str | None = None,
    config: jflex.Config | None = None,
    *,
    sharing: bool = False,
) -> Program:
    """Every sequence loads all of its pages by itself; with `sharing`, those of the prefix are the same pages."""

    def attend(captured: Captured, query: Any, cache: Any, batch: Any) -> Any:
        mask, score = _served_mods(problem, mods(captured))
        if problem.keys == "latent":
            how = {"score_mod": score, "mask_mod": mask, "qk_head_dim": QK_HEAD_DIM, "config": config}
            return jflex.mla_attention(query, cache, batch, **how, implementation=on_gpu_or_xla(on_gpu))
        is_raw = problem.keys.startswith("raw")
        rotation = jflex.rope(interleaved=problem.keys == "raw neighbours") if is_raw else None
        return jflex.paged_attention(
            query,
            cache,
            batch,
            score_mod=score,
            mask_mod=mask,
            key_mod=rotation,
            implementation=on_gpu_or_xla(on_gpu),
            config=config,
        )

    return attend, paged_inputs(problem, problem.prefix * sharing)


def _cascade(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: jflex.Config | None = None
) -> Program:
    """The shared pages are loaded once: the same arrays as two levels."""
    query, cache, shared, own = _levels(problem)

    def attend(captured: Captured, query: Any, cache: Any, shared: Any, own: Any) -> Any:
        level = jflex.CascadeLevel.paged
        levels = [level(cache, shared), level(cache, own, start=problem.prefix)]
        return jflex.cascade_attention(query, levels, implementation=on_gpu_or_xla(on_gpu), config=config)

    return attend, (query, cache, shared, own)


def _levels(problem: Problem) -> tuple[Any, ...]:
    """The query, the cache, and the batches of the prefix and of what each sequence has for itself."""
    query, cache, batch = paged_inputs(problem, problem.prefix)
    pages = problem.prefix // problem.page
    prefix = jnp.array([problem.prefix], jnp.int32)
    rows = jnp.array([0, query.shape[0]], jnp.int32)
    shared = jflex.paged.PagedBatch(rows, prefix, batch.page_table[:1, :pages])
    own = jflex.paged.PagedBatch(batch.qo_indptr, batch.kv_lengths - problem.prefix, batch.page_table[:, pages:])
    return query, cache, shared, own


def _joined(problem: Problem, mods: BoundMods) -> Program:
    """Both levels in one call, where the prefix is one more sequence with all queries; their states are merged."""
    query, cache, shared, own = _levels(problem)
    N, pages = query.shape[0], max(shared.max_pages, own.max_pages)
    wide = lambda table: jnp.pad(table, ((0, 0), (0, pages - table.shape[1])))
    joined = jflex.paged.PagedBatch(
        jnp.concatenate([shared.qo_indptr, N + own.qo_indptr[1:]]),
        jnp.concatenate([shared.kv_lengths, own.kv_lengths]),
        jnp.concatenate([wide(shared.page_table), wide(own.page_table)]),
    )

    def attend(captured: Captured, query: Any, cache: Any, joined: Any) -> Any:
        twice = jnp.concatenate([query, query])
        out, lse = jflex.paged_attention(twice, cache, joined, return_lse=True, implementation=on_gpu_or_xla(None))
        states = [jflex.AttentionState(out[rows], lse[rows]) for rows in (slice(N), slice(N, None))]
        return jflex.merge_all(states).out

    return attend, (query, cache, joined)


def _served_jflex(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: jflex.Config | None = None
) -> Program:
    return (_cascade if problem.prefix else _paged if problem.page else _contiguous)(problem, mods, on_gpu, config)


_SERVED: dict[str, Callable[[Problem, BoundMods], Program]] = {
    "jflex": _served_jflex,
    "jflex-mosaic": functools.partial(_served_jflex, on_gpu="mosaic_gpu"),
    "jflex-triton": functools.partial(_served_jflex, on_gpu="triton"),
    "jflex-official": functools.partial(_served_jflex, on_gpu="official_triton"),
    "jflex-invariant": functools.partial(_served_jflex, config=jflex.Config(batch_invariant=True)),
    "jflex-contiguous": _contiguous,
    "jflex-joined": _joined,
    "jflex-flat": functools.partial(_paged, sharing=True),
    "jflex-copies": _paged,
    "jax-cudnn": functools.partial(_served_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_served_jax_nn, implementation="xla"),
    "jax-xla-latents": _latents_jax_nn,
}
