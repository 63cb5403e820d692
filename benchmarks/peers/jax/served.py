"""The JAX peers in serving: queries continue sequences in decoding, with uneven lengths, pages or shared prefixes.

Sparse latent attention and the indexer that selects its keys (DeepSeek-V3.2) are among them. Pages lie at random
places, and queries select positions at random, in no order, as the best scores lie.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax.attention import IMPLEMENTATIONS, BoundMods, Captured
from benchmarks.problems import EIGHT_BITS, Problem, page_table, requests_of
from benchmarks.variants import Mods

Batch = jflex.paged.PagedBatch
Cache = Any  # a `PagedCache` or a `LatentCache`
Config = jflex.Config | None
Program = tuple[Callable[..., jax.Array], tuple[Any, ...]]  # a function of captured arrays and inputs, and the inputs
QK_HEAD_DIM = 192  # of a head before absorption: 128 and 64 rotated, in DeepSeek-V2 and V3
_LARGEST = 2  # of the integers in queries and keys of the indexer, so that scores are exact in any order of summation


def served_program(peer: str, problem: Problem, mods: BoundMods, captured: Captured) -> Program:
    """A peer's function and all its arguments for a problem that is `served`."""
    if problem.keys == "rolling":
        from benchmarks.peers.jax.rolling import ROLLING as peers  # needs Flax
    else:
        peers = _INDEXERS if problem.keys == "indexer" else _SPARSE if problem.selected else _SERVED
    if peer not in peers:
        raise NotImplementedError(f"{peer} is not measured with {problem.label}.")
    function, inputs = peers[peer](problem, mods)
    return function, (captured, *inputs)


def on_gpu_or_xla(on_gpu: str | None) -> str | None:
    """The implementation that a call names on a GPU; None leaves the choice to jflex."""
    return on_gpu if jax.default_backend() == "gpu" else "xla"


def normal(seed: int, shape: tuple[int, ...], problem: Problem) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, problem.dtype)


def paged_inputs(problem: Problem, prefix: int = 0) -> tuple[jax.Array, Cache, Batch]:
    """Packed queries, the cache and the batch; sequences share the pages of a prefix."""
    requests, table = requests_of(problem), page_table(problem, prefix)
    count = 1 + int(table.max())
    keys = normal(1, (count, problem.page, problem.Hkv, problem.D), problem)
    if problem.keys == "latent":
        cache = jflex.paged.LatentCache(keys, problem.D - problem.value_size)
    else:
        cache = jflex.paged.PagedCache(keys, normal(2, keys.shape, problem))
    if problem.keys in EIGHT_BITS:  # with a scale for each token and head
        rows, slots = (count * problem.page, *keys.shape[2:]), jnp.arange(count * problem.page, dtype=jnp.int32)
        empty = jflex.paged.PagedCache.create(*keys.shape, dtype=problem.keys)
        cache = jax.jit(jflex.paged.write)(empty, cache.k.reshape(rows), cache.v.reshape(rows), slots)
    batch = Batch(*map(jnp.asarray, (requests.indptr, requests.keys, table)))
    return normal(0, (int(requests.queries.sum()), problem.Hq, problem.D), problem), cache, batch


def _contiguous_inputs(problem: Problem) -> tuple[Any, ...]:
    """Query, key, value and the lengths, or None; where there are pages, their contents in order."""
    if problem.page:
        query, cache, batch = paged_inputs(problem)
        query = query.reshape(problem.B, problem.T, *query.shape[1:])
        rows = lambda x: x[batch.page_table].reshape(problem.B, -1, *x.shape[-2:])[:, : problem.S]
        return query, rows(cache.keys), rows(cache.values)[..., : problem.value_size], None
    query = normal(0, (problem.B, problem.T, problem.Hq, problem.D), problem)
    key, value = (normal(seed, (problem.B, problem.S, problem.Hkv, problem.D), problem) for seed in (1, 2))
    return query, key, value, jnp.asarray(requests_of(problem).keys) if problem.lengths else None


def _served_mods(problem: Problem, mods: Mods) -> Mods:
    """The last position attends to every key, so one token needs no mask, unless the problem is about the mask."""
    return mods if problem.T > 1 or problem.variant == "causal" else mods._replace(mask=None)


