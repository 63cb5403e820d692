"""The engine: tokens are those of full recomputation, whatever runs beside them; and no page is lost."""

from __future__ import annotations

import concurrent.futures
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.generate import generate
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, EngineOptions
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.device.step import empty_state, poison_pages
from flax_layers.serving.engine.dispatch import warm_up
from jflex.paged import PagedCache
from tests.cases.constraint_cases import JSON, REGEX
from tests.cases.constraint_cases import engine_of as guided_engine
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
    looped,
    model,
    outputs,
    recomputed,
    run,
    submit,
)
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.serving import test_streaming_llm_engine as streams
from tests.support.rows import tiers

DRAFTS, CASCADE = {"draft_tokens": 5}, {"cascade_bytes": 1}
# The options of each engine, and its model unless that is the small one.
ENGINES = {
    "usual": {},
    "chunks": CHUNKS,
    "no prefix cache": {"prefix_cache": False},
    "pages of a token": {"page_size": 1, "num_pages": 400},
    "few pages": FEW,
    "few pages, no prefix cache": FEW | {"prefix_cache": False},
    "cascade": CASCADE,
    "cascade, few pages": CASCADE | FEW,
    "drafts": DRAFTS,
    "most drafts": {"draft_tokens": 31, "max_step_tokens": 60},
    "drafts, chunks": DRAFTS | CHUNKS,
    "drafts, few pages": DRAFTS | FEW,
    "drafts beside a cascade": DRAFTS | CASCADE,
    "drafts, pages of a token": DRAFTS | {"page_size": 1, "num_pages": 400, "prefix_cache": False},
    "windows": {"model": "windows"},
    "windows, drafts": {"model": "windows", "prefix_cache": False} | DRAFTS,
    "fused projections": {"model": "fused"},
    "two devices": {"model": "sharded"},
    "two devices, drafts": {"model": "sharded"} | DRAFTS,
    "int8": {"cache_dtype": "int8"},
    "int8, few pages": {"cache_dtype": "int8", "prefix_cache": False} | FEW,
    "e4m3, cascade": {"cache_dtype": "float8_e4m3fn"} | CASCADE,
    "e5m2, drafts": {"cache_dtype": "float8_e5m2"} | DRAFTS,
    "windows, e4m3": {"model": "windows", "cache_dtype": "float8_e4m3fn", "page_size": 1, "num_pages": 400},
    "latent, e4m3, chunks": {"model": "latent", "cache_dtype": "float8_e4m3fn"} | CHUNKS,
    "latent, e4m3, drafts": {"model": "latent", "cache_dtype": "float8_e4m3fn"} | DRAFTS,
}
FOR_LONG = [
    "no prefix cache", "pages of a token", "few pages", "cascade, few pages", "most drafts", "drafts, chunks",
    "drafts, pages of a token", "windows, drafts", "two devices, drafts", "int8, few pages", "e5m2, drafts",
    "windows, e4m3", "latent, e4m3, chunks", "fused projections", "int8", "two devices", "drafts, few pages",
    "e4m3, cascade", "latent, e4m3, drafts",
]  # fmt: skip


@tiers(full={"name": [name for name in ENGINES if name not in FOR_LONG]}, rest="long")
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_full_recomputation(name, monkeypatch):
    """All at once, and staggered, when prefixes are cached; samples of a prompt copy its last page."""
    options = {**ENGINES[name]}
    kind, dtype = options.pop("model", "small"), options.get("cache_dtype")
    right = {x: looped(x, kind, dtype) if dtype else recomputed(x, kind) for x in [*PROMPTS, SYSTEM]}
    foresee(monkeypatch, right)
    engine = engine_of(model(kind), **options)
    for pauses in (1, 3):
        clients = []
        for number, prompt in enumerate(PROMPTS):
            clients.append(Client(engine, prompt))
            for _ in range(number % pauses):
                engine.step()
        samples = submit(engine, SYSTEM, [{}] * 3)
        run(engine)
        assert [client.tokens for client in clients] == [right[prompt] for prompt in PROMPTS]
        assert [sample.tokens for sample in samples] == [right[SYSTEM]] * 3
        assert {client.reason for client in [*clients, *samples]} == {"length"}
    stats = engine.stats()
    assert (stats.hit_tokens > 0) == engine.options.prefix_cache
    assert (stats.preemptions > 0) == (engine.options.num_pages < 100)
    assert (stats.cascade_steps > 0) == ("cascade_bytes" in options)
    assert (stats.accepted_tokens > 10) == ("draft_tokens" in options)


# --- prefixes and pages


@pytest.mark.full
def test_hits():
    """Of a whole prompt all but the last page, of prompt and text all but the last token; none of another namespace."""
    engine = engine_of()

    def hit(prompt, **options) -> int:
        client = Client(engine, prompt, **options)
        run(engine)
        assert options or client.tokens == recomputed(prompt)
        return client.ticket.hit_tokens

    assert [hit(SYSTEM[:20]) for _ in range(2)] == [0, 16]
    for length in (6, 7, 8):  # the last token, whose keys are not written, ends on, after and before the end of a page
        prompt = (length, *SYSTEM[: length - 1])
        whole = (*prompt, *outputs(engine, [prompt])[0])
        assert hit((*whole, 1, 2, 3, 4), max_tokens=1) == (len(whole) - 1) // 4 * 4
    assert [hit(SYSTEM, namespace=name) for name in ("tenant", "tenant", None)] == [0, 20, 20]


