"""The JAX peers where queries continue sequences: decoding, uneven lengths, pages, shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax_peers import BoundMods, Captured
from benchmarks.problems import Problem
from benchmarks.request_lengths import Requests, requests_of
from benchmarks.variants import Mods

# A function, and its arguments; all arrays are among them, so that none is a constant of the program.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def program(peer: str, problem: Problem, mods: BoundMods, captured: Captured) -> Program:
    """A peer's function and its arguments for a problem.

    Args:
      peer: A name in `benchmarks.peers.table.PEERS`.
      problem: One that is `served`.
      mods: The problem's mods, from its captured arrays.
      captured: These.
    """
    function, inputs = _MAKE[peer](problem, mods)
    return function, (captured, *inputs)


def _implementation() -> str:
    return "triton" if jax.default_backend() == "gpu" else "xla"


def _mods(problem: Problem, mods: Mods) -> Mods:
    """The last position attends to every key, so one token needs no mask, unless the problem is about the mask."""
    return mods if problem.T > 1 or problem.variant == "causal" else mods._replace(mask=None)


def _offset(problem: Problem, mods: Mods, lengths: jax.Array | None) -> Mods:
    """Where `q_idx` begins with 0 for the call, it continues the sequence."""
    begins = problem.S - problem.T if lengths is None else lengths - problem.T
    return Mods(*(None if mod is None else jflex.with_offset(mod, begins) for mod in mods))


def _normal(number: int, shape: tuple[int, ...], problem: Problem) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, problem.dtype)


def _contiguous(problem: Problem) -> tuple[Any, ...]:
    """Query, key, value and the lengths, or None; where there are pages, their contents in order."""
    if problem.page:
        query, cache, batch = _paged_inputs(problem)
        shape = (problem.B, -1, problem.Hkv, problem.D)
        key, value = (x[batch.page_table].reshape(shape)[:, : problem.S] for x in (cache.k, cache.v))
        return query[:, None], key, value, None
    query = _normal(0, (problem.B, problem.T, problem.Hq, problem.D), problem)
    key, value = (_normal(number, (problem.B, problem.S, problem.Hkv, problem.D), problem) for number in (1, 2))
    return query, key, value, jnp.asarray(requests_of(problem).keys) if problem.lengths else None


def _flex(problem: Problem, mods: BoundMods) -> Program:
    def attend(captured: Captured, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        mask, score = _offset(problem, _mods(problem, mods(captured)), lengths)
        known = {} if lengths is None else {"kv_lengths": lengths}
        return jflex.flex_attention(query, key, value, score, mask_mod=mask, implementation=_implementation(), **known)

    return attend, _contiguous(problem)


def _jax_nn(implementation: Any) -> Callable[[Problem, BoundMods], Program]:
    def make(problem: Problem, mods: BoundMods) -> Program:
        def attend(captured: Captured, query: Any, key: Any, value: Any, lengths: Any) -> Any:
            return jax.nn.dot_product_attention(
                query, key, value, key_value_seq_lengths=lengths, implementation=implementation
            )

        return attend, _contiguous(problem)

    return make


def _tables(problem: Problem, requests: Requests, prefix: int) -> tuple[np.ndarray, int]:
    """Pages at random places, of which those of the first `prefix` keys are shared; and their total count."""
    pages = -(-requests.keys // problem.page)
    shared = prefix // problem.page
    count = 1 + shared + int((pages - shared).sum())  # page 0 is reserved
    places = np.random.default_rng(0).permutation(np.arange(1, count))
    table = np.zeros((problem.B, pages.max()), np.int32)
    table[:, :shared] = places[:shared]
    used = shared
    for row, own in zip(table, pages - shared, strict=True):
        row[shared : shared + own] = places[used : used + own]
        used += own
    return table, count


def _paged_inputs(problem: Problem, prefix: int = 0) -> tuple[Any, ...]:
    """Packed queries, the cache and the batch."""
    requests = requests_of(problem)
    table, count = _tables(problem, requests, prefix)
    shape = (count, problem.page, problem.Hkv, problem.D)
    cache = jflex.paged.PagedCache(_normal(1, shape, problem), _normal(2, shape, problem))
    batch = jflex.paged.PagedBatch(*map(jnp.asarray, (requests.indptr, requests.keys, table)))
    return _normal(0, (int(requests.queries.sum()), problem.Hq, problem.D), problem), cache, batch


def _attend_paged(problem: Problem, mods: BoundMods) -> Callable[..., Any]:
    def attend(captured: Captured, query: Any, cache: Any, batch: Any) -> Any:
        mask, score = _mods(problem, mods(captured))
        return jflex.paged_attention(
            query, cache, batch, score_mod=score, mask_mod=mask, implementation=_implementation()
        )

    return attend


def _paged(problem: Problem, mods: BoundMods) -> Program:
    return _attend_paged(problem, mods), _paged_inputs(problem)


def _flat(problem: Problem, mods: BoundMods) -> Program:
    """Every sequence loads the shared pages by itself."""
    return _attend_paged(problem, mods), _paged_inputs(problem, problem.prefix)


def _cascade(problem: Problem, mods: BoundMods) -> Program:
    """The shared pages are loaded once: the arrays are those of `_flat`, as two levels."""
    query, cache, batch = _paged_inputs(problem, problem.prefix)
    pages = problem.prefix // problem.page
    prefix = jnp.array([problem.prefix], jnp.int32)
    rows = jnp.array([0, query.shape[0]], jnp.int32)
    shared = jflex.paged.PagedBatch(rows, prefix, batch.page_table[:1, :pages])
    own = jflex.paged.PagedBatch(batch.qo_indptr, batch.kv_lengths - problem.prefix, batch.page_table[:, pages:])

    def attend(captured: Captured, query: Any, cache: Any, shared: Any, own: Any) -> Any:
        level = jflex.CascadeLevel.paged
        levels = [level(cache, shared), level(cache, own, start=problem.prefix)]
        return jflex.cascade_attention(query, levels, implementation=_implementation())

    return attend, (query, cache, shared, own)


def _jflex(problem: Problem, mods: BoundMods) -> Program:
    return (_cascade if problem.prefix else _paged if problem.page else _flex)(problem, mods)


_MAKE: dict[str, Callable[[Problem, BoundMods], Program]] = {
    "jflex": _jflex,
    "jflex-contiguous": _flex,
    "jflex-flat": _flat,
    "jflex-copies": _paged,  # every sequence has pages of its own
    "jax-cudnn": _jax_nn("cudnn"),
    "jax-xla": _jax_nn("xla"),
}
