"""What a request asks for: sampling, penalties, stop tokens, log probabilities; and several samples of one prompt."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from flax_layers.sampling import Sampling
from flax_layers.serving import Engine
from flax_layers.serving.device.penalties import Penalties
from tests.cases.engine_cases import (
    CHUNKS,
    COUNT,
    FEW,
    PROMPTS,
    SIZES,
    SYSTEM,
    Client,
    engine_of,
    foresee,
    model,
    outputs,
    recomputed,
    run,
    submit,
)
from tests.support.golden_models import logits_of

pytestmark = pytest.mark.full

DRAWN = [Sampling(0.9, top_k=40, top_p=0.95, seed=7), Sampling(1.0, seed=3), Sampling(0.7, min_p=0.1, seed=5)]


@pytest.mark.parametrize("sampling", DRAWN, ids=["truncated", "plain", "min_p"])
@pytest.mark.parametrize("options", [{}, {"draft_tokens": 5}, {"cascade_bytes": 1}], ids=["usual", "drafts", "cascade"])
def test_a_seed_draws_the_same_tokens_beside_others(options, sampling, monkeypatch):
    samplings = [sampling, *(Sampling(1.0, seed=n) for n in range(6))]
    prompts = [PROMPTS[1], *PROMPTS[:5], (*SYSTEM, 6)]
    alone = [outputs(engine_of(), [x], sampling=y)[0] for x, y in zip(prompts[:2], samplings, strict=False)]
    outcomes = []
    for more in ({}, options):
        engine = engine_of(**more)
        clients = [Client(engine, x, sampling=y) for x, y in zip(prompts, samplings, strict=True)]
        run(engine)
        outcomes.append([client.tokens for client in clients])
        foresee(monkeypatch, dict(zip(prompts, outcomes[0], strict=True)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][:2] == alone
    assert len({*map(tuple, outcomes[1])}) == len(prompts)
    assert (engine.stats().accepted_tokens > 10) == ("draft_tokens" in options)
    assert (engine.stats().cascade_steps > 0) == ("cascade_bytes" in options)


PENALTIES = [
    {"presence_penalty": 2.0, "frequency_penalty": 1.5},
    {"repetition_penalty": 5.0},
    {"logit_bias": ((36, -100.0), (61, -100.0), (7, 2.0))},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": ((2, 1.0),)},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_those_of_their_formulas(penalties):
    """Of a request that is preempted and hits a prefix, beside others without penalties."""
    engine = engine_of(**FEW)
    plain = [Client(engine, prompt) for prompt in PROMPTS[:3]]
    client = Client(engine, PROMPTS[1], penalties=Penalties(**penalties))
    run(engine)
    assert engine.stats().preemptions > 0
    text = [*PROMPTS[1]]
    for token in client.tokens:
        logits = np.asarray(logits_of(model(), np.array([text + [0] * (48 - len(text))], np.int32)))[0, len(text) - 1]
        generated = np.bincount(text[len(PROMPTS[1]) :], minlength=64)
        factor = penalties.get("repetition_penalty", 1)
        repeated = np.where(logits > 0, logits / factor, logits * factor)
        logits = np.where(np.isin(np.arange(64), text), repeated, logits)
        logits = logits - penalties.get("frequency_penalty", 0) * generated
        logits = logits - penalties.get("presence_penalty", 0) * (generated > 0)
        for biased, bias in penalties.get("logit_bias", ()):
            logits[biased] += bias
        assert token == np.argmax(logits)
        text.append(token)
    assert len(client.tokens) == COUNT
    assert plain[1].tokens != client.tokens


def test_a_slot_forgets_the_penalties_of_the_request_before():
    engine, strong = engine_of(), Penalties(logit_bias=((36, 100.0),))
    for options in ({"penalties": strong}, {"logprobs": 0}):
        clients = [Client(engine, PROMPTS[2], **options) for _ in range(SIZES["max_requests"])]
        run(engine)
    assert [client.tokens for client in clients] == [recomputed(PROMPTS[2])] * SIZES["max_requests"]


def test_stop_tokens():
    tokens, engine = recomputed(PROMPTS[2]), engine_of()
    client, other = Client(engine, PROMPTS[2], stop_tokens=(tokens[4],), logprobs=0), Client(engine, PROMPTS[1])
    run(engine)
    assert client.tokens == tokens[: tokens.index(tokens[4])]
    assert client.reason == "stop"
    assert other.tokens == recomputed(PROMPTS[1])
    assert len(client.logprobs) == len(client.tokens)


def test_logprobs_are_those_of_the_model():
    client = Client(engine := engine_of(), PROMPTS[1], logprobs=3)
    run(engine)
    text = np.array([[*PROMPTS[1], *client.tokens]], np.int32)
    logprobs = np.asarray(jax.nn.log_softmax(logits_of(model(), text)[0]))[len(PROMPTS[1]) - 1 :]
    assert client.tokens == recomputed(PROMPTS[1])
    for token, one, row in zip(client.tokens, client.logprobs, logprobs, strict=False):
        first = np.argsort(-row)[:3]
        assert [token for token, _ in one.top] == first.tolist()
        np.testing.assert_allclose([one.logprob, *[x for _, x in one.top]], [row[token], *row[first]], atol=1e-4)


@pytest.mark.parametrize("options", [{}, FEW | CHUNKS, {"draft_tokens": 5}, {"cascade_bytes": 1}], ids=str)
def test_log_probabilities_of_prompts(options):
    """Also of prompts that are cached, in chunks, beside others, of samples, and of requests that are preempted."""
    engine = engine_of(**options)
    outputs(engine, [PROMPTS[1]])
    plain = [Client(engine, prompt) for prompt in PROMPTS[:4]]
    scored = [*submit(engine, PROMPTS[1], [{"prompt_logprobs": 3}] * 2), Client(engine, (60,), prompt_logprobs=0)]
    run(engine)
    assert [x.tokens for x in plain] == [recomputed(x) for x in PROMPTS[:4]]
    assert [x.tokens for x in scored] == [recomputed(x) for x in (PROMPTS[1], PROMPTS[1], (60,))]
    assert scored[2].events[0].prompt_logprobs == (None,)
    logprobs = np.asarray(jax.nn.log_softmax(logits_of(model(), np.array([PROMPTS[1]], np.int32))[0]))
    for client in scored[:2]:
        first, *others = client.events[0].prompt_logprobs
        assert first is None
        assert not any(event.prompt_logprobs for event in client.events[1:])
        for token, one, row in zip(PROMPTS[1][1:], others, logprobs, strict=False):
            best = np.argsort(-row)[:3]
            assert [x for x, _ in one.top] == best.tolist()
            np.testing.assert_allclose([one.logprob, *[x for _, x in one.top]], [row[token], *row[best]], atol=1e-4)
        assert len(others) == len(PROMPTS[1]) - 1


@pytest.mark.parametrize("draft_tokens", [0, 5])
def test_min_tokens_and_bad_words(draft_tokens):
    prompt, engine = PROMPTS[1], engine_of(draft_tokens=draft_tokens)
    greedy = recomputed(prompt)
    pair = next((a, b) for a, b in itertools.pairwise(greedy) if a != b)
    ask = lambda **options: Client(engine, prompt, **options)
    short, least = (ask(stop_tokens=tuple(range(64)), **x, logprobs=0) for x in ({}, {"min_tokens": 1}))
    stop = tuple({*range(64)} - {greedy[0]})
    longer, banned, ended = ask(stop_tokens=stop, min_tokens=4), ask(bad_words=((greedy[0],),)), ask(bad_words=(pair,))
    run(engine)
    assert (short.tokens, longer.tokens[:4]) == ([], [greedy[0]] * 4)
    assert (len(least.tokens), least.reason) == (0, "stop")  # no token is left
    assert greedy[0] not in banned.tokens
    assert pair not in itertools.pairwise(ended.tokens)
    assert ended.tokens[: greedy.index(pair[0]) + 1] == greedy[: greedy.index(pair[0]) + 1]


# --- samples

SEEDED = [{"sampling": Sampling(1.0, seed=seed)} for seed in range(4)]
MIXED = [SEEDED[0] | {"penalties": Penalties(frequency_penalty=1.5)}, {"logprobs": 2}, SEEDED[2]]


def count_prompt_tokens(engine: Engine) -> list[int]:
    """Prompt tokens of each step from now on, as they are dispatched."""
    schedule, counts = engine._scheduler.schedule, []

    def counting(**options):
        chunks = schedule(**options)
        counts.append(sum(max(0, min(x.first + x.count, len(x.sequence.request.prompt)) - x.first) for x in chunks))
        return chunks

    engine._scheduler.schedule = counting
    return counts


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}], ids=str)
def test_a_prompt_is_computed_once(options):
    """Prompts that end inside a page, at its end, after its first token, and within the first page."""
    for prompt in (SYSTEM[:19], SYSTEM[:20], SYSTEM, SYSTEM[:3]):
        engine = engine_of(**options)
        counts = count_prompt_tokens(engine)
        samples = submit(engine, prompt, [{}] * 4)
        run(engine)
        assert [x.tokens for x in samples] == [recomputed(prompt)] * 4
        if engine.options.prefix_cache or len(prompt) < 4:
            assert sum(counts) == len(prompt)
            assert [x.ticket.hit_tokens for x in samples] == [0, *[len(prompt)] * 3]


@pytest.mark.parametrize(
    ("each", "prompt", "sizes"),
    [(SEEDED, SYSTEM[:19], FEW), (MIXED, PROMPTS[1], {})],
    ids=["seeds, few pages", "mixed"],
)
def test_samples_get_the_tokens_of_separate_requests(each, prompt, sizes):
    engine = engine_of(**sizes)
    beside = Client(engine, PROMPTS[0])
    engine.step()
    samples = submit(engine, prompt, each)
    run(engine)
    assert (engine.stats().preemptions > 0) == (sizes == FEW)
    assert beside.tokens == recomputed(PROMPTS[0])
    for options, sample in zip(each, samples, strict=True):
        alone = Client(alone_in := engine_of(), prompt, **options)
        run(alone_in)
        assert sample.tokens == alone.tokens
        assert [x.top[0][0] for x in sample.logprobs] == [x.top[0][0] for x in alone.logprobs]
    assert len({tuple(x.tokens) for x in samples}) == len(samples)


def test_samples_that_must_wait_copy_the_page_of_one_that_runs():
    """Four run at once. The others compute one token, from the page of a sample that is still running."""
    engine = engine_of()
    counts = count_prompt_tokens(engine)
    lengths = (3, 20, 20, 20, 10, 10)
    samples = submit(engine, SYSTEM[:19], [{"max_tokens": x} for x in lengths])
    run(engine)
    assert [x.tokens[:COUNT] for x in samples] == [recomputed(SYSTEM[:19])[:x] for x in lengths]
    assert sum(counts) == 19 + 1 + 1
    assert [x.ticket.hit_tokens for x in samples] == [0, 19, 19, 19, 18, 18]


def test_random_samples_and_cancellations_lose_no_page():
    engine, clients = engine_of(**FEW, **CHUNKS), []
    rng = np.random.default_rng(0)
    for _ in range(40):
        prompt = SYSTEM[: rng.integers(1, 22)]
        each = [{"max_tokens": int(x)} for x in rng.integers(1, COUNT + 1, rng.integers(1, 7))]
        clients += [(prompt, sample) for sample in submit(engine, prompt, each)]
        for _ in range(rng.integers(0, 6)):
            engine.step()
            engine.check()
        clients[rng.integers(len(clients))][1].ticket.cancel()
    run(engine)
    assert engine.stats().preemptions > 0
    assert sum(sample.reason == "cancelled" for _, sample in clients) > 10
    for prompt, sample in clients:
        limit = sample.ticket._sequence.limit
        assert sample.tokens == recomputed(prompt)[: limit if sample.reason == "length" else len(sample.tokens)]