def _contiguous(problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: Config = None) -> Program:
    def attend(captured: Captured, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None):
        first = problem.S - problem.T if lengths is None else lengths - problem.T  # the position of q_idx 0
        bound = _served_mods(problem, mods(captured))
        mask, score = (None if mod is None else jflex.with_offset(mod, first) for mod in bound)
        options = {"mask_mod": mask, "implementation": on_gpu_or_xla(on_gpu), "config": config, "kv_lengths": lengths}
        return jflex.flex_attention(query, key, value, score, **options)

    return attend, _contiguous_inputs(problem)


def _jax_nn(problem: Problem, mods: BoundMods, implementation: str) -> Program:
    return (
        lambda captured, query, key, value, lengths: jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        ),
        _contiguous_inputs(problem),
    )


def _latents_jax_nn(problem: Problem, mods: BoundMods) -> Program:
    """Rows of latents as keys and as values, since `jax.nn` takes one head size; their rotated columns are dropped."""

    def attend(captured: Captured, query: jax.Array, rows: jax.Array) -> jax.Array:
        positions = jnp.arange(problem.S - problem.T, problem.S)
        mask = (positions[:, None] >= jnp.arange(problem.S)[None])[None, None] if problem.T > 1 else None
        out = jax.nn.dot_product_attention(query, rows, rows, mask=mask, scale=QK_HEAD_DIM**-0.5, implementation="xla")
        return out[..., : problem.value_size]

    return attend, _contiguous_inputs(problem)[:2]


def _paged(
    problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: Config = None, *, sharing: bool = False
) -> Program:
    """Every sequence loads all of its pages by itself; with `sharing`, the pages of the prefix are the same."""

    def attend(captured: Captured, query: jax.Array, cache: Cache, batch: Batch) -> jax.Array:
        mask, score = _served_mods(problem, mods(captured))
        options = {"score_mod": score, "mask_mod": mask, "implementation": on_gpu_or_xla(on_gpu), "config": config}
        if problem.keys == "latent":
            return jflex.mla_attention(query, cache, batch, qk_head_dim=QK_HEAD_DIM, **options)
        is_raw = problem.keys.startswith("raw")
        rotation = jflex.rope(interleaved=problem.keys == "raw neighbours") if is_raw else None
        return jflex.paged_attention(query, cache, batch, key_mod=rotation, **options)

    return attend, paged_inputs(problem, problem.prefix * sharing)


def _cascade(problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: Config = None) -> Program:
    """The shared pages are loaded once: the same arrays as two levels."""

    def attend(captured: Captured, query: jax.Array, cache: Cache, shared: Batch, suffix: Batch) -> jax.Array:
        level = jflex.CascadeLevel.paged
        levels = [level(cache, shared), level(cache, suffix, start=problem.prefix)]
        return jflex.cascade_attention(query, levels, implementation=on_gpu_or_xla(on_gpu), config=config)

    return attend, _levels(problem)


def _levels(problem: Problem) -> tuple[jax.Array, Cache, Batch, Batch]:
    """The query, the cache, and the batches of the prefix and of each sequence's suffix."""
    query, cache, batch = paged_inputs(problem, problem.prefix)
    pages, rows = problem.prefix // problem.page, jnp.array([0, query.shape[0]], jnp.int32)
    shared = Batch(rows, jnp.array([problem.prefix], jnp.int32), batch.page_table[:1, :pages])
    suffix = Batch(batch.qo_indptr, batch.kv_lengths - problem.prefix, batch.page_table[:, pages:])
    return query, cache, shared, suffix


def _joined(problem: Problem, mods: BoundMods) -> Program:
    """Both levels in one call, where the prefix is one more sequence with all queries; their states are merged."""
    query, cache, shared, suffix = _levels(problem)
    N, pages = query.shape[0], max(shared.max_pages, suffix.max_pages)
    wide = lambda table: jnp.pad(table, ((0, 0), (0, pages - table.shape[1])))
    joined = Batch(
        jnp.concatenate([shared.qo_indptr, N + suffix.qo_indptr[1:]]),
        jnp.concatenate([shared.kv_lengths, suffix.kv_lengths]),
        jnp.concatenate([wide(shared.page_table), wide(suffix.page_table)]),
    )

    def attend(captured: Captured, query: jax.Array, cache: Cache, joined: Batch) -> jax.Array:
        twice = jnp.concatenate([query, query])
        out, lse = jflex.paged_attention(twice, cache, joined, return_lse=True, implementation=on_gpu_or_xla(None))
        states = [jflex.AttentionState(out[rows], lse[rows]) for rows in (slice(N), slice(N, None))]
        return jflex.merge_all(states).out

    return attend, (query, cache, joined)


