"""Small models, the tokens that are right, drafts, and clients, which the tests of the engine share.

Engines of one model with as many pages and requests share their compiled programs; so tests keep to few sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder, LatentConfig, LayerConfig, ModelConfig, fuse_projections, parameter_shardings
from flax_layers.nnx import AlibiBias
from flax_layers.serving import Engine, EngineOptions, Event, Request, Streaming
from flax_layers.serving.engine.drafts import Draft, PromptLookup
from jflex.paged import PagedBatch
from tests.models.test_models import SMALL
from tests.support.golden_models import logits_of

COUNT = 10
SYSTEM = tuple(range(30, 51))  # five pages of 4 tokens, and one token
PROMPTS = [(1, 2, 3), (*SYSTEM, 7, 8, 9, 7), (9,) * 7, (*SYSTEM, 5), (60,), SYSTEM[:8], (*SYSTEM[:12], 1, 1)]
SIZES = {"max_requests": 4, "max_step_tokens": 24, "num_pages": 100, "page_size": 4, "context": 64, "poison": True}
FEW = {"num_pages": 14}  # so few pages that requests evict cached ones and preempt each other
CHUNKS = {"max_step_tokens": 9}  # chunks of prompts that end within pages

IN_WINDOWS = dataclasses.replace(SMALL, layers=(LayerConfig(window=9), LayerConfig(window=5)))
LATENT = ModelConfig(  # with latent vectors of two tiles
    family="deepseek_v3", vocabulary=64, width=32, mlp_width=48, num_heads=2, num_kv_heads=2, head_dim=12,
    layers=(LayerConfig(),) * 2, max_positions=512, initializer_range=0.2,
    latent=LatentConfig(latent_dim=256, nope_head_dim=8, rope_head_dim=4, value_head_dim=8),
)  # fmt: skip
STREAMED = ModelConfig(  # for few positions, so that only those within the cache can be right
    vocabulary=64, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=16, qk_norm=True,
    layers=(LayerConfig(rotary_base=40.0),) * 2, initializer_range=0.3,
)  # fmt: skip
CONFIGS = {"windows": IN_WINDOWS, "latent": LATENT, "streaming": STREAMED}


@functools.cache
def model(kind: str = "small") -> Decoder:
    """All but those in `CONFIGS` have a window of 5 in one of their two layers, and biases of positions."""
    more = {} if kind in CONFIGS else {"score_mod": functools.partial(AlibiBias, SMALL.num_heads)}
    decoder = Decoder(CONFIGS.get(kind, SMALL), implementation="xla", rngs=nnx.Rngs(0), **more)
    if kind == "fused":
        fuse_projections(decoder)
    if kind == "sharded":
        parameters = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(decoder, nnx.Param))}
        mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
        shardings = parameter_shardings({path: x.shape for path, x in parameters.items()}, mesh)
        for path, x in parameters.items():
            x.set_value(jax.device_put(x[...], shardings[path]))
    return decoder


def best(logits: np.ndarray, margin: float = 1e-4) -> int:
    """The most probable token, where no order of sums can decide."""
    second, first = np.sort(logits)[-2:]
    assert first - second > margin
    return int(np.argmax(logits))


@functools.cache
def recomputed(prompt: tuple[int, ...], kind: str = "small", count: int = COUNT) -> list[int]:
    """Greedy tokens after a prompt of one of the small models."""
    return greedy(model(kind), prompt, count)


def greedy(decoder: Decoder, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens after a prompt, each by a pass over its whole sequence."""
    text = np.zeros((1, 64), np.int32)
    text[0, : len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + count):
        text[0, place] = best(np.asarray(logits_of(decoder, text))[0, place - 1])
    return text[0, len(prompt) : len(prompt) + count].tolist()


@functools.cache
def looped(prompt: tuple[int, ...], kind: str, dtype: str, streaming: Streaming | None = None) -> list[int]:
    """Greedy tokens of one request alone in a cache of eight bits."""
    cache = model(kind).init_paged_cache(17, 4, dtype=dtype)
    table, new, tokens, length = jnp.arange(1, 17, dtype=jnp.int32)[None], list(prompt), [], 0
    for _ in range(COUNT):
        length += len(new)
        batch = PagedBatch(jnp.array([0, len(new)]), jnp.array([length]), table)
        padded = np.array(new + [0] * (32 - len(new)), np.int32)
        logits, cache = _reader(kind, streaming)(padded, cache, batch)
        new = [best(np.asarray(logits[len(new) - 1]), 5e-4)]
        tokens += new
    return tokens


