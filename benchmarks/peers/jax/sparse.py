"""A decoding step of sparse latent attention, and of the indexer that selects its keys (DeepSeek-V3.2): the JAX peers.

Queries select positions at random, in no order, as the best scores lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax.attention import IMPLEMENTATIONS
from benchmarks.peers.jax.inputs import QK_HEAD_DIM, Cache, Program, contiguous_inputs, on_gpu_or_xla, paged_inputs
from benchmarks.problems import Problem

_LARGEST = 2  # of the integers in queries and keys of the indexer, so that scores are exact in any order of summation


def program(peer: str, problem: Problem) -> Program:
    """A peer's function and its arguments."""
    peers = _INDEXERS if problem.keys == "indexer" else _ATTENTIONS
    if peer not in peers:
        raise NotImplementedError(f"{peer} is not measured with {problem.label}.")
    function, inputs = peers[peer](problem)
    return lambda captured, *arrays: function(*arrays), ({}, *inputs)


def selected_positions(problem: Problem) -> np.ndarray:
    """Selection of each query, int32 [B * T, selected]: distinct visible positions."""
    generator, positions = np.random.default_rng(3), []
    for _ in range(problem.B):
        for row in range(problem.T):
            visible = problem.S - problem.T + row + 1
            positions.append(generator.permutation(visible)[: problem.selected])
    return np.stack(positions).astype(np.int32)


def _sparse(problem: Problem, on_gpu: str | None) -> Program:
    def attend(query: jax.Array, cache: Cache, batch: jflex.paged.PagedBatch, indices: jax.Array) -> jax.Array:
        return jflex.sparse_mla_attention(
            query, cache, batch, indices, qk_head_dim=QK_HEAD_DIM, implementation=on_gpu_or_xla(on_gpu)
        )

    return attend, (*paged_inputs(problem), jnp.asarray(selected_positions(problem)))


def _gathered(problem: Problem) -> Program:
    """The selected rows of contiguous latents in a new array, and `jax.nn` over it."""
    query, rows, _, _ = contiguous_inputs(problem)
    indices = jnp.asarray(selected_positions(problem)).reshape(problem.B, problem.T, -1)

    def attend(query: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
        chosen = jax.vmap(lambda rows, indices: rows[indices])(rows, indices)  # [B, T, selected, 1, D]
        each = lambda x: x.reshape(problem.B * problem.T, -1, *x.shape[-2:])
        how = {"scale": QK_HEAD_DIM**-0.5, "implementation": "xla"}
        out = jax.nn.dot_product_attention(each(query[:, :, None]), each(chosen), each(chosen), **how)
        return out[..., : problem.value_size]

    return attend, (query, rows, indices)


_ATTENTIONS: dict[str, Callable[[Problem], Program]] = {
    **{name: functools.partial(_sparse, on_gpu=named) for name, named in IMPLEMENTATIONS.items()},
    "jax-xla-latents": _gathered,
}


def _indexer_inputs(problem: Problem) -> tuple[jax.Array, ...]:
    """Queries, keys, weights of heads, and positions of the queries."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, shape, largest: jax.random.randint(key, shape, -largest, largest + 1)
    query = draw(keys[0], (problem.B, problem.T, problem.Hq, problem.D), _LARGEST).astype(problem.dtype)
    key = draw(keys[1], (problem.B, problem.S, problem.D), _LARGEST).astype(problem.dtype)
    weights = draw(keys[2], (problem.B, problem.T, problem.Hq), 8).astype(jnp.float32) / 8
    return query, key, weights, jnp.arange(problem.S - problem.T, problem.S)


def _indexer(problem: Problem) -> Program:
    def select(query: jax.Array, key: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
        visible = positions[:, None] >= jnp.arange(problem.S)[None]
        best = lambda *arrays: jflex.select_keys(jflex.indexer_scores(*arrays), problem.selected, visible=visible)
        return jax.vmap(best)(query, key, weights)

    return select, _indexer_inputs(problem)


def _indexer_at_once(problem: Problem) -> Program:
    """Scores of all heads in one array."""

    def select(query: jax.Array, key: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
        products = jnp.einsum("bthd,bsd->bths", query, key, preferred_element_type=jnp.float32)
        scores = (weights[..., None] * jax.nn.relu(products)).sum(axis=2)
        visible = positions[:, None] >= jnp.arange(problem.S)[None]
        return jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), problem.selected)[1]

    return select, _indexer_inputs(problem)


_INDEXERS: dict[str, Callable[[Problem], Program]] = {"jflex": _indexer, "jax-xla-latents": _indexer_at_once}
