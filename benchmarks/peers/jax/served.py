"""The JAX peers in serving: queries continue sequences in decoding, with uneven lengths, pages or shared prefixes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jflex
from benchmarks.peers.jax import sparse
from benchmarks.peers.jax.attention import BoundMods, Captured
from benchmarks.peers.jax.inputs import QK_HEAD_DIM, Cache, Program, contiguous_inputs, on_gpu_or_xla, paged_inputs
from benchmarks.problems import Problem
from benchmarks.variants import Mods

Batch = jflex.paged.PagedBatch
Config = jflex.Config | None


def served_program(peer: str, problem: Problem, mods: BoundMods, captured: Captured) -> Program:
    """A peer's function and its arguments for a problem that is `served`."""
    if problem.keys == "rolling":
        from benchmarks.peers.jax import rolling  # needs Flax

        return rolling.program(peer, problem)
    if problem.selected:
        return sparse.program(peer, problem)
    function, inputs = _SERVED[peer](problem, mods)
    return function, (captured, *inputs)


def _served_mods(problem: Problem, mods: Mods) -> Mods:
    """The last position attends to every key, so one token needs no mask, unless the problem is about the mask."""
    return mods if problem.T > 1 or problem.variant == "causal" else mods._replace(mask=None)


def _contiguous(problem: Problem, mods: BoundMods, on_gpu: str | None = None, config: Config = None) -> Program:
    def attend(captured: Captured, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None):
        first = problem.S - problem.T if lengths is None else lengths - problem.T  # the position of q_idx 0
        bound = _served_mods(problem, mods(captured))
        mask, score = (None if mod is None else jflex.with_offset(mod, first) for mod in bound)
        options = {} if lengths is None else {"kv_lengths": lengths}
        return jflex.flex_attention(
            query, key, value, score, mask_mod=mask, implementation=on_gpu_or_xla(on_gpu), config=config, **options
        )

    return attend, contiguous_inputs(problem)


def _jax_nn(problem: Problem, mods: BoundMods, implementation: str) -> Program:
    def attend(captured: Captured, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None):
        options = {"key_value_seq_lengths": lengths, "implementation": implementation}
        return jax.nn.dot_product_attention(query, key, value, **options)

    return attend, contiguous_inputs(problem)


def _latents_jax_nn(problem: Problem, mods: BoundMods) -> Program:
    """Rows of latents as keys and as values, since `jax.nn` takes one head size; their rotated columns are dropped."""
    query, rows, _, _ = contiguous_inputs(problem)

    def attend(captured: Captured, query: jax.Array, rows: jax.Array) -> jax.Array:
        positions = jnp.arange(problem.S - problem.T, problem.S)
        mask = (positions[:, None] >= jnp.arange(problem.S)[None])[None, None] if problem.T > 1 else None
        out = jax.nn.dot_product_attention(query, rows, rows, mask=mask, scale=QK_HEAD_DIM**-0.5, implementation="xla")
        return out[..., : problem.value_size]

    return attend, (query, rows)


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


_SERVED: dict[str, Callable[[Problem, BoundMods], Program]] = {
    "jflex": _jflex,
    "jflex-mosaic": functools.partial(_jflex, on_gpu="mosaic_gpu"),
    "jflex-triton": functools.partial(_jflex, on_gpu="triton"),
    "jflex-official": functools.partial(_jflex, on_gpu="official_triton"),
    "jflex-invariant": functools.partial(_jflex, config=jflex.Config(batch_invariant=True)),
    "jflex-contiguous": _contiguous,
    "jflex-joined": _joined,
    "jflex-flat": functools.partial(_paged, sharing=True),
    "jflex-copies": _paged,
    "jax-cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_jax_nn, implementation="xla"),
    "jax-xla-latents": _latents_jax_nn,
}
