"""What the engine refuses, and faults of one request, which end no other."""

from __future__ import annotations

import logging

import pytest

from flax_layers.models import Decoder
from flax_layers.sampling import Sampling
from flax_layers.serving import Constraint, Engine, EngineOptions, Guides, QueueFull, Request
from flax_layers.serving.demo_model import ByteTokenizer
from flax_layers.serving.device.penalties import Penalties
from tests.cases import engine_cases
from tests.cases.engine_cases import COUNT, PROMPTS, SYSTEM, Client, engine_of, fail_once, recomputed, run
from tests.support import served


@pytest.fixture(scope="module")
def model() -> Decoder:
    return engine_cases.model()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((1,) * 64, {}, r"`prompt` must be shorter than 64 tokens, the context length, .* Got 64"),
        ((1,) * 60, {"max_tokens": 5}, r"together must be at most 64 tokens, .* Got 60 and 5\..*lower .* to 4"),
        ((1, 64), {}, r"`prompt` must hold tokens from 0 to 63, .* It holds 1 to 64"),
        ((), {}, r"`prompt` must hold at least one token"),
        ((1,), {"max_tokens": 0}, r"`max_tokens` must be at least 1. Got 0"),
        ((1,), {"penalties": Penalties(logit_bias=((64, 1.0),))}, r"`logit_bias` must be of tokens .* 63\. Got 64"),
        ((1,), {"logprobs": 21}, r"`logprobs` must be from 0 to 20. Got 21"),
        ((1,), {"stop_tokens": (7,) * 1025}, r"`stop_tokens` must be at most 1024 tokens. Got 1025"),
    ],
)
def test_wrong_requests(prompt, options, message, model):
    engine = engine_of(model)
    with pytest.raises(ValueError, match=message):
        Client(engine, prompt, **options)
    assert not engine.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": (1, 2.5)}, r"`prompt\[1\]` must be an integer. Got float"),
        ({"prompt": (1,), "stop_tokens": ("a",)}, r"`stop_tokens\[0\]` must be an integer. Got str"),
        ({"prompt": (1,), "max_tokens": 1.0}, "`max_tokens` must be an integer. Got float"),
        ({"prompt": (1,), "logprobs": "2"}, "`logprobs` must be an integer. Got str"),
        ({"prompt": (1,), "stop_tokens": (1.5,)}, r"`stop_tokens\[0\]` must be an integer. Got float"),
    ],
)
def test_wrong_types(options, message):
    with pytest.raises(TypeError, match=message):
        Request(**options)


@pytest.mark.full
def test_a_prompt_longer_than_the_cache(model):
    engine = engine_of(model, num_pages=6)
    with pytest.raises(ValueError, match="must be shorter than 20 tokens, what the pages of the cache hold"):
        Client(engine, (1,) * 20)
    client = Client(engine, (1,) * 15, max_tokens=None)
    run(engine)
    assert len(client.tokens) == 5


@pytest.mark.full
@pytest.mark.parametrize("max_waiting", [0, 2])
def test_a_full_queue(max_waiting, model):
    """Requests that can start at once do not wait; nor do some of `n` samples."""
    engine = engine_of(model, max_waiting=max_waiting)
    for steps in (0, 3):  # those that run, or have not been scheduled yet
        clients = [Client(engine, (1, n)) for n in range(max_waiting + 6)]
        clients += engine_cases.submit(engine, (5, 6), [{}, {}])
        for _ in range(steps):
            engine.step()
        with pytest.raises(QueueFull, match=rf"^{max_waiting} requests wait, and `max_waiting` is {max_waiting}\. Try"):
            Client(engine, (1,))
        with pytest.raises(QueueFull, match=f"Ask for at most {max_waiting + 8} samples"):
            engine_cases.submit(engine, (5, 6), [{}] * (max_waiting + 9))
        run(engine)
        assert {x.reason for x in clients} == {"length"}


@pytest.mark.full
def test_requests_without_pages_wait(model):
    engine = engine_of(model, num_pages=9, max_waiting=0, prefix_cache=False)
    first = [Client(engine, (n,) * 12, max_tokens=5) for n in (1, 2, 3)]  # the third finds no pages
    engine.step()
    engine.step()
    with pytest.raises(QueueFull, match="1 requests wait"):
        Client(engine, (1,))
    run(engine)
    assert {x.reason for x in first} == {"length"}
    assert Client(engine, (1,)).ticket
    run(engine)


