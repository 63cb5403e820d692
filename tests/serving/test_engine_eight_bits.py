"""The engine with a cache of eight bits: what it adds to `test_engine.py`, where tokens are those of a plain loop."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.generate import generate
from flax_layers.serving import Engine, EngineOptions
from flax_layers.serving.device.step import empty_state, poison_pages
from jflex.paged import PagedCache
from tests.cases.engine_cases import COUNT, PROMPTS, SIZES, Client, engine_of, looped, model, outputs, run
from tests.serving import test_streaming_llm_engine as streams
from tests.support.rows import tiers

NAMES = ("int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.full
def test_streaming_rotates_keys_of_eight_bits():
    engine = Engine(
        model("streaming"), EngineOptions(**streams.SIZES | {"cache_dtype": "float8_e4m3fn", "num_pages": 9})
    )
    for _ in range(2):
        right = [looped(prompt, "streaming", "float8_e4m3fn", streams.STREAMING) for prompt in PROMPTS]
        assert outputs(engine, PROMPTS) == right
    assert engine.stats().preemptions > 0


@pytest.mark.full
def test_generation_without_the_engine():
    name, how = "float8_e4m3fn", {"max_tokens": COUNT, "stop_tokens": (), "cache": "paged"}
    found = generate(model("latent"), PROMPTS, cache_dtype=name, **how).results()
    assert [one.tokens for one in found] == [looped(prompt, "latent", name) for prompt in PROMPTS]


# The largest error of a log probability of the best five tokens after each prompt, and half as much again.
ERRORS = {"int8": 0.048, "float8_e4m3fn": 0.118, "float8_e5m2": 0.385}


@tiers(full={"name": "float8_e4m3fn"}, rest="long")
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_near_those_without(name):
    found = []
    for dtype in (None, name):
        engine = engine_of(cache_dtype=dtype)
        clients = [Client(engine, prompt, max_tokens=1, logprobs=20) for prompt in PROMPTS]
        run(engine)
        found.append([dict(client.logprobs[0].top) for client in clients])
    pairs = [(right[x], other[x]) for right, other in zip(*found, strict=True) for x in list(right)[:5] if x in other]
    errors = [abs(right - other) for right, other in pairs]
    assert len(errors) > 30
    assert 1e-6 < max(errors) < ERRORS[name]


@pytest.mark.parametrize(("kind", "name"), [*(("small", name) for name in NAMES), ("latent", "float8_e4m3fn")])
def test_poison_makes_every_number_of_a_page_nan(kind, name):
    options = EngineOptions(**SIZES | {"cache_dtype": name, "num_pages": 5})
    state = poison_pages(empty_state(model(kind), options, None), jnp.array([0, 1, 0, 0, 1], jnp.int32))
    cache, wide = state.cache, lambda x: np.asarray(x.astype(jnp.float32))
    if isinstance(cache, PagedCache):
        held = [wide(x) * wide(scale)[..., None] for x, scale in zip((cache.k, cache.v), cache.scales, strict=True)]
    else:
        held = [wide(cache.rows), wide(cache.rope), wide(cache.scale)]
    for x in held:
        assert np.isnan(x[:, [1, 4]]).all()
        assert not np.isnan(x[:, [0, 2, 3]]).any()
