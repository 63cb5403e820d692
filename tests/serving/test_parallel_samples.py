"""Several samples of one prompt: it is computed once, and their tokens are those of requests on their own."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder, LayerConfig
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, QueueFull, Request
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.engine.packing import COPIES, pack_copies
from tests.cases import engine_cases
from tests.cases.engine_cases import COUNT, PROMPTS, SYSTEM, Client, engine_of, fail_once, recomputed, run, submit
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.support.rows import in_turns, tiers

SEEDED = [Sampling(1.0, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return engine_cases.model()


def count_prompt_tokens(engine: Engine) -> list[int]:
    """Prompt tokens of each step from now on, as they are dispatched."""
    schedule, counts = engine._scheduler.schedule, []

    def counting(**options):
        chunks = schedule(**options)
        counts.append(sum(max(0, min(x.first + x.count, len(x.sequence.request.prompt)) - x.first) for x in chunks))
        return chunks

    engine._scheduler.schedule = counting
    return counts


@tiers(full={"options": "{}"}, rest="long")
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 8}, {"page_size": 16}, {"prefix_cache": False}], ids=str)
def test_a_prompt_is_computed_once_and_greedy_tokens_are_those_of_full_recomputation(options, model):
    """Prompts that end inside a page, at its end, after its first token, and within the first page."""
    for prompt in (SYSTEM[:19], SYSTEM[:20], SYSTEM, SYSTEM[:3]):
        engine = engine_of(model, **options)
        counts = count_prompt_tokens(engine)
        samples = submit(engine, prompt, [{}] * 4)
        run(engine)
        assert [x.tokens for x in samples] == [recomputed(prompt)] * 4
        if engine.options.prefix_cache or len(prompt) < 4:
            assert sum(counts) == len(prompt)
            assert [x.ticket.hit_tokens for x in samples] == [0, *[len(prompt)] * 3]


OTHERS = [
    {"sampling": SEEDED[0], "penalties": Penalties(frequency_penalty=1.5)},
    {"logprobs": 2},
    {"sampling": SEEDED[2]},
]


@tiers(full={"each": "seeds"}, rest="long")
@pytest.mark.parametrize("each", [[{"sampling": x} for x in SEEDED], OTHERS], ids=["seeds", "mixed"])
def test_samples_get_the_tokens_of_separate_requests(each, model):
    engine = engine_of(model)
    beside = Client(engine, PROMPTS[0])
    engine.step()
    samples = submit(engine, PROMPTS[1], each)
    run(engine)
    assert beside.tokens == recomputed(PROMPTS[0])
    for options, sample in zip(each, samples, strict=True):
        alone = Client(alone_in := engine_of(model), PROMPTS[1], **options)
        run(alone_in)
        assert sample.tokens == alone.tokens
        logprobs = [[x for event in y.events for x in event.logprobs] for y in (sample, alone)]
        assert [x.top[0][0] for x in logprobs[0]] == [x.top[0][0] for x in logprobs[1]]
    assert len({tuple(x.tokens) for x in samples}) == len(samples)


@pytest.mark.full
def test_samples_that_must_wait_copy_the_page_of_one_that_runs(model):
    """Two run at once. The third and fourth compute one token, from the page of a sample that is still running."""
    engine = engine_of(model, max_requests=2)
    counts = count_prompt_tokens(engine)
    lengths = (3, 20, 10, 10)
    samples = submit(engine, SYSTEM[:19], [{"max_tokens": x} for x in lengths])
    run(engine)
    assert [x.tokens[:COUNT] for x in samples] == [recomputed(SYSTEM[:19])[:x] for x in lengths]
    assert sum(counts) == 19 + 1 + 1
    assert [x.ticket.hit_tokens for x in samples] == [0, 19, 18, 18]


@tiers(full={"num_pages": 9}, rest="long")
@pytest.mark.parametrize("num_pages", [9, 13])
def test_preemption_changes_no_token(num_pages, model):
    engine = engine_of(model, num_pages=num_pages)
    samples = submit(engine, SYSTEM[:7], [{"sampling": x} for x in SEEDED])
    run(engine)
    assert engine.stats().preemptions > 0
    plenty = engine_of(model)
    expected = submit(plenty, SYSTEM[:7], [{"sampling": x} for x in SEEDED])
    run(plenty)
    assert [x.tokens for x in samples] == [x.tokens for x in expected]


@tiers(full={"cancelled": ["0-1", "2-0", "2-4"]}, rest="long")
@pytest.mark.parametrize(("cancelled", "steps"), [*itertools.product((0, 2), (0, 1, 2, 4))])
def test_a_cancelled_sample_takes_none_with_it(cancelled, steps, model):
    engine = engine_of(model, max_step_tokens=8)  # three steps of prefill
    samples = submit(engine, SYSTEM[:19], [{}] * 4)
    for _ in range(steps):
        engine.step()
        engine.check()
    samples[cancelled].ticket.cancel()
    run(engine)
    for number, sample in enumerate(samples):
        assert sample.reason == ("cancelled" if number == cancelled else "length")
        assert number == cancelled or sample.tokens == recomputed(SYSTEM[:19])


@pytest.mark.full
def test_random_samples_and_cancellations_lose_no_page(model):
    engine, clients = engine_of(model, num_pages=13, max_requests=5, max_step_tokens=9), []
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


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("when_read", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failed_step_ends_the_samples_in_it(fails_at, when_read, model, monkeypatch):
    """The prompt takes two steps. Samples that were not in the failed step compute it again."""
    engine = engine_of(model, max_step_tokens=12, max_requests=4)
    fail_once(monkeypatch, engine, fails_at, when_read=when_read)
    samples = submit(engine, SYSTEM[:19], [{}] * 4)
    run(engine)
    failed = [x for x in samples if x.reason == "error"]
    assert len(failed) == (1 if fails_at == 1 and not when_read else 4)
    assert all(x.tokens == recomputed(SYSTEM[:19]) for x in samples if x not in failed)


@pytest.mark.full
def test_layers_with_windows():
    """The pages of a long prompt are dropped before it ends, so not all of them can be shared."""
    config = dataclasses.replace(SMALL, layers=(LayerConfig(window=9), LayerConfig(window=5)))
    decoder = Decoder(config, implementation="xla", rngs=nnx.Rngs(0))
    for prompt in (SYSTEM[:7], SYSTEM):
        tokens = []
        for count in (1, 3):
            engine = engine_of(decoder, max_step_tokens=8)
            samples = submit(engine, prompt, [{"max_tokens": 20}] * count)
            run(engine)
            tokens += [x.tokens for x in samples]
        assert tokens == [tokens[0]] * 4


@pytest.mark.full
def test_drafts_beside_samples(model):
    engine = engine_of(model, draft_tokens=3, max_step_tokens=32)
    counts = count_prompt_tokens(engine)
    samples = submit(engine, PROMPTS[1], [{}] * 3)
    run(engine)
    assert [x.tokens for x in samples] == [recomputed(PROMPTS[1])] * 3
    assert sum(counts) == len(PROMPTS[1])


@pytest.mark.full
def test_nothing_is_compiled_after_warm_up(model):
    engine = engine_of(model, poison=False, max_requests=4)
    engine.warm_up()
    with counted_compilations() as compiled:
        for length in (3, 19, 20):
            submit(engine, SYSTEM[:length], [{"sampling": x} for x in SEEDED])
            submit(engine, SYSTEM[1 : 1 + length], [{"max_tokens": n} for n in (1, 9, 3)])
        run(engine)
    assert not compiled


def test_any_number_of_pages_is_copied():
    copies = [(n + 1, n + 50) for n in range(2 * COPIES + 1)]
    words = pack_copies(copies)
    assert pack_copies([]) == []
    pairs = np.concatenate([x.reshape(2, COPIES) for x in words], axis=1).T.tolist()
    assert [tuple(x) for x in pairs if x[1] >= 0] == copies
    assert len(pairs) == 3 * COPIES


def test_all_samples_are_taken_or_none(model):
    engine = engine_of(model, max_waiting=3)
    with pytest.raises(QueueFull, match=r"0 requests wait, and `max_waiting` is 3\. Ask for at most 11 samples"):
        submit(engine, (1, 2), [{}] * 12)
    with pytest.raises(ValueError, match="one prompt and one namespace"):
        engine.submit_samples([Request((1,)), Request((2,))], [print, print])
    with pytest.raises(ValueError, match="one prompt and one namespace"):
        engine.submit_samples([Request((1,)), Request((1,), namespace="a")], [print, print])
    assert engine.stats().waiting == 0