@functools.cache
def _reader(kind: str, streaming: Streaming | None):
    graph, state = nnx.split(model(kind))
    read = lambda tokens, cache, batch: nnx.merge(graph, state).decode_paged(tokens, cache, batch, streaming)
    return jax.jit(read)


class Client:
    """Collects the events of one request."""

    def __init__(self, engine: Engine, prompt, **options: Any):
        self.events: list[Event] = []
        self.ticket = engine.submit(Request(prompt, **{"max_tokens": COUNT, **options}), self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def logprobs(self) -> list[Any]:
        return [one for event in self.events for one in event.logprobs]

    @property
    def reason(self) -> str | None:
        assert all(event.finish_reason is None for event in self.events[:-1])
        return self.events[-1].finish_reason if self.events else None


class Sample(Client):
    """Collects the events of one of several samples."""

    def __init__(self):
        self.events = []


def submit(engine: Engine, prompt, each: list[dict[str, Any]]) -> list[Sample]:
    """Submits samples of a prompt, with the options of each."""
    samples = [Sample() for _ in each]
    requests = [Request(prompt, **{"max_tokens": COUNT, **options}) for options in each]
    tickets = engine.submit_all(requests, [sample.events.append for sample in samples])
    for sample, ticket in zip(samples, tickets, strict=True):
        sample.ticket = ticket
    return samples


def run(engine: Engine) -> None:
    while engine.step():
        engine.check()
    engine.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == engine.options.num_pages - 1


def outputs(engine: Engine, prompts, **options: Any) -> list[list[int]]:
    """Runs one request for each prompt."""
    clients = [Client(engine, prompt, **options) for prompt in prompts]
    run(engine)
    return [client.tokens for client in clients]


def engine_of(decoder: Decoder | None = None, **options: Any) -> Engine:
    return Engine(model() if decoder is None else decoder, EngineOptions(**SIZES | options))


class Foreseeing(PromptLookup):
    """Drafts the right tokens, somewhere in a random tree; so that each step accepts some, after moves of keys.

    Attributes:
        futures: What follows each prompt.
    """

    futures: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}

    def __init__(self, tokens, least_match):
        self.prompt, self.rng = tuple(tokens), np.random.default_rng(len(tokens))

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        future = self.futures[self.prompt][len(tokens) - len(self.prompt) :]
        right, drafted, parents = -1, [], []
        for _ in range(most):
            depth = 0 if right < 0 else 1 + self.depth(right, parents)
            taken = {token for token, parent in zip(drafted, parents, strict=True) if parent == right}
            if depth < len(future) and future[depth] not in taken and self.rng.random() < 0.5:
                drafted.append(int(future[depth]))
                parents.append(right)
                right = len(drafted) - 1
                continue
            parent = int(self.rng.integers(-1, len(drafted)))
            after = [token for token, other in zip(drafted, parents, strict=True) if other == parent]
            token = next(x for x in self.rng.permutation(64).tolist() if x not in after)
            drafted.append(token)
            parents.append(parent)
            if parent == right and depth < len(future) and token == future[depth]:
                right = len(drafted) - 1
        return Draft(tuple(drafted), tuple(parents))

    @staticmethod
    def depth(node: int, parents: list[int]) -> int:
        return 0 if parents[node] < 0 else 1 + Foreseeing.depth(parents[node], parents)


def foresee(monkeypatch: pytest.MonkeyPatch, futures: dict[tuple[int, ...], Sequence[int]] | None = None) -> None:
    """Makes engines with drafts draft from known futures: those of `recomputed`, unless others are known."""
    futures = {prompt: recomputed(prompt) for prompt in [*PROMPTS, SYSTEM]} if futures is None else futures
    monkeypatch.setattr("flax_layers.serving.engine.admission.PromptLookup", Foreseeing)
    monkeypatch.setattr(Foreseeing, "futures", futures)


class _Unreadable:
    """Results of a step that the device failed to compute."""

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, *_, **__):
        raise RuntimeError("injected")


def fail_once(monkeypatch: pytest.MonkeyPatch, engine: Engine, nth: int, *, when_read: bool = False) -> None:
    """Makes the nth step from now on raise: when it is dispatched, or when its results are read."""
    sound, calls = engine._executor._step, itertools.count(1)

    def failing(*args, **options):
        if next(calls) != nth:
            return sound(*args, **options)
        if when_read:
            return sound(*args, **options)[0], _Unreadable()
        raise RuntimeError("injected")

    monkeypatch.setattr(engine._executor, "_step", failing)