@pytest.mark.parametrize(
    ("penalties", "message"),
    [
        ({"presence_penalty": 2.5}, "`presence_penalty` must be from -2 to 2. Got 2.5"),
        ({"frequency_penalty": float("nan")}, "`frequency_penalty` must be from -2 to 2. Got nan"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be from 1e-06 to 1e[+]06. Got 0.0"),
        ({"repetition_penalty": 1e-45}, "`repetition_penalty` must be from 1e-06 to 1e[+]06. Got 1e-45"),
        ({"repetition_penalty": 10**400}, "`repetition_penalty` must be from 1e-06 to 1e[+]06. Got 1000"),
        ({"presence_penalty": -(10**400)}, "`presence_penalty` must be from -2 to 2. Got -1000"),
        ({"logit_bias": ((3, 101.0),)}, "`logit_bias` must be from -100 to 100. Got 101.0 for token 3"),
        ({"logit_bias": ((3, 1.0),) * 301}, "`logit_bias` must be of at most 300 tokens. Got 301"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_penalties(penalties, message):
    with pytest.raises(ValueError, match=message):
        Penalties(**penalties)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_requests": 0}, "`max_requests` must be at least 1. Got 0"),
        ({"page_size": 257}, "`page_size` must be from 1 to 256. Got 257"),
        ({"max_step_tokens": 4}, "`max_step_tokens` must be at least `max_requests`, .* Got 4 and 8"),
        ({"context": 513}, "`context` must be from 2 to the 512 positions .* Got 513"),
    ],
)
def test_wrong_options(options, message, model):
    with pytest.raises(ValueError, match=message):
        engine_of(model, **options)


@pytest.mark.full
def test_numbers_that_no_device_array_holds(model):
    """Other requests go on, and `top_k` keeps all tokens."""
    engine = engine_of(model)
    other = Client(engine, PROMPTS[0])
    engine.step()
    drawn = [Client(engine, PROMPTS[1], sampling=Sampling(1.0, top_k=k, seed=3)) for k in (0, 1 << 31, 10**30)]
    biased = [Client(engine, (60,), penalties=Penalties(logit_bias=bias)) for bias in (((7, 9.0),), ((7, -9), (7, 9)))]
    run(engine)
    assert other.tokens == recomputed(PROMPTS[0])
    assert len({tuple(x.tokens) for x in drawn}) == len({tuple(x.tokens) for x in biased}) == 1
    assert engine.stats().failures == 0


class Raising:
    """A function that raises in its nth call."""

    def __init__(self, function, nth: int):
        self._function, self._left = function, nth

    def __call__(self, *args):
        self._left -= 1
        if not self._left:
            raise RuntimeError("injected")
        return self._function(*args)


@pytest.mark.parametrize(
    "nth", [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(COUNT, marks=pytest.mark.full)]
)
def test_events_that_cannot_be_delivered_end_their_request_alone(nth, model, caplog):
    engine, events = engine_of(model), []
    with caplog.at_level(logging.CRITICAL):
        ticket = engine.submit(Request(SYSTEM, max_tokens=COUNT), Raising(events.append, nth))
        other = Client(engine, (*SYSTEM, 5))
        run(engine)
    assert len(events) == nth - 1
    assert ticket._sequence.finish_reason == ("length" if nth == COUNT else "error")
    assert other.tokens == recomputed((*SYSTEM, 5))
    assert (other.ticket.hit_tokens, engine.stats().failures) == (20, 0)
    events.clear()
    cancelled = engine.submit(Request((1,)), Raising(events.append, 1))
    cancelled.cancel()
    run(engine)
    assert not events


@pytest.mark.full
def test_a_fault_of_drafts_ends_its_request_alone(model, monkeypatch):
    engine = engine_of(model, draft_tokens=4)
    bad, other = Client(engine, (7, 8) * 4), Client(engine, PROMPTS[1])
    monkeypatch.setattr(bad.ticket._sequence.lookup, "draft", Raising(None, 1))
    run(engine)
    assert (bad.reason, bad.events[-1].error) == ("error", "RuntimeError: injected")
    assert (other.tokens, engine.stats().failures) == (recomputed(PROMPTS[1]), 0)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["advance", "mask"])
def test_a_fault_of_a_constraint_ends_its_request_alone(fault, monkeypatch):
    """The library computes the masks of all requests in one call; it does not say whose mask it was."""
    guides = Guides(ByteTokenizer(), served.CONFIG.vocabulary)
    engine = Engine(
        served.model(), EngineOptions(max_requests=4, max_step_tokens=32, num_pages=65, page_size=8), guides
    )
    bad, other = (Client(engine, (1, 2), constraint=Constraint.regex(f"[a-{x}]{{9}}")) for x in "cd")
    plain = Client(engine, (3,))
    guide = bad.ticket._sequence.guide
    assert guide is not None
    if fault == "advance":
        monkeypatch.setattr(guide, "advance", Raising(None, 1))
    else:
        monkeypatch.setattr(guides, "_executor", Failing())
        monkeypatch.setattr(guide, "matcher", Failing())
        monkeypatch.setattr(guide, "advance", lambda token: setattr(guide, "is_stale", True))
    run(engine)
    assert (bad.reason, "injected" in bad.events[-1].error) == ("error", True)
    assert (len(other.tokens), other.reason, len(plain.tokens)) == (9, "stop", COUNT)
    assert engine.stats().failures == 0


class Failing:
    """An object whose methods raise."""

    def __getattr__(self, name):
        return Raising(None, 1)


def test_a_step_that_reaches_no_device_empties_nothing_of_others(model, monkeypatch):
    """Its requests end, with the tokens of the step before; those of other namespaces keep their pages."""
    engine = engine_of(model)
    before = Client(engine, SYSTEM, namespace="other")
    run(engine)
    failing = [Client(engine, PROMPTS[0], max_tokens=20), Client(engine, (60,), max_tokens=3)]
    for _ in range(3):  # the second one ends in the third step, which has not been read
        engine.step()
    fail_once(monkeypatch, engine, 1)
    run(engine)
    assert [x.reason for x in failing] == ["error", "length"]
    assert failing[0].tokens == recomputed(PROMPTS[0])[:3]
    assert failing[1].tokens == recomputed((60,))[:3]
    assert engine.stats().failures == 1
    after = [Client(engine, SYSTEM, namespace=namespace) for namespace in ("other", None)]
    run(engine)
    assert [x.tokens for x in (before, *after)] == [recomputed(SYSTEM)] * 3
    assert [x.ticket.hit_tokens for x in after] == [20, 0]
