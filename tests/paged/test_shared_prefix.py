"""Requests that begin with the same pages read them once: the same attention, the same tokens."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from flax_layers.sampling import Sampling
from flax_layers.serving import EngineOptions
from flax_layers.serving.device.options import Shape
from flax_layers.serving.engine.cascades import Cascades, Shared
from flax_layers.serving.engine.requests import Request
from flax_layers.serving.engine.scheduler import Chunk
from flax_layers.serving.engine.sequence import Sequence
from jflex.paged import PagedBatch, PagedCache, PagePool, PrefixCache, token_positions, token_requests
from tests.calls.test_cascade import BACKENDS, HKV, HQ, MODS, D, backends
from tests.cases.engine_cases import PROMPTS, SYSTEM, Client, engine_of, model, recomputed, run
from tests.cases.train_cases import counted_compilations
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
    ("causal", 3, 24), ("alibi", 3, 16), ("bias_by_key_and_request", 2, 24), ("window", 3, 24), ("causal", 0, 0),
    ("causal", 3, 0), ("causal", 1, 40),
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


# --- the engine


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 9, "max_requests": 3}, {"num_pages": 24}], ids=str)
def test_tokens_are_those_of_full_recomputation(options):
    engine = engine_of(model(), cascade_bytes=1, **options)
    for _ in range(2):
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run(engine)
        assert [client.tokens for client in clients] == [recomputed(prompt) for prompt in PROMPTS]
    assert 0 < engine.stats().cascade_steps < engine.stats().steps


@pytest.mark.full
def test_drawn_tokens_are_the_same():
    tokens = []
    for cascade_bytes in (1, None):
        engine = engine_of(model(), cascade_bytes=cascade_bytes, max_step_tokens=64)
        clients = [Client(engine, (*SYSTEM, n), sampling=Sampling(1.0, seed=n), logprobs=2) for n in range(5)]
        run(engine)
        tokens.append([client.tokens for client in clients])
        assert (engine.stats().cascade_steps > 0) == (cascade_bytes == 1)
    assert tokens[0] == tokens[1]


@pytest.mark.full
def test_nothing_is_compiled_after_warm_up():
    engine, reports = engine_of(model(), cascade_bytes=1, max_requests=4, max_step_tokens=16, poison=False), []
    engine.warm_up(lambda done, total: reports.append((done, total)))
    assert reports[-1] == (len(reports), len(reports))
    for prompt in PROMPTS:
        Client(engine, prompt, sampling=Sampling(1.0))
    with counted_compilations() as compiled:
        run(engine)
    assert not compiled
    assert engine.stats().cascade_steps


def test_when_a_cascade_pays():
    """The shapes of decoding, and among them only those that could save enough."""
    found = Cascades(EngineOptions(max_requests=64, page_size=64, cascade_bytes=1_000_000), token_bytes=100)
    assert found.pays(11, 1000)
    assert not found.pays(10, 1000)
    shapes = [Shape(1, 1, 512), Shape(4, 4, 8), Shape(4, 4, 512), Shape(64, 64, 8), Shape(128, 64, 512)]
    assert found.shapes(shapes) == [Shape(4, 4, 512), Shape(64, 64, 8)]
    assert Cascades(EngineOptions(cascade_bytes=None), token_bytes=100).shapes(shapes) == []


def test_the_best_prefix_is_found():
    """Against all groups of requests, over random trees of prefixes."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        pool = PagePool(200, 2)
        cache, chunks = PrefixCache(pool), []
        for number in range(int(rng.integers(0, 8))):
            tokens = rng.integers(0, 2, 2 * int(rng.integers(0, 7))).tolist()
            missing = cache.match(tokens)
            pages = [*missing.pages, *cache.alloc(len(tokens) // 2 - len(missing.pages))]
            sequence = Sequence(Request((1,)), 1, lambda event: None, np.zeros(0, np.int32), number)
            sequence.prefix = cache.insert(tokens, pages, missing)
            chunks.append(Chunk(sequence, 0, 1, samples=True))
        prefixes = [chunk.sequence.prefix.pages for chunk in chunks if chunk.sequence.prefix is not None]
        common = lambda start, prefixes=prefixes: sum(prefix[: len(start)] == start for prefix in prefixes)
        saved = {prefix[:n]: (common(prefix[:n]) - 1) * 2 * n for prefix in prefixes for n in range(1, len(prefix) + 1)}
        ordered, shared = Cascades(EngineOptions(page_size=2, cascade_bytes=1), 1).arrange(chunks)
        assert (shared.requests - 1) * shared.tokens == max([0, *saved.values()]) or shared == Shared()
        assert (shared == Shared()) == (max([0, *saved.values()]) == 0)
        assert sorted(map(id, ordered)) == sorted(map(id, chunks))
        first = [x.sequence.prefix.pages[: shared.tokens // 2] for x in ordered if x.sequence.prefix is not None]
        assert len(set(first[: shared.requests])) <= 1


def test_a_wrong_option():
    with pytest.raises(ValueError, match=re.escape("`cascade_bytes` must be at least 1. Got 0. Pass None")):
        EngineOptions(cascade_bytes=0)
