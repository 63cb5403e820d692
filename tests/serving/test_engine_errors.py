"""Refused calls, faults, cancellations and the end: whatever happens to a request, others get their tokens."""

from __future__ import annotations

import logging

import pytest

from flax_layers.serving import Closed, Constraint, QueueFull, Request
from tests.cases import constraint_cases
from tests.cases.engine_cases import (
    CHUNKS,
    COUNT,
    FEW,
    PROMPTS,
    SIZES,
    SYSTEM,
    Client,
    engine_of,
    fail_once,
    foresee,
    outputs,
    recomputed,
    run,
    submit,
)
from tests.cases.errors import serving
from tests.support.rows import tiers

ROWS = [pytest.param(*row[1:], id=row[0]) for row in serving.ROWS]
ROOM = SIZES["max_requests"]


@pytest.mark.parametrize(("provoke", "error", "message"), ROWS)
def test_message(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()


# --- what there is no room for


@pytest.mark.full
def test_a_prompt_longer_than_the_cache():
    engine = engine_of(**FEW)
    other = Client(engine, PROMPTS[0])
    engine.step()
    with pytest.raises(ValueError, match=r"must be shorter than 52 tokens, what the pages of the cache hold.* Got 53"):
        Client(engine, (1,) * 53)
    client = Client(engine, (1,) * 47, max_tokens=None)
    run(engine)
    assert len(client.tokens) == 5
    assert other.tokens == recomputed(PROMPTS[0])


@pytest.mark.full
@pytest.mark.parametrize("max_waiting", [0, 2])
def test_a_full_queue(max_waiting):
    """Requests that can start at once do not wait; nor do some of `n` samples."""
    engine = engine_of(max_waiting=max_waiting)
    for steps in (0, 3):  # those that run, or have not been scheduled yet
        clients = [Client(engine, (1, n)) for n in range(max_waiting + ROOM - 2)]
        clients += submit(engine, (5, 6), [{}, {}])
        for _ in range(steps):
            engine.step()
        with pytest.raises(QueueFull, match=rf"^{max_waiting} requests wait, and `max_waiting` is {max_waiting}\. Try"):
            Client(engine, (1,))
        with pytest.raises(QueueFull, match=f"Ask for at most {max_waiting + ROOM} samples"):
            submit(engine, (5, 6), [{}] * (max_waiting + ROOM + 1))
        run(engine)
        assert {x.reason for x in clients} == {"length"}


@pytest.mark.full
def test_requests_without_pages_wait():
    engine = engine_of(**FEW, max_waiting=0, prefix_cache=False)
    first = [Client(engine, (n,) * 20, max_tokens=5) for n in (1, 2, 3)]  # the third finds no pages
    engine.step()
    engine.step()
    with pytest.raises(QueueFull, match="1 requests wait"):
        Client(engine, (1,))
    run(engine)
    assert {x.reason for x in first} == {"length"}
    assert Client(engine, (1,)).ticket
    run(engine)


# --- cancellations


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, CHUNKS, {"draft_tokens": 5}], ids=str)
def test_cancelled_requests_end_and_return_their_pages(options, monkeypatch):
    foresee(monkeypatch)
    engine = engine_of(**options)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    clients[3].ticket.cancel()  # in the inbox
    for _ in range(2):
        engine.step()
    for number in (1, 5):  # one is within its prompt, one waits
        clients[number].ticket.cancel()
    engine.step()
    assert [clients[number].reason for number in (1, 3, 5)] == ["cancelled"] * 3
    run(engine)
    assert engine._pages._cache.num_locks == 0
    for number, client in enumerate(clients):
        ended = number not in (1, 3, 5)
        assert client.reason == ("length" if ended else "cancelled")
        assert not ended or client.tokens == recomputed(PROMPTS[number])
    clients[0].ticket.cancel()  # has ended
    run(engine)
    assert clients[0].reason == "length"


@pytest.mark.full
def test_tokens_of_the_step_before_are_not_read_for_a_cancelled_request():
    engine = engine_of(prefix_cache=False)
    leaving, staying = (Client(engine, prompt, max_tokens=20) for prompt in PROMPTS[:2])
    for _ in range(4):
        engine.step()
    leaving.ticket.cancel()
    engine.step()
    assert (leaving.reason, len(leaving.tokens)) == ("cancelled", 3)
    assert engine.stats().used_pages == len(staying.ticket._sequence.pages)
    run(engine)
    assert staying.reason == "length"


# --- faults


