"""A small model, its greedy tokens, and clients, which the tests of the engine share."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder
from flax_layers.serving import Engine, EngineOptions, Event, Request
from tests.models.test_models import SMALL
from tests.support.golden_models import logits_of

COUNT = 10
SYSTEM = tuple(range(30, 51))  # five pages of 4 tokens, and one token
PROMPTS = [(1, 2, 3), (*SYSTEM, 7, 8, 9, 7), (9,) * 7, (*SYSTEM, 5), (60,), SYSTEM[:8], (*SYSTEM[:12], 1, 1)]
SIZES = {"max_requests": 8, "max_step_tokens": 24, "num_pages": 100, "page_size": 4, "context": 64, "poison": True}


@functools.cache
def model() -> Decoder:
    """With a window of 5 in one of its two layers."""
    return Decoder(SMALL, implementation="xla", rngs=nnx.Rngs(0))


@functools.cache
def recomputed(prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens after a prompt, each by a pass over its whole sequence, where no order of sums can decide."""
    text = np.zeros((1, 48), np.int32)
    text[0, : len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + COUNT):
        logits = np.asarray(logits_of(model(), text))[0, place - 1]
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-4
        text[0, place] = np.argmax(logits)
    return text[0, len(prompt) : len(prompt) + COUNT].tolist()


class Client:
    """Collects the events of one request."""

    def __init__(self, engine: Engine, prompt, **options: Any):
        self.events: list[Event] = []
        self.ticket = engine.submit(Request(prompt, **{"max_tokens": COUNT, **options}), self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

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
    tickets = engine.submit_samples(requests, [sample.events.append for sample in samples])
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


def check_staggered_arrivals(engine: Engine) -> None:
    """Sixteen requests arrive while others run, and get the tokens of full recomputation."""
    clients = []
    for arrival in range(16):
        clients.append(Client(engine, PROMPTS[arrival % len(PROMPTS)]))
        for _ in range(arrival % 3):
            engine.step()
    run(engine)
    assert [x.tokens for x in clients] == [recomputed(PROMPTS[n % len(PROMPTS)]) for n in range(16)]


def engine_of(decoder: Decoder, **options) -> Engine:
    return Engine(decoder, EngineOptions(**SIZES | options))


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
