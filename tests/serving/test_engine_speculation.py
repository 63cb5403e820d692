"""Speculation in the engine, where it is more than the same tokens: runs of accepted drafts, budgets, memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine
from flax_layers.serving.device.options import Program
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.engine.packing import pack
from tests.cases.engine_cases import (
    CHUNKS,
    COUNT,
    PROMPTS,
    SYSTEM,
    Client,
    engine_of,
    foresee,
    outputs,
    recomputed,
    run,
)
from tests.models.test_models import SMALL

pytestmark = pytest.mark.full
DRAFTS = {"draft_tokens": 5}


def accepted(engine: Engine) -> int:
    stats = engine.stats()
    assert 0 <= stats.accepted_tokens <= stats.drafted_tokens
    return stats.accepted_tokens


def test_accepted_tokens_are_cached(monkeypatch):
    """Their pages are hit by a request that goes on where the first one ended."""
    prompt = (*PROMPTS[1], *recomputed(PROMPTS[1])[:9])
    foresee(monkeypatch, {PROMPTS[1]: recomputed(PROMPTS[1]), prompt: []})
    engine = engine_of(**DRAFTS)
    first = outputs(engine, PROMPTS[1:2])[0]
    second = Client(engine, prompt, max_tokens=1)
    run(engine)
    assert first == [*recomputed(PROMPTS[1])[:9], *second.tokens]
    assert second.ticket.hit_tokens == (len(prompt) - 1) // 4 * 4
    assert accepted(engine) > 0


def test_a_budget_gives_prompts_precedence(monkeypatch):
    """Drafts take what decoding and prompts leave."""
    foresee(monkeypatch)
    engine = engine_of(**CHUNKS, **DRAFTS)
    first = Client(engine, PROMPTS[0])
    engine.step()
    second = Client(engine, PROMPTS[1])  # 25 tokens, 8 in each step
    for _ in range(4):
        engine.step()
    assert engine.stats().drafted_tokens == 0
    run(engine)
    assert [first.tokens, second.tokens] == [recomputed(PROMPTS[0]), recomputed(PROMPTS[1])]
    assert accepted(engine) > 0


def test_repetitive_text_takes_fewer_steps():
    """By real look-up; both engines give the same tokens."""
    prompts, count = [(1, 2, 3, 4) * 4, (5,) * 9, (*SYSTEM, *SYSTEM[:6])], 36
    plain, speculating = engine_of(), engine_of(**DRAFTS, draft_match=1)
    right = outputs(plain, prompts, max_tokens=count)
    assert outputs(speculating, prompts, max_tokens=count) == right
    assert accepted(speculating) > count / 2
    assert speculating.stats().steps < plain.stats().steps * 0.9
    assert plain.stats().drafted_tokens == 0


@pytest.mark.parametrize("place", [2, 4])
def test_a_stop_token_inside_an_accepted_run(place, monkeypatch):
    tokens = recomputed(PROMPTS[2])
    foresee(monkeypatch)
    engine = engine_of(**DRAFTS)
    client = Client(engine, PROMPTS[2], stop_tokens=(tokens[place],))
    other = Client(engine, PROMPTS[1])
    run(engine)
    assert client.tokens == tokens[: tokens.index(tokens[place])]
    assert client.reason == "stop"
    assert other.tokens == recomputed(PROMPTS[1])
    assert engine.stats().generated_tokens == len(client.tokens) + COUNT


@pytest.mark.parametrize("most", [1, 2, 5])
def test_limits_inside_an_accepted_run(most, monkeypatch):
    """Of the request, and of the context."""
    long = (*SYSTEM, *SYSTEM, *SYSTEM)[:60]
    foresee(monkeypatch, {PROMPTS[0]: recomputed(PROMPTS[0]), long: [*recomputed(long, count=4), 1, 2, 3]})
    engine = engine_of(**DRAFTS)
    client, whole = Client(engine, PROMPTS[0], max_tokens=most), Client(engine, long, max_tokens=None)
    run(engine)
    assert client.tokens == recomputed(PROMPTS[0])[:most]
    assert whole.tokens == recomputed(long, count=4)
    assert {client.reason, whole.reason} == {"length"}


def test_other_requests_beside_speculated_ones(monkeypatch):
    """Penalties and log probabilities are not speculated, and come out as without."""
    options = [
        {},
        {"penalties": Penalties(frequency_penalty=1.5)},
        {"logprobs": 2},
        {"sampling": Sampling(1.0, seed=3)},
        {"sampling": Sampling(0.8, seed=4), "logprobs": 1, "penalties": Penalties(presence_penalty=1.0)},
    ]
    outcomes = []
    for settings in ({}, DRAFTS):
        engine = engine_of(**settings)
        outcomes.append([Client(engine, prompt, **each) for prompt, each in zip(PROMPTS, options, strict=False)])
        run(engine)
        foresee(monkeypatch, {prompt: x.tokens for prompt, x in zip(PROMPTS, outcomes[0], strict=False)})
    assert accepted(engine) > 0
    for without, client in zip(*outcomes, strict=True):
        assert client.tokens == without.tokens
        for one, other in zip(client.logprobs, without.logprobs, strict=True):
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", None), ("float32", "float8_e4m3fn")])
def test_a_step_holds_no_second_cache(dtype, held):
    """With the moves of accepted keys; the cache is 37 MB and more. `test_paged_cache.py` compiles them for a GPU.

    XLA's CPU compiler once widened caches of bfloat16 and of eight-bit floats (`jflex.backends.xla.narrow`).
    """
    model = Decoder(SMALL, dtype=dtype, implementation="xla", rngs=nnx.Rngs(0))
    engine = engine_of(model, num_pages=6000, page_size=64, draft_tokens=7, poison=False, cache_dtype=held)
    executor = engine._executor
    size = sum(x.nbytes for x in jax.tree.leaves(executor._state.cache))
    shape = engine.options.shapes(SMALL)[-1]
    assert shape.drafts
    arguments = executor._parameters, executor._state, jnp.asarray(pack([], shape, no_slot=4))
    lowered = executor._step.lower(*arguments, program=Program(shape, is_greedy=True))
    memory = lowered.compile().memory_analysis()  # pyright: ignore
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.05 * size