@pytest.mark.full
@pytest.mark.parametrize(
    ("fails_at", "when_read", "drafts"), [(1, False, 0), (4, False, 0), (2, True, 0), (3, True, 5)]
)
def test_a_failed_step_ends_its_requests_alone(fails_at, when_read, drafts, monkeypatch):
    """Samples that were not in it compute their prompt again."""
    foresee(monkeypatch)
    engine = engine_of(**CHUNKS, draft_tokens=drafts)
    fail_once(monkeypatch, engine, fails_at, when_read=when_read)
    clients = [*submit(engine, SYSTEM[:19], [{}] * 3), *(Client(engine, prompt) for prompt in PROMPTS)]
    prompts = [SYSTEM[:19]] * 3 + PROMPTS
    run(engine)
    assert engine.stats().failures == 1
    failed = [x.reason == "error" for x in clients]
    assert failed[0]
    assert sum(failed) == (1 if fails_at == 1 else ROOM)
    assert "RuntimeError: injected" in clients[0].events[-1].error
    for client, prompt, has_failed in zip(clients, prompts, failed, strict=True):
        assert has_failed or client.tokens == recomputed(prompt)


@pytest.mark.full
@pytest.mark.parametrize("fails_at", [1, 4])
def test_results_that_cannot_be_read_end_their_requests(fails_at, monkeypatch):
    """Even if no other step follows: computed again, they would fail for ever on a device that keeps failing."""
    engine = engine_of()
    fail_once(monkeypatch, engine, fails_at, when_read=True)
    client = Client(engine, PROMPTS[0], max_tokens=fails_at)
    run(engine)
    assert client.reason == "error"
    assert engine.stats().failures == 1
    assert outputs(engine, PROMPTS[:1]) == [recomputed(PROMPTS[0])]


@pytest.mark.full
def test_a_step_that_reaches_no_device_empties_nothing_of_others(monkeypatch):
    """Its requests end, with the tokens of the step before; those of other namespaces keep their pages."""
    engine = engine_of()
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


class Raising:
    """A function that raises in its nth call."""

    def __init__(self, function, nth: int):
        self._function, self._left = function, nth

    def __call__(self, *args):
        self._left -= 1
        if not self._left:
            raise RuntimeError("injected")
        return self._function(*args)


class Failing:
    """An object whose methods raise."""

    def __getattr__(self, name):
        return Raising(None, 1)


@tiers(default={"nth": 3})
@pytest.mark.parametrize("nth", [1, 3, COUNT])
def test_events_that_cannot_be_delivered_end_their_request_alone(nth, caplog):
    engine, events = engine_of(), []
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
def test_a_fault_of_drafts_ends_its_request_alone(monkeypatch):
    engine = engine_of(draft_tokens=5)
    bad, other = Client(engine, (7, 8) * 4), Client(engine, PROMPTS[1])
    monkeypatch.setattr(bad.ticket._sequence.lookup, "draft", Raising(None, 1))
    run(engine)
    assert (bad.reason, bad.events[-1].error) == ("error", "RuntimeError: injected")
    assert (other.tokens, engine.stats().failures) == (recomputed(PROMPTS[1]), 0)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["advance", "mask"])
def test_a_fault_of_a_constraint_ends_its_request_alone(fault, monkeypatch):
    """The library computes the masks of all requests in one call; it does not say whose mask it was."""
    engine = constraint_cases.engine_of("bytes")
    bad, other = (Client(engine, (1, 2), constraint=Constraint.regex(f"[a-{x}]{{9}}")) for x in "cd")
    plain = Client(engine, (3,))
    guide = bad.ticket._sequence.guide
    assert guide is not None
    if fault == "advance":
        monkeypatch.setattr(guide, "advance", Raising(None, 1))
    else:
        monkeypatch.setattr(engine._guides, "_executor", Failing())
        monkeypatch.setattr(guide, "matcher", Failing())
        monkeypatch.setattr(guide, "advance", lambda token: setattr(guide, "is_stale", True))
    run(engine)
    assert (bad.reason, "injected" in bad.events[-1].error) == ("error", True)
    assert (len(other.tokens), other.reason, len(plain.tokens)) == (9, "stop", COUNT)
    assert engine.stats().failures == 0


# --- the end


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", ["grace", "no grace", "fault of the scheduler"])
def test_a_thread_serves_until_its_end(end, monkeypatch):
    engine = engine_of()
    if end == "fault of the scheduler":
        monkeypatch.setattr(engine._scheduler, "schedule", lambda **_: 1 / 0)
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        engine.start()
    else:
        engine.start()
        clients = [Client(engine, prompt, max_tokens=COUNT if end == "grace" else 20) for prompt in PROMPTS * 3]
    engine.stop(grace=0 if end == "no grace" else 60)
    reasons, errors = {x.reason for x in clients}, [x.events[-1].error for x in clients if x.reason != "length"]
    if end == "grace":
        assert [x.tokens for x in clients] == [recomputed(prompt) for prompt in PROMPTS * 3]
    elif end == "no grace":
        assert reasons <= {"cancelled", "length"}
        assert all("shutting down" in error for error in errors)
        engine.check()
    else:
        assert reasons == {"error"}
        assert "ZeroDivisionError" in errors[0]
    assert not engine.is_running
    with pytest.raises(Closed, match="shutting down"):
        Client(engine, (1,))
