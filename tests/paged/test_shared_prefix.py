"""Requests that begin with the same pages read them once: the same attention. `tests/serving` has the engine."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from tests.calls.test_cascade import BACKENDS, HKV, HQ, MODS, D, backends
from tests.support.rows import in_turns
from tests.support.traces import Traced

PAGE = 8
LENGTHS = np.array([41, 30, 37, 12, 0, 25], np.int32)
QUERIES = np.array([1, 3, 1, 2, 0, 1], np.int32)


def paged_case() -> tuple[jax.Array, PagedCache, PagedBatch]:
    """Six requests, of which the first three begin with the same three pages; unused slots hold NaN."""
    rng = np.random.default_rng(0)
    table = np.zeros((6, 7), np.int32)
    free = iter(rng.permutation(np.arange(1, 40)))
    shared = [next(free) for _ in range(3)]
    k, v = (np.full((40, PAGE, HKV, D), np.nan, np.float32) for _ in range(2))
    for r, length in enumerate(LENGTHS):
        for p in range(-(-length // PAGE)):
            table[r, p] = shared[p] if r < 3 and p < 3 else next(free)
            used = min(PAGE, length - p * PAGE)
            if np.isnan(k[table[r, p], 0, 0, 0]):
                k[table[r, p], :used], v[table[r, p], :used] = rng.normal(size=(2, used, HKV, D))
    indptr = np.concatenate([[0], np.cumsum(QUERIES)]).astype(np.int32)
    q = jnp.asarray(rng.normal(size=(indptr[-1] + 2, HQ, D)), jnp.float32)  # two rows of padding
    return q, PagedCache(jnp.asarray(k), jnp.asarray(v)), PagedBatch(*map(jnp.asarray, (indptr, LENGTHS, table)))


def attend(requests, tokens, mods, **how):
    q, cache, batch = paged_case()
    rows = {"positions": token_positions(batch, len(q)), "requests": token_requests(batch, len(q))}

    @jax.jit
    def both(requests, tokens):
        levels = jflex.shared_prefix_levels(cache, batch, requests, tokens)
        flat = jflex.paged_attention(q, cache, batch, **mods.given, return_lse=True, implementation="reference")
        return jflex.cascade_attention(q, levels, **rows, **mods.given, return_lse=True, **how), flat

    with jax.default_matmul_precision("highest"):
        return both(jnp.int32(requests), jnp.int32(tokens))


@pytest.mark.full
@in_turns
@backends
@pytest.mark.parametrize(("mods", "requests", "tokens"), [
    ("causal", 0, 0), ("alibi", 3, 16), ("bias_by_key_and_request", 2, 24), ("causal", 1, 40),
])  # fmt: skip
def test_equals_paged_attention(mods, requests, tokens, backend):
    """Queries may lie within the shared pages: those of the second request begin at position 27, all others later."""
    found, right = attend(requests, tokens, MODS[mods], **BACKENDS[backend])
    count = int(QUERIES.sum())
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a[:count], b[:count], rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_no_requests():
    _, cache, _ = paged_case()
    nobody = PagedBatch(jnp.zeros(1, jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros((0, 7), jnp.int32))
    levels = jflex.shared_prefix_levels(cache, nobody, 0, 0)
    assert not jflex.cascade_attention(jnp.ones((3, HQ, D)), levels).any()


@pytest.mark.full
def test_other_numbers_do_not_compile_again():
    q, cache, batch = paged_case()
    positions = token_positions(batch, len(q))
    levels = functools.partial(jflex.shared_prefix_levels, cache, batch)
    traced = Traced(lambda n, t: jflex.cascade_attention(q, levels(n, t), positions=positions, implementation="xla"))
    for numbers in ((3, 24), (2, 8), (0, 0)):
        jax.jit(traced)(*map(jnp.int32, numbers))
    assert traced.count == 1


ERRORS = {
    "many requests": ((7, 8), ValueError, "`requests` must be one number from 0 to 6. Got 7"),
    "no whole page": (
        (3, 20),
        ValueError,
        "`tokens` must be one number from 0 to 56, a multiple of the page size 8. G",
    ),
    "beyond the table": ((3, 64), ValueError, "`tokens` must be one number from 0 to 56, .* Got 64"),
    "an array": ((jnp.zeros(2, jnp.int32), 8), ValueError, "`requests` must be one number .* Got .*2"),
    "a float": ((3.0, 8), TypeError, "`requests` must be an int32 array of one number. Got float"),
    "a bool": ((True, 8), TypeError, "`requests` must be an int32 array of one number. Got bool"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_numbers(name):
    numbers, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        jflex.shared_prefix_levels(*paged_case()[1:], *numbers)


@pytest.mark.full
def test_trees_are_refused():
    _, cache, batch = paged_case()
    with pytest.raises(ValueError, match="`batch` must have no `ancestors`: levels have no trees"):
        jflex.shared_prefix_levels(cache, dataclasses.replace(batch, ancestors=jnp.zeros((6, 3), jnp.int32)), 3, 8)
