"""Sampling against numpy in float64, and what a row draws does not depend on the rows around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.sampling import Sampling, SamplingBatch, sample, scale_and_truncate, truncate

VOCABULARY = 50


def logits_of(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY)).astype(np.float32)


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Of the tokens of one row, by temperature, then top-k, then top-p, then min-p; equal ones stay or go together."""
    logits = logits.astype(np.float64) / sampling.temperature
    p = np.exp(logits - logits.max())
    if sampling.top_k:
        p[p < np.sort(p)[-min(sampling.top_k, p.size)]] = 0
    p /= p.sum()
    if sampling.top_p < 1:
        descending = np.sort(p)[::-1]
        needed = 1 + np.searchsorted(np.cumsum(descending), sampling.top_p)
        p[p < descending[min(needed, p.size) - 1]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


REQUESTS = {
    "plain": Sampling(1.0),
    "cold": Sampling(0.5),
    "top_k": Sampling(1.0, top_k=5),
    "top_p": Sampling(1.0, top_p=0.7),
    "hot_both": Sampling(2.0, top_k=12, top_p=0.9),
    "min_p": Sampling(1.0, min_p=0.2),
    "hot_all": Sampling(1.5, top_k=12, top_p=0.9, min_p=0.1),
    "one": Sampling(1.5, top_p=1e-6),
    "more_than_there_are": Sampling(1.0, top_k=1000, top_p=0.999),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_may_be_drawn(name):
    request, logits = REQUESTS[name], logits_of(20)
    found = jax.nn.softmax(scale_and_truncate(logits, SamplingBatch.from_requests([request] * 20)), axis=-1)
    np.testing.assert_allclose(found, [probabilities(row, request) for row in logits], rtol=2e-5, atol=1e-7)


def test_rows_of_a_batch_have_their_own_parameters():
    requests, logits = list(REQUESTS.values()), logits_of(len(REQUESTS))
    found = jax.nn.softmax(scale_and_truncate(logits, SamplingBatch.from_requests(requests)), axis=-1)
    np.testing.assert_allclose(found, list(map(probabilities, logits, requests)), rtol=2e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("name", ["top_k", "top_p", "hot_all"])
def test_frequencies_are_the_probabilities(name):
    """Each within five standard deviations."""
    request, count = REQUESTS[name], 20000
    row = logits_of(1)[0]
    batch = SamplingBatch.from_requests([request] * count)
    drawn = sample(np.broadcast_to(row, (count, VOCABULARY)), batch, jnp.arange(count))
    p = probabilities(row, request)
    found = np.bincount(drawn, minlength=VOCABULARY) / count
    assert np.all(np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / count))


def test_equal_tokens_stay_or_go_together():
    logits = jnp.array([[3.0, 2.0, 2.0, 1.0]] * 3)
    kept = truncate(logits, jnp.array([2, 0, 1]), jnp.array([1.0, 0.7, 1.0]))
    assert jnp.isfinite(kept).tolist() == [[True, True, True, False], [True, True, True, False], [True] + [False] * 3]


@pytest.mark.full
def test_a_row_draws_the_same_whatever_is_around_it():
    """Alone, among others, at another place, and beside rows that use other parameters."""
    requests = [Sampling(1.0, seed=3), Sampling(), Sampling(0.7, top_k=9, seed=3), Sampling(1.3, top_p=0.8, seed=5)]
    logits, positions = logits_of(4), jnp.array([7, 7, 2, 900])
    together = sample(logits, SamplingBatch.from_requests(requests), positions)
    alone = [
        sample(logits[i : i + 1], SamplingBatch.from_requests([request]), positions[i : i + 1])[0]
        for i, request in enumerate(requests)
    ]
    backwards = sample(logits[::-1], SamplingBatch.from_requests(requests[::-1]), positions[::-1])
    assert together.tolist() == [int(token) for token in alone] == backwards[::-1].tolist()


@pytest.mark.full
def test_seed_and_position_decide_the_draw():
    logits = np.zeros((64, VOCABULARY), np.float32)
    batch = lambda seed: SamplingBatch.from_requests([Sampling(1.0, seed=seed)] * 64)
    draw = lambda seed, first: sample(logits, batch(seed), first + jnp.arange(64))
    first, again, seeded, moved = draw(1, 0), draw(1, 0), draw(2, 0), draw(1, 1)
    assert first.tolist() == again.tolist()
    assert first[1:].tolist() == moved[:-1].tolist()
    for other in (seeded, moved):
        assert jnp.mean(first == other) < 0.2
    assert len(set(first.tolist())) > 25


@pytest.mark.parametrize("request_", [Sampling(), Sampling(1e-30), Sampling(1.0, top_k=1), Sampling(1e-6, top_p=0.5)])
def test_greedy(request_):
    logits = logits_of(6)
    chosen = sample(logits, SamplingBatch.from_requests([request_] * 6), jnp.arange(6))
    assert chosen.dtype == jnp.int32
    assert chosen.tolist() == logits.argmax(-1).tolist()


def test_parameters_that_no_row_uses_cost_nothing():
    assert jax.tree.leaves(SamplingBatch.from_requests([Sampling(top_k=3, top_p=0.5, seed=1)])) == []
    batch = SamplingBatch.from_requests([Sampling(1.0), Sampling()])
    assert (batch.top_k, batch.top_p) == (None, None)
    assert "sort" not in str(jax.make_jaxpr(sample)(logits_of(2), batch, jnp.arange(2)))


def test_a_top_k_beyond_int32_keeps_all_tokens():
    batch = SamplingBatch.from_requests([Sampling(1.0, top_k=k, seed=5) for k in (VOCABULARY, 1 << 31, 10**30)])
    assert len(set(sample(np.repeat(logits_of(1), 3, axis=0), batch, jnp.full(3, 7, jnp.int32)).tolist())) == 1
