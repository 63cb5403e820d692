"""The engine with a cache of eight bits: tokens are those of a plain loop over such a cache, whatever runs beside."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.generate import generate
from flax_layers.models import Decoder, LatentConfig, LayerConfig, ModelConfig, from_pretrained
from flax_layers.serving import Engine, EngineOptions, Streaming
from flax_layers.serving.device.step import empty_state, poison_pages
from jflex.paged import PagedBatch, PagedCache
from tests.cases import engine_cases
from tests.cases.engine_cases import COUNT, PROMPTS, SIZES, SYSTEM, Client, engine_of, run
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.serving import test_streaming_llm_engine
from tests.serving.test_engine_speculation import Foreseeing
from tests.support.golden_models import ROOT, expected, load
from tests.support.rows import tiers

NAMES = ("int8", "float8_e4m3fn", "float8_e5m2")
PAGE, PAGES, LENGTH = 4, 16, 64  # of the plain loop


def latent_model() -> Decoder:
    """With latent vectors of two tiles."""
    latent = LatentConfig(latent_dim=256, nope_head_dim=8, rope_head_dim=4, value_head_dim=8)
    config = ModelConfig(
        family="deepseek_v3", vocabulary=64, width=32, mlp_width=48, num_heads=2, num_kv_heads=2, head_dim=12,
        layers=(LayerConfig(),) * 2, max_positions=512, latent=latent, initializer_range=0.2,
    )  # fmt: skip
    return Decoder(config, implementation="xla", rngs=nnx.Rngs(0))


def in_windows() -> Decoder:
    config = dataclasses.replace(SMALL, layers=(LayerConfig(window=9), LayerConfig(window=5)))
    return Decoder(config, implementation="xla", rngs=nnx.Rngs(0))


@functools.cache
def model_of(kind: str) -> Decoder:
    streaming = functools.partial(test_streaming_llm_engine.model, 16)
    kinds = {"small": engine_cases.model, "windows": in_windows, "latent": latent_model, "streaming": streaming}
    return kinds[kind]()


@functools.cache
def step_of(kind: str, streaming: Streaming | None):
    graph, state = nnx.split(model_of(kind))
    read = lambda tokens, cache, batch: nnx.merge(graph, state).decode_paged(tokens, cache, batch, streaming)
    return jax.jit(read)


@functools.cache
def looped(kind: str, name: str, prompt: tuple[int, ...], streaming: Streaming | None = None) -> list[int]:
    """Greedy tokens of one request alone in a cache; margins are larger than what the order of sums changes."""
    cache = model_of(kind).init_paged_cache(PAGES + 1, PAGE, dtype=name)
    table, new, found, length = jnp.arange(1, PAGES + 1, dtype=jnp.int32)[None], list(prompt), [], 0
    for _ in range(COUNT):
        length += len(new)
        batch = PagedBatch(jnp.array([0, len(new)]), jnp.array([length]), table)
        padded = np.array(new + [0] * (32 - len(new)), np.int32)
        logits, cache = step_of(kind, streaming)(padded, cache, batch)
        row = np.asarray(logits[len(new) - 1])
        second, first = np.sort(row)[-2:]
        assert first - second > 5e-4
        new = [int(np.argmax(row))]
        found += new
    return found


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("small", "int8", {"max_step_tokens": 9, "max_requests": 3}),
    ("small", "int8", {"num_pages": 14, "prefix_cache": False}),  # preemptions
    ("small", "float8_e4m3fn", {"cascade_bytes": 1, "max_step_tokens": 64}),
    ("small", "float8_e5m2", {"draft_tokens": 5}),
    ("windows", "float8_e4m3fn", {"page_size": 1}),
    ("latent", "float8_e4m3fn", {"max_step_tokens": 11}),
    ("latent", "float8_e4m3fn", {"draft_tokens": 3}),
]


@tiers(
    full={"kind": [
        "small-int8-{'max_step_tokens': 9, 'max_requests': 3}",
        "small-float8_e4m3fn-{'cascade_bytes': 1, 'max_step_tokens': 64}",
        "latent-float8_e4m3fn-{'draft_tokens': 3}",
    ]},
    rest="long",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "name", "options"), CASES, ids=str)
def test_tokens_are_those_of_a_loop_over_one_request(kind, name, options, monkeypatch):
    """Free pages are poisoned, and no page is lost. Accepted drafts of trees move, with their scales."""
    if "draft_tokens" in options:
        monkeypatch.setattr("flax_layers.serving.engine.engine.PromptLookup", Foreseeing)
        monkeypatch.setattr(Foreseeing, "futures", {prompt: looped(kind, name, prompt) for prompt in PROMPTS})
    engine = engine_of(model_of(kind), cache_dtype=name, **options)
    for _ in range(2):  # the second time, prefixes are cached
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run(engine)
        assert [client.tokens for client in clients] == [looped(kind, name, prompt) for prompt in PROMPTS]
    stats = engine.stats()
    assert (stats.hit_tokens > 0) == engine.options.prefix_cache
    assert (stats.preemptions > 0) == ("num_pages" in options)
    assert (stats.cascade_steps > 0) == ("cascade_bytes" in options)
    assert (stats.accepted_tokens > 0) == ("draft_tokens" in options)


@tiers(full={"name": "float8_e4m3fn"}, rest="long")
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_streaming_rotates_keys_of_eight_bits(name):
    streaming = test_streaming_llm_engine.STREAMING
    sizes = test_streaming_llm_engine.SIZES | {"cache_dtype": name, "max_step_tokens": 12, "num_pages": 9}
    engine = Engine(model_of("streaming"), EngineOptions(**sizes))
    for _ in range(2):
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run(engine)
        assert [x.tokens for x in clients] == [looped("streaming", name, prompt, streaming) for prompt in PROMPTS]
    assert engine.stats().preemptions > 0


@tiers(full={"kind": "latent"}, rest="long")
@pytest.mark.parametrize(("kind", "name"), [("small", "float8_e5m2"), ("latent", "float8_e4m3fn")])
def test_generation_without_the_engine(kind, name):
    how = {"max_tokens": COUNT, "stop_tokens": (), "cache": "paged"}
    found = generate(model_of(kind), PROMPTS, cache_dtype=name, **how).results()
    assert [one.tokens for one in found] == [looped(kind, name, prompt) for prompt in PROMPTS]
    with pytest.raises(ValueError, match=r"`cache_dtype` must be None or float8_e4m3fn"):
        generate(model_of("latent"), PROMPTS, cache_dtype="int8", **how)


@pytest.mark.full
def test_samples_of_a_prompt_copy_its_last_page():
    """With the scales of its tokens."""
    for name in NAMES:
        engine = engine_of(model_of("small"), cache_dtype=name)
        samples = engine_cases.submit(engine, SYSTEM, [{}] * 3)
        run(engine)
        assert [sample.tokens for sample in samples] == [looped("small", name, SYSTEM)] * 3


# The largest error of a log probability of the best five tokens after each prompt, and half as much again.
ERRORS = {"int8": 0.03, "float8_e4m3fn": 0.14, "float8_e5m2": 0.53}


@tiers(full={"name": ["int8", "float8_e4m3fn"]}, rest="long")
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_near_those_without(name):
    found = []
    for dtype in (None, name):
        engine = engine_of(model_of("small"), cache_dtype=dtype, max_step_tokens=64)
        clients = [Client(engine, prompt, max_tokens=1, logprobs=20) for prompt in PROMPTS]
        run(engine)
        found.append([dict(client.events[-1].logprobs[0].top) for client in clients])
    pairs = [(right[x], other[x]) for right, other in zip(*found, strict=True) for x in list(right)[:5] if x in other]
    errors = [abs(right - other) for right, other in pairs]
    assert len(errors) > 30
    assert 1e-6 < max(errors) < ERRORS[name]


@pytest.mark.parametrize(("kind", "name"), [*(("small", name) for name in NAMES), ("latent", "float8_e4m3fn")])
def test_poison_makes_every_number_of_a_page_nan(kind, name):
    options = EngineOptions(**SIZES | {"cache_dtype": name, "num_pages": 5})
    state = poison_pages(empty_state(model_of(kind), options, None), jnp.array([0, 1, 0, 0, 1], jnp.int32))
    cache, wide = state.cache, lambda x: np.asarray(x.astype(jnp.float32))
    if isinstance(cache, PagedCache):
        held = [wide(x) * wide(scale)[..., None] for x, scale in zip((cache.k, cache.v), cache.scales, strict=True)]
    else:
        held = [wide(cache.rows), wide(cache.rope), wide(cache.scale)]
    for x in held:
        assert np.isnan(x[:, [1, 4]]).all()
        assert not np.isnan(x[:, [0, 2, 3]]).any()


@tiers(full={"name": None}, rest="long")
@pytest.mark.parametrize(
    ("kind", "name", "bytes_of_token"),
    [("small", None, 2 * 2 * 8 * 4), ("small", "int8", 2 * 2 * (8 + 4)), ("latent", "float8_e4m3fn", 256 + 2 * 4 + 8)],
)
def test_bytes_of_a_token(kind, name, bytes_of_token):
    """With the scales: by these bytes the engine decides whether a cascade saves enough."""
    executor = engine_of(model_of(kind), cache_dtype=name)._executor
    assert executor.token_bytes == bytes_of_token
    assert sum(x.nbytes for x in jax.tree.leaves(executor._state.cache)) == 2 * 100 * 4 * bytes_of_token


@pytest.mark.full
def test_tensor_parallel():
    """Scales lie beside the heads that they are of, and stay there: the same steps are not compiled twice."""
    prompts, tokens = expected("gemma3")["tokens"].tolist(), []
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    sizes = SIZES | {"max_step_tokens": 40, "context": None, "cache_dtype": "int8", "prefix_cache": False}
    for where in (None, mesh):
        model = from_pretrained(ROOT / "gemma3", dtype=jnp.float32, implementation="xla", mesh=where)
        engine = Engine(model, EngineOptions(**sizes))
        for _ in range(2):
            with counted_compilations() as compiled:
                clients = [Client(engine, prompt, max_tokens=20) for prompt in prompts]
                run(engine)
            tokens.append([client.tokens for client in clients])
        assert not compiled
    assert tokens == [tokens[0]] * 4
    cache, heads = engine._executor._state.cache, model.config.num_kv_heads
    for x in jax.tree.leaves(cache):
        assert [shard.data.shape[3] for shard in x.addressable_shards] == [heads // 2] * 2
    assert engine._executor.token_bytes == 2 * heads // 2 * (model.config.head_dim + 4)


def half_precision() -> Decoder:
    return Decoder(latent_model().config, dtype=jnp.float16, rngs=nnx.Rngs(0))


REFUSED = {
    "other": (lambda: model_of("small"), "int4", r"`cache_dtype` must be one of int8, .*, or None for .* Got 'int4'"),
    "alias": (lambda: model_of("small"), "fp8", r"one of int8, float8_e4m3fn, float8_e5m2, or None .* Got 'fp8'"),
    "latent": (latent_model, "int8", r"`cache_dtype` must be None or float8_e4m3fn .* Got int8\. Take float8_e4m3fn"),
    "tiles": (lambda: load("deepseek_v3"), "float8_e4m3fn", r"tiles of 128 columns, .* and 32 columns\. Leave it out"),
    "float16": (half_precision, "float8_e4m3fn", r"computes in float16, .* Compute in bfloat16 or float32, or"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_dtypes(name, monkeypatch):
    """Before anything is computed."""
    make, dtype, message = REFUSED[name]
    model = make()
    monkeypatch.setattr(Decoder, "init_paged_cache", None)
    with pytest.raises(ValueError, match=message):
        engine_of(model, cache_dtype=dtype)