def _jflex(problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: Config = None) -> Program:
    return (_cascade if problem.prefix else _paged if problem.page else _contiguous)(problem, mods, on_gpu, config)


def selected_positions(problem: Problem) -> np.ndarray:
    """Selection of each query, int32 [B * T, selected]: distinct visible positions."""
    generator = np.random.default_rng(3)
    visible = [problem.S - problem.T + row + 1 for _ in range(problem.B) for row in range(problem.T)]
    return np.stack([generator.permutation(count)[: problem.selected] for count in visible]).astype(np.int32)


def _sparse(problem: Problem, mods: BoundMods, on_gpu: str | None = None) -> Program:
    attend = lambda captured, *inputs: jflex.sparse_mla_attention(
        *inputs, qk_head_dim=QK_HEAD_DIM, implementation=on_gpu_or_xla(on_gpu)
    )
    return attend, (*paged_inputs(problem), jnp.asarray(selected_positions(problem)))


def _gathered(problem: Problem, mods: BoundMods) -> Program:
    """The selected rows of contiguous latents in a new array, and `jax.nn` over it."""
    indices = jnp.asarray(selected_positions(problem)).reshape(problem.B, problem.T, -1)

    def attend(captured: Captured, query: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
        chosen = jax.vmap(lambda rows, indices: rows[indices])(rows, indices)  # [B, T, selected, 1, D]
        each = lambda x: x.reshape(problem.B * problem.T, -1, *x.shape[-2:])
        how = {"scale": QK_HEAD_DIM**-0.5, "implementation": "xla"}
        out = jax.nn.dot_product_attention(each(query[:, :, None]), each(chosen), each(chosen), **how)
        return out[..., : problem.value_size]

    return attend, (*_contiguous_inputs(problem)[:2], indices)


def _indexer(problem: Problem, mods: BoundMods, *, at_once: bool = False) -> Program:
    """Integers as queries [B, T, Hq, D], keys [B, S, D] and weights of heads; with scores of all heads in one array."""

    def select(captured: Captured, query: jax.Array, key: jax.Array, weights: jax.Array, positions: jax.Array):
        visible = positions[:, None] >= jnp.arange(problem.S)[None]
        if at_once:
            products = jnp.einsum("bthd,bsd->bths", query, key, preferred_element_type=jnp.float32)
            scores = (weights[..., None] * jax.nn.relu(products)).sum(axis=2)
            return jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), problem.selected)[1]
        best = lambda *arrays: jflex.select_keys(jflex.indexer_scores(*arrays), problem.selected, visible=visible)
        return jax.vmap(best)(query, key, weights)

    shapes = ((problem.B, problem.T, problem.Hq, problem.D), (problem.B, problem.S, problem.D))
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, shape, largest: jax.random.randint(key, shape, -largest, largest + 1)
    vectors = [draw(x, shape, _LARGEST).astype(problem.dtype) for x, shape in zip(keys, shapes, strict=False)]
    weights = draw(keys[2], shapes[0][:3], 8).astype(jnp.float32) / 8
    return select, (*vectors, weights, jnp.arange(problem.S - problem.T, problem.S))


Peers = dict[str, Callable[[Problem, BoundMods], Program]]
_SERVED: Peers = {
    **{name: functools.partial(_jflex, on_gpu=named) for name, named in IMPLEMENTATIONS.items()},
    "jflex-invariant": functools.partial(_jflex, config=jflex.Config(batch_invariant=True)),
    "jflex-contiguous": _contiguous,
    "jflex-joined": _joined,
    "jflex-flat": functools.partial(_paged, sharing=True),
    "jflex-copies": _paged,
    "jax-cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_jax_nn, implementation="xla"),
    "jax-xla-latents": _latents_jax_nn,
}
_SPARSE: Peers = {
    **{name: functools.partial(_sparse, on_gpu=named) for name, named in IMPLEMENTATIONS.items()},
    "jax-xla-latents": _gathered,
}
_INDEXERS: Peers = {"jflex": _indexer, "jax-xla-latents": functools.partial(_indexer, at_once=True)}