@pytest.mark.full
def test_pages_out_of_every_window_are_dropped():
    """Two requests of 60 tokens would use 30 pages; 9 keys are on 4 at most."""
    whole, dropping = (engine_of(model("windows")) for _ in range(2))
    whole._pages._window = None
    results = []
    for engine in (whole, dropping):
        clients = [Client(engine, prompt, max_tokens=50) for prompt in (PROMPTS[0], PROMPTS[2])]
        most = 0
        while engine.step():
            engine.check()
            most = max(most, engine.stats().used_pages)
        results.append([client.tokens for client in clients])
        assert (most > 20) == (engine is whole)
    assert results[0] == results[1]
    run(dropping)


def continued(engine, prompt: tuple[int, ...], max_tokens: int) -> Client:
    """Runs a request; after each step, all pages of its table are the prefix's or its own, once each."""
    client = Client(engine, prompt, max_tokens=max_tokens)
    while engine.step():
        engine.check()
        for sequence in engine._scheduler.running:
            assert sequence.prefix is not None
            assert sequence.pages[: len(sequence.prefix.pages)] == [*sequence.prefix.pages]
            assert 0 not in sequence.prefix.pages
            assert (engine._pages._pool.owner_counts(np.array(sequence.prefix.pages, int)) == 1).all()
    return client


@tiers(full={"kind": "windows-expected0"}, rest="long")
@pytest.mark.parametrize(("kind", "expected"), [("windows", [0, 20, 60]), ("small", [0, 60, 60])])
def test_a_hit_reads_no_page_that_was_dropped(kind, expected):
    """Of prompts, of text whose pages were dropped while it was written, and of what evictions leave."""
    sizes = {"context": 80, "num_pages": 24}
    engine, cold, hits = engine_of(model(kind), **sizes), engine_of(model(kind), **sizes, prefix_cache=False), []

    def check(prompt, count):
        client = continued(engine, prompt, count)
        assert client.tokens == outputs(cold, [prompt], max_tokens=count)[0]
        hits.append(client.ticket.hit_tokens)
        return (*prompt, *client.tokens)

    text = check(SYSTEM, 40)
    for _ in range(2):
        check(text, 15)
    assert hits == expected
    for other in range(30, 60, 5):
        continued(engine, (other,) * other, 1)
        check(text, 1)
    assert {hit % 4 for hit in hits} == {0}
    assert min(hits[3:]) < 60


# --- steps


@pytest.mark.full
def test_every_running_request_gets_a_token_in_each_step():
    engine = engine_of(**CHUNKS)
    first = Client(engine, (1, 2, 3))
    engine.step()
    Client(engine, SYSTEM + SYSTEM[:5])  # four steps of prefill, beside the first one
    engine.step()
    for tokens in range(1, 6):
        assert len(first.tokens) == tokens
        engine.step()


@pytest.mark.full
def test_nothing_is_compiled_after_warm_up():
    """Whatever requests need: drafts, cascades, samples, penalties, constraints, log probabilities."""
    sizes = {"max_requests": 2, "max_step_tokens": 9, "num_pages": 33, "page_size": 4, "poison": False}  # as no other
    engine, reports = guided_engine("bytes", **sizes, **CASCADE, draft_tokens=3, draft_match=1), []
    with counted_compilations() as compiled:
        engine.warm_up(lambda done, total: reports.append((done, total)))
    scoring = len(engine.options.scoring_shapes(engine.config))
    programs = 2 * (len(engine.options.shapes(engine.config)) + 1) + scoring
    assert reports[-1][0] == reports[-1][1] == len(reports) == programs
    assert len(reports) <= len(compiled) <= len(reports) + 4  # once ahead, and not again when they run
    rng = np.random.default_rng(0)
    draw = lambda n: int(rng.integers(n))
    with counted_compilations() as compiled:
        for number in range(40):
            prompt = (*([7] * 9 if number % 2 else []), *rng.integers(0, 6, 1 + draw(20)).tolist())
            options = {
                "sampling": Sampling(float(draw(2)), top_k=2, seed=number), "max_tokens": 1 + draw(20),
                "penalties": Penalties(presence_penalty=float(draw(4) == 0)), "logprobs": 2 if draw(4) == 0 else None,
                "constraint": (JSON, REGEX, *[None] * 6)[draw(8)], "prompt_logprobs": 1 if draw(4) == 0 else None,
                "bad_words": ((1,),) if draw(4) == 0 else (),
            }  # fmt: skip
            submit(engine, prompt, [options] * (1 + draw(2)))
            engine.step()
        run(engine)
    assert not compiled
    stats = engine.stats()
    assert min(stats.drafted_tokens, stats.cascade_steps, stats.hit_tokens) > 0


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


# --- several devices


@tiers(full={"dtype": "int8"}, rest="long")
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_two_devices_share_the_heads_of_the_cache(dtype):
    """Scales lie beside the heads that they are of, and stay there: the same steps are not compiled twice."""
    decoder, heads = model("sharded"), SMALL.num_kv_heads
    engine = engine_of(decoder, cache_dtype=dtype, prefix_cache=False)
    for _ in range(2):
        with counted_compilations() as compiled:
            found = outputs(engine, PROMPTS[:2])
        assert found == [looped(x, "small", dtype) if dtype else recomputed(x) for x in PROMPTS[:2]]
    assert not compiled
    for x in jax.tree.leaves(engine._executor._state.cache):
        assert [shard.data.shape[3] for shard in x.addressable_shards] == [heads // 2] * 2
    assert engine._executor.token_bytes == 2 * heads // 2 * (SMALL.head_dim * (1 if dtype else 4) + (4 if dtype else 0))


# --- caches of eight bits

NAMES = ("int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.long
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
