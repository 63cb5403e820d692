"""The engine: tokens are those of full recomputation, whatever runs beside them; and no page is lost."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_layers.models import Decoder, LayerConfig, from_pretrained
from flax_layers.sampling import Sampling
from flax_layers.serving import Closed, Engine, EngineOptions
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.device.step import make_step
from flax_layers.serving.engine.dispatch import warm_up
from tests.cases import engine_cases
from tests.cases.engine_cases import COUNT, PROMPTS, SIZES, SYSTEM, Client, engine_of, fail_once, recomputed, run
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.support.golden_models import ROOT, expected, load, logits_of
from tests.support.rows import tiers


@pytest.fixture(scope="module")
def model() -> Decoder:
    return engine_cases.model()


@tiers(full={"options": "{}"}, rest="long")
@pytest.mark.parametrize(
    "options",
    [{}, {"max_step_tokens": 8}, {"max_step_tokens": 9, "max_requests": 3}, {"prefix_cache": False}, {"page_size": 1}],
    ids=str,
)
def test_tokens_are_those_of_full_recomputation(options, model):
    engine = engine_of(model, **options)
    for _ in range(2):  # the second time, prefixes are cached
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run(engine)
        assert [client.tokens for client in clients] == [recomputed(prompt) for prompt in PROMPTS]
        assert {client.reason for client in clients} == {"length"}
    assert (engine.stats().hit_tokens > 0) == engine.options.prefix_cache


@pytest.mark.full
def test_sixteen_staggered_arrivals(model):
    engine_cases.check_staggered_arrivals(engine_of(model, max_step_tokens=11))


@pytest.mark.full
def test_preemption_changes_no_token(model):
    engine = engine_of(model, num_pages=14, prefix_cache=False)
    clients = [Client(engine, prompt) for prompt in [(1, 2, 3), (9,) * 7, (60,), SYSTEM[:8], (2, 4, 6)]]
    run(engine)
    assert engine.stats().preemptions > 0
    assert [x.tokens for x in clients] == [recomputed(x.ticket._sequence.request.prompt) for x in clients]


@pytest.mark.full
def test_a_full_prefix_cache_gives_way(model):
    engine = engine_of(model, num_pages=12)
    for prompt in PROMPTS * 2:
        client = Client(engine, prompt)
        run(engine)
        assert client.tokens == recomputed(prompt)


@pytest.mark.full
def test_a_prefix_that_arrives_twice_at_once_is_computed_once(model):
    engine = engine_of(model, max_step_tokens=64)
    clients = [Client(engine, (*SYSTEM, n)) for n in range(4)]
    run(engine)
    assert [client.ticket.hit_tokens for client in clients] == [0, 20, 20, 20]


@pytest.mark.full
def test_every_running_request_gets_a_token_in_each_step(model):
    engine = engine_of(model, max_step_tokens=8)
    first = Client(engine, (1, 2, 3))
    engine.step()
    Client(engine, SYSTEM + SYSTEM[:3])  # four steps of prefill, beside the first one
    engine.step()
    for tokens in range(1, 6):
        assert len(first.tokens) == tokens
        engine.step()


DRAWN = Sampling(0.9, top_k=40, top_p=0.95, seed=7)


@tiers(full={"sampling": "sampling0"}, rest="long")
@pytest.mark.parametrize("sampling", [DRAWN, Sampling(1.0, seed=3)])
def test_a_seed_draws_the_same_tokens_beside_others(sampling, model):
    alone = Client(engine := engine_of(model), PROMPTS[0], sampling=sampling)
    run(engine)
    engine = engine_of(model, max_step_tokens=9)
    others = [Client(engine, prompt, sampling=Sampling(1.0, seed=n)) for n, prompt in enumerate(PROMPTS)]
    beside = Client(engine, PROMPTS[0], sampling=sampling)
    run(engine)
    assert beside.tokens == alone.tokens
    assert len({tuple(x.tokens) for x in others}) == len(others)


PENALTIES = [
    {"presence_penalty": 2.0, "frequency_penalty": 1.5},
    {"repetition_penalty": 5.0},
    {"logit_bias": ((36, -100.0), (61, -100.0), (7, 2.0))},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": ((2, 1.0),)},
]


@tiers(full={"penalties": "{'presence_penalty': 2.0, 'frequency_penalty': 1.5}"}, rest="long")
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_those_of_their_formulas(penalties, model):
    """Of a request that is preempted and hits a prefix, beside others without penalties."""
    engine = engine_of(model, num_pages=20)
    plain = [Client(engine, prompt) for prompt in PROMPTS[:3]]
    client = Client(engine, PROMPTS[1], penalties=Penalties(**penalties))
    run(engine)
    text = [*PROMPTS[1]]
    for token in client.tokens:
        logits = np.asarray(logits_of(model, np.array([text + [0] * (48 - len(text))], np.int32)))[0, len(text) - 1]
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


@pytest.mark.full
def test_a_slot_forgets_the_penalties_of_the_request_before(model):
    engine = engine_of(model, max_requests=1)
    Client(engine, PROMPTS[2], penalties=Penalties(logit_bias=((36, 100.0),)))
    after = Client(engine, PROMPTS[2], logprobs=0)
    run(engine)
    assert after.tokens == recomputed(PROMPTS[2])


@pytest.mark.full
def test_namespaces_share_nothing(model):
    engine = engine_of(model)
    hits = []
    for namespace in (None, "tenant", "tenant", None):
        client = Client(engine, SYSTEM, namespace=namespace)
        run(engine)
        hits.append(client.ticket.hit_tokens)
    assert hits == [0, 0, 20, 20]


@pytest.mark.full
def test_stop_tokens(model):
    tokens = recomputed(PROMPTS[2])
    engine = engine_of(model)
    client = Client(engine, PROMPTS[2], stop_tokens=(tokens[4],), logprobs=0)
    other = Client(engine, PROMPTS[1])
    run(engine)
    assert client.tokens == tokens[: tokens.index(tokens[4])]
    assert client.reason == "stop"
    assert other.tokens == recomputed(PROMPTS[1])
    assert sum(len(event.logprobs) for event in client.events) == len(client.tokens)


@pytest.mark.full
def test_logprobs_are_those_of_the_model(model):
    client = Client(engine := engine_of(model), PROMPTS[1], logprobs=3)
    run(engine)
    text = np.array([[*PROMPTS[1], *client.tokens]], np.int32)
    logprobs = np.asarray(jax.nn.log_softmax(logits_of(model, text)[0]))[len(PROMPTS[1]) - 1 :]
    assert client.tokens == recomputed(PROMPTS[1])
    found = [one for event in client.events for one in event.logprobs]
    for token, one, row in zip(client.tokens, found, logprobs, strict=False):
        best = np.argsort(-row)[:3]
        assert [token for token, _ in one.top] == best.tolist()
        np.testing.assert_allclose([one.logprob, *[x for _, x in one.top]], [row[token], *row[best]], atol=1e-4)


@pytest.mark.full
def test_cancelled_requests_end_and_return_their_pages(model):
    engine = engine_of(model, max_requests=2, max_step_tokens=8)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    clients[3].ticket.cancel()  # in the inbox
    for _ in range(3):
        engine.step()
    for number in (0, 5):  # one runs, one waits
        clients[number].ticket.cancel()
    run(engine)
    for number, client in enumerate(clients):
        ended = number not in (0, 3, 5)
        assert client.reason == ("length" if ended else "cancelled")
        assert not ended or client.tokens == recomputed(PROMPTS[number])
    clients[1].ticket.cancel()  # has ended
    run(engine)
    assert clients[1].reason == "length"


@tiers(full={"fails_at": [1, 4]}, rest="long")
@pytest.mark.parametrize("fails_at", [1, 3, 4])
def test_a_failed_step_ends_its_requests_alone(fails_at, model, monkeypatch):
    engine = engine_of(model, max_requests=2)
    fail_once(monkeypatch, engine, fails_at)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    run(engine)
    assert engine.stats().failures == 1
    assert [x.reason for x in clients[:2]] == ["error", "error"]
    assert "RuntimeError: injected" in clients[0].events[-1].error
    assert [x.tokens for x in clients[2:]] == [recomputed(prompt) for prompt in PROMPTS[2:]]


@tiers(full={"prefix_cache": True}, rest="long")
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_pages_out_of_every_window_are_dropped(prefix_cache):
    """Two requests of 60 tokens would use 30 pages; 9 keys are on 4 at most."""
    config = dataclasses.replace(SMALL, layers=(LayerConfig(window=9), LayerConfig(window=5)))
    model = Decoder(config, implementation="xla", rngs=nnx.Rngs(0))
    whole, dropping = (engine_of(model, prefix_cache=prefix_cache) for _ in range(2))
    whole._pages._window = None
    outputs = []
    for engine in (whole, dropping):
        clients = [Client(engine, prompt, max_tokens=50) for prompt in (PROMPTS[0], PROMPTS[2])]
        most = 0
        while engine.step():
            engine.check()
            most = max(most, engine.stats().used_pages)
        outputs.append([client.tokens for client in clients])
        assert (most > 20) == (engine is whole)
    assert outputs[0] == outputs[1]
    run(dropping)


@pytest.mark.full
def test_tensor_parallel():
    known = expected("gemma3")
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    model = from_pretrained(ROOT / "gemma3", dtype=jnp.float32, implementation="xla", mesh=mesh)
    engine = Engine(model, EngineOptions(**SIZES | {"max_step_tokens": 40, "context": None}))
    for options in ({}, {"penalties": Penalties(logit_bias=((1, 0.0),))}):  # the second time from cached pages
        clients = [Client(engine, prompt, max_tokens=32, **options) for prompt in known["tokens"].tolist()]
        run(engine)
        assert [client.tokens for client in clients] == known["greedy"].tolist()
    shards = engine._executor._state.cache.k.addressable_shards
    assert [shard.data.shape[3] for shard in shards] == [model.config.num_kv_heads // 2] * 2


@pytest.mark.full
def test_a_mesh_that_does_not_divide_the_heads(model):
    model = Decoder(dataclasses.replace(SMALL, num_kv_heads=1), rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    with pytest.raises(ValueError, match=r"must divide the KV heads\. Got 2 devices for 1 heads"):
        engine_of(model)


@tiers(full={"fails_at": [1, 4]}, rest="long")
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_results_that_cannot_be_read_end_their_requests(fails_at, model, monkeypatch):
    """Even if no other step follows: computed again, they would fail for ever on a device that keeps failing."""
    engine = engine_of(model)
    fail_once(monkeypatch, engine, fails_at, when_read=True)
    client = Client(engine, PROMPTS[0], max_tokens=fails_at)
    run(engine)
    assert client.reason == "error"
    assert engine.stats().failures == 1
    after = Client(engine, PROMPTS[0])
    run(engine)
    assert after.tokens == recomputed(PROMPTS[0])


@pytest.mark.full
def test_nothing_is_compiled_after_warm_up(model):
    make_step.cache_clear()  # other tests have compiled some of the programs
    engine, reports = engine_of(model, poison=False), []
    with counted_compilations() as compiled:
        engine.warm_up(lambda done, total: reports.append((done, total)))
    assert reports[-1][0] == reports[-1][1] == len(reports) == 2 * len(engine.options.shapes(SMALL))
    assert len(reports) <= len(compiled) <= len(reports) + 4  # once ahead, and not again when they run
    rng = np.random.default_rng(0)
    with counted_compilations() as compiled:
        for _ in range(40):
            prompt = rng.integers(0, 64, rng.integers(1, 30)).tolist()
            sampling = Sampling(float(rng.integers(0, 2)), seed=int(rng.integers(9)))
            penalties = Penalties(presence_penalty=float(rng.integers(0, 2)))
            Client(engine, prompt, sampling=sampling, penalties=penalties, max_tokens=int(rng.integers(1, 9)))
            engine.step()
        run(engine)
    assert not compiled


@pytest.mark.full
def test_a_thread_serves_until_it_is_stopped(model):
    engine = engine_of(model)
    engine.start()
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    engine.stop(grace=60)
    assert [x.tokens for x in clients] == [recomputed(prompt) for prompt in PROMPTS]
    with pytest.raises(Closed, match="shutting down"):
        Client(engine, (1,))


@pytest.mark.full
def test_shutdown_without_grace_ends_every_request(model):
    engine = engine_of(model)
    engine.start()
    clients = [Client(engine, prompt, max_tokens=20) for prompt in PROMPTS * 3]
    engine.stop()
    assert {x.reason for x in clients} <= {"cancelled", "length"}
    assert all("shutting down" in x.events[-1].error for x in clients if x.reason == "cancelled")
    engine.check()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_scheduler_ends_every_request(model, monkeypatch):
    engine = engine_of(model)
    monkeypatch.setattr(engine._scheduler, "schedule", lambda **_: 1 / 0)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    engine.start()
    engine.stop(grace=60)
    assert {client.reason for client in clients} == {"error"}
    assert "ZeroDivisionError" in clients[0].events[-1].error
    assert not engine.is_running
    with pytest.raises(Closed):
        Client(engine, (1,))


@pytest.mark.full
def test_longrope_rotates_all_keys_alike():
    config = load("phi3").config
    assert len(config.context_limits) == 2
    assert len(EngineOptions(page_size=4).pages(config)) == 1
    assert len(EngineOptions(page_size=4).pages(SMALL)) == 2


@pytest.mark.full
def test_a_warm_up_that_fails_compiles_nothing_more(monkeypatch):
    cancelled = threading.Event()

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait)

    class Failing:
        """Its programs compile until the warm-up ends; the last cannot be lowered."""

        compiled = 0

        def lower(self, packed, program):
            if program == 39:
                raise KeyboardInterrupt
            return self

        def compile(self):
            cancelled.wait(60)
            self.compiled += 1

    executor = Failing()
    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        warm_up(executor, [(np.zeros(1, np.int32), number) for number in range(40)], lambda done, total: None)
    assert executor.compiled <= (os.cpu_count() or 1)
