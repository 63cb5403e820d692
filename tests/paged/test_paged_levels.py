"""Levels over pages: requests that begin alike read shared pages once, and levels without a softmax add up."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from tests.calls.test_cascade import BACKENDS, HKV, HQ, MODS, D, backends, causal
from tests.support.rows import in_turns

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


# --- `normalize="none"`: levels add up; `paged_cases` has pages

WEIGH = jflex.scores.sigmoid(-1.0)
N, S = 6, 70


def weighed():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (N, HQ, D), (1, S, HKV, D), (1, S, HKV, D)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@jax.jit
def dense(q, key, value):
    """The definition: rows are the last positions."""
    out = jflex.flex_attention(
        q[None], key, value, lambda s, b, h, q, k: WEIGH(s, b, h, q + S - N, k),
        mask_mod=lambda b, h, q, k: q + S - N >= k, normalize="none", implementation="reference",
    )  # fmt: skip
    return out[0]


def level(key, value, start, end):
    return jflex.CascadeLevel.dense(key[:, start:end], value[:, start:end], qo_indptr=jnp.array([0, N]), start=start)


@pytest.mark.full
@pytest.mark.parametrize(
    ("implementation", "ends"), [("reference", (0, S)), ("xla", (0, 33, 33, S)), ("triton", (0, 10, 64, S))]
)
def test_levels_add_up(implementation, ends):
    q, key, value = weighed()
    levels = [level(key, value, *pair) for pair in itertools.pairwise(ends)]
    attend = jax.jit(lambda q, levels: jflex.cascade_attention(
        q, levels, positions=jnp.arange(S - N, S, dtype=jnp.int32), score_mod=WEIGH, mask_mod=causal,
        normalize="none", implementation=implementation, config=jflex.Config(interpret=True),
    ))  # fmt: skip
    np.testing.assert_allclose(attend(q, levels), dense(q, key, value), rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_no_levels_give_zeros():
    assert not jflex.cascade_attention(weighed()[0], [], normalize="none").any()


def of_pages(**options):
    q, key, value = weighed()
    cache = PagedCache.create(8, 16, HKV, D, dtype=jnp.float32)
    table = jnp.array([[3, 5, 1, 7, 2]])
    slots = jflex.paged.slots_of(table[0], jnp.arange(S, dtype=jnp.int32), 16)
    cache = jflex.paged.write(cache, key[0], value[0], slots)
    batch = PagedBatch(jnp.array([0, N]), jnp.array([S]), table)
    return jflex.paged_attention(q, cache, batch, score_mod=WEIGH, mask_mod=causal, **options)


@pytest.mark.full
def test_an_output_mod_gets_no_lse():
    def halved(out, lse, b, h, q_idx):
        assert lse is None
        return out * 0.5

    options = {"normalize": "none", "implementation": "xla"}
    plain, modified = (
        jax.jit(lambda more=more: of_pages(**options, **more))() for more in ({}, {"output_mod": halved})
    )
    np.testing.assert_allclose(modified, 0.5 * plain, rtol=1e-6)
    np.testing.assert_allclose(plain, dense(*weighed()), rtol=2e-5, atol=2e-5)
