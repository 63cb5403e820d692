"""Batch-invariant serving: tokens and log probabilities of a request are the same, to the bit, in every batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jflex
from flax_layers.models import Decoder, LayerConfig
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, EngineOptions
from flax_layers.serving.device.penalties import Penalties
from tests.cases.engine_cases import PROMPTS, SIZES, SYSTEM, Client, run, submit
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.support.rows import tiers

LAYERS = {
    "one of two in a window": SMALL.layers,
    "all in windows": (LayerConfig(window=9), LayerConfig(window=5)),
    "none in a window": (LayerConfig(), LayerConfig()),
}
DRAWN = Sampling(0.9, top_k=40, top_p=0.95, seed=7)
LONG = tuple(n * n % 61 for n in range(300))  # more than a tile of keys
# Prompts, beginning alike or not, and how their text is sampled.
ARRIVALS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *[(prompt, {}) for prompt in PROMPTS],
    (PROMPTS[1], {"sampling": DRAWN}),
    (LONG, {}),
    (PROMPTS[2], {"penalties": Penalties(presence_penalty=1.0, logit_bias=((2, 1.0),))}),
    *[((*LONG[:200], n), {}) for n in range(2)],
    *[((*SYSTEM, n), {"sampling": Sampling(1.0, seed=n)}) for n in range(2)],
]


@functools.cache
def model(layers: str = "one of two in a window", dtype="float32", implementation="xla", promises=True) -> Decoder:
    """So wide that XLA's CPU compiler adds in another order for another number of tokens."""
    sizes = {"width": 64, "mlp_width": 256, "head_dim": 16, "initializer_range": 0.1}
    config = dataclasses.replace(SMALL, layers=LAYERS[layers], **sizes)
    invariant = jflex.Config(batch_invariant=True) if promises else None
    how = {"implementation": implementation, "attention_config": invariant, "rngs": nnx.Rngs(0)}
    return Decoder(config, dtype=jnp.dtype(dtype), **how)


def engine_of(decoder: Decoder, **options) -> Engine:
    sizes = SIZES | {"num_pages": 400, "context": 320, "batch_invariant": True}
    return Engine(decoder, EngineOptions(**{**sizes, **options}))


def heard(client: Client):
    """What a client got, to the bit: tokens, and log probabilities, of each its own and the best five."""
    return client.tokens, client.logprobs


def each_alone(decoder: Decoder, arrivals=ARRIVALS, **options):
    """What each arrival gets from an engine without any other, and without cached prefixes."""
    found = []
    for prompt, how in arrivals:
        client = Client(engine := engine_of(decoder, **options), prompt, logprobs=5, **how)
        run(engine)
        found.append(heard(client))
    return found


def together(engine: Engine, arrivals=ARRIVALS):
    """What each gets beside all others, which come while it runs."""
    clients = []
    for number, (prompt, how) in enumerate(arrivals):
        clients.append(Client(engine, prompt, logprobs=5, **how))
        for _ in range(number % 3):
            engine.step()
    run(engine)
    return [heard(client) for client in clients]


BATCHES = [
    ("one of two in a window", "float32", {}),
    ("one of two in a window", "float32", {"max_step_tokens": 9}),  # chunks that cut pages
    ("one of two in a window", "bfloat16", {}),
    ("all in windows", "float32", {"max_step_tokens": 11}),
    ("none in a window", "float32", {"cascade_bytes": 1}),
    ("none in a window", "float32", {"num_pages": 80}),  # evictions and preemptions
    ("one of two in a window", "float32", {"cache_dtype": "float8_e4m3fn", "max_step_tokens": 11}),
    ("none in a window", "float32", {"cache_dtype": "int8", "num_pages": 80}),
]


@tiers(full={"layers": "one of two in a window-float32-{'max_step_tokens': 9}"}, rest="long")
@pytest.mark.parametrize(("layers", "dtype", "options"), BATCHES, ids=str)
def test_a_request_gets_the_same_bits_alone_and_among_others(layers, dtype, options):
    decoder, engine = model(layers, dtype), engine_of(model(layers, dtype), **options)
    expected = each_alone(decoder, **{"max_step_tokens": SIZES["max_step_tokens"], **options})
    for _ in range(2):  # the second time, prefixes are cached
        assert together(engine) == expected
    stats = engine.stats()
    assert stats.hit_tokens > 0
    assert (stats.preemptions > 0) == ("num_pages" in options)
    assert stats.cascade_steps == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype):
    """As far as the GEMMs of XLA compute a row alike at each place of a step."""
    with jax.default_matmul_precision("highest"):
        decoder = model("one of two in a window", dtype, "triton")
        assert together(engine_of(decoder)) == each_alone(decoder)


@pytest.mark.full
def test_samples_of_a_prompt():
    """They share its pages, copy the last one, and take their first tokens from the same logits."""
    engine = engine_of(model())
    others = [Client(engine, prompt) for prompt in PROMPTS[:3]]
    options = [{"logprobs": 5, "sampling": dataclasses.replace(DRAWN, seed=seed)} for seed in (1, 2, 3)]
    samples = submit(engine, SYSTEM, options)
    run(engine)
    assert {other.reason for other in others} == {"length"}
    for sample, how in zip(samples, options, strict=True):
        client = Client(alone := engine_of(model()), SYSTEM, **how)
        run(alone)
        assert heard(sample) == heard(client)


@pytest.mark.long
def test_without_it_the_batch_changes_bits():
    """Else the tests above would show nothing."""
    decoder, usual, few = model(promises=False), {"batch_invariant": False}, ARRIVALS[6:10]
    assert together(engine_of(decoder, **usual), few) != each_alone(decoder, few, **usual)


@pytest.mark.full
def test_there_is_one_program_and_nothing_is_compiled_after_warm_up():
    engine, reports = engine_of(model(), cascade_bytes=1), []
    assert len(engine.options.shapes(engine.config)) == 1
    engine.warm_up(lambda done, total: reports.append((done, total)))
    assert reports == [(1, 1)]
    for number in range(8):  # programs that overwrite free pages or write penalties are no steps
        Client(engine, PROMPTS[0], penalties=ARRIVALS[number][1].get("penalties", Penalties(presence_penalty=1.0)))
        engine.step()
    with counted_compilations() as compiled:
        together(engine)
    assert not compiled
