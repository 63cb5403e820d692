"""The engine with StreamingLLM: tokens of the oracle, in a cache that does not grow with the sequences."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, EngineOptions, Streaming
from flax_layers.serving.device.penalties import Penalties
from tests.cases import streaming_llm_cases as oracle
from tests.cases.engine_cases import STREAMED, SYSTEM, Client, model, run
from tests.support.rows import tiers

STREAMING = Streaming(sinks=3, window=9)
SIZES = {
    "max_requests": 4, "max_step_tokens": 16, "num_pages": 60, "page_size": 4, "context": 4096, "poison": True,
    "streaming": STREAMING,
}  # fmt: skip
SINKS, WINDOW = 1, 3  # pages: of 3 tokens, and of 9 at any offset
FEW = {"num_pages": 12, "prefix_cache": False}
PROMPTS = [(1, 2, 3), (*SYSTEM, 7, 8, 9, 7), (9,) * 7, (*SYSTEM, 5), (*SYSTEM, *SYSTEM, 3), (*SYSTEM[:12], 1, 1)]
COUNT = 30


def engine_of(**options) -> Engine:
    return Engine(model("streaming"), EngineOptions(**SIZES | options))


def check_tokens(client: Client, count: int = COUNT) -> None:
    """Each token is the most probable one of the oracle after those before; all margins are large enough to say so."""
    prompt = client.ticket._sequence.request.prompt
    assert client.reason == "length"
    assert len(client.tokens) == count
    text = np.array([*prompt, *client.tokens], np.int32)
    logits = oracle.logits(model("streaming"), text, STREAMING)[len(prompt) - 1 : -1]
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    assert (first - second > 1e-4).all()
    np.testing.assert_array_equal(np.argmax(logits, -1), client.tokens)


OPTIONS = [
    {}, FEW, {"max_step_tokens": 4}, {"prefix_cache": False}, {"page_size": 1, "num_pages": 100}, {"page_size": 16},
]  # fmt: skip


@tiers(full={"options": str(OPTIONS[0])}, rest="long")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_those_of_the_oracle(options):
    """Of texts that have become longer than the cache, and others that preempt them."""
    engine = engine_of(**options)
    clients = [Client(engine, prompt, max_tokens=COUNT + 10 * n) for n, prompt in enumerate([(1, 2), (9,), (60, 3)])]
    for _ in range(25):
        engine.step()
    for _ in range(2):  # the second time, prefixes are cached
        clients += [Client(engine, prompt, max_tokens=COUNT) for prompt in (*PROMPTS, SYSTEM * 3)]
        run(engine)
    for n, client in enumerate(clients):
        check_tokens(client, COUNT + 10 * n if n < 3 else COUNT)
    shares = engine.options.prefix_cache and engine.options.page_size <= STREAMING.size
    assert (engine.stats().hit_tokens > 0) == shares
    assert (engine.stats().preemptions > 0) == (options == FEW)


@pytest.mark.full
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_pages_are_bounded(prefix_cache):
    """Of a long prompt in chunks, and of 60 tokens after it. A shared prefix is held until the window has left it."""
    engine, chunk = engine_of(prefix_cache=prefix_cache), SIZES["max_step_tokens"]
    client, most = Client(engine, (*SYSTEM, *SYSTEM, *SYSTEM[::-1]), max_tokens=60), 0
    sequence = client.ticket._sequence
    while engine.step():
        engine.check()
        held = len(sequence.pages)
        first = sequence.computed - (chunk if sequence.generated <= 1 else 1)
        count = sequence.computed - first
        window = -(-(STREAMING.window + count - 2) // 4) + 1
        shared = STREAMING.size // 4 if prefix_cache and first < STREAMING.size + STREAMING.window else 0
        assert held <= max(SINKS, shared) + window
        most = max(most, held)
        if sequence.generated > 20:
            assert held <= SINKS + WINDOW
    assert most <= engine.options.pages(STREAMED)[-1]
    check_tokens(client, 60)


@pytest.mark.full
def test_prompts_that_starve_each_other(monkeypatch):
    """If no prompt gets a page for its next token, the last one gives its pages to the others."""
    engine = engine_of()
    room = engine._pages.room

    def short(sequence, wanted, spare):
        scheduler = engine._scheduler
        starves = len(scheduler.running) == 2 and sequence.computed > 10 and not scheduler.preemptions
        return 0 if starves else room(sequence, min(wanted, 3), spare)

    monkeypatch.setattr(engine._pages, "room", short)
    clients = [Client(engine, prompt, max_tokens=COUNT) for prompt in (SYSTEM * 2, SYSTEM[::-1] * 2)]
    run(engine)
    assert engine.stats().preemptions == 1
    for client in clients:
        check_tokens(client)


@pytest.mark.full
def test_prefixes_are_shared_up_to_the_size():
    engine = engine_of()
    hits = []
    for prompt in ((*SYSTEM, 1), (*SYSTEM, 1), (*SYSTEM, 2, *SYSTEM), SYSTEM[:9]):
        clients = [Client(engine, prompt, max_tokens=COUNT)]
        run(engine)
        check_tokens(clients[0])
        hits.append(clients[0].ticket.hit_tokens)
    assert hits == [0, 12, 12, 8]


@pytest.mark.long
def test_draws_and_penalties_know_the_whole_sequence():
    """A seed draws by the position in the sequence, and a penalty counts tokens whose pages are gone."""
    sampling = Sampling(1.0, seed=3)
    outputs = []
    for options in ({}, FEW):
        engine = engine_of(**options)
        drawn = Client(engine, PROMPTS[4], max_tokens=COUNT, sampling=sampling)
        forbidden = Client(
            engine, SYSTEM, max_tokens=43, penalties=Penalties(presence_penalty=2.0, frequency_penalty=2.0)
        )
        run(engine)
        outputs.append((drawn.tokens, forbidden.tokens))
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0][1])) > 20


@pytest.mark.full
def test_thousands_of_tokens_in_twenty_pages():
    """Every token is that of the oracle, to the last one."""
    count, streaming, most = 2000, Streaming(sinks=4, window=44), 0
    decoder = Decoder(dataclasses.replace(STREAMED, max_positions=48, layers=STREAMED.layers[:1]), rngs=nnx.Rngs(0))
    sizes = {"num_pages": 21, "context": count + 4, "max_requests": 1, "poison": False, "streaming": streaming}
    engine = Engine(decoder, EngineOptions(**SIZES | sizes))
    client = Client(engine, (1, 2, 3, 4), max_tokens=count)
    while engine.step():
        most = max(most, engine.stats().used_pages)
    run(engine)
    assert most <= 1 + 12
    assert (client.reason, len(client.tokens), engine.stats().preemptions) == ("length", count, 0)
    logits = oracle.logits(decoder, np.array([1, 2, 3, 4, *client.tokens], np.int32), streaming)[3:-1]
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    clear = first - second > 1e-3
    assert clear.mean() > 0.9
    assert (np.argmax(logits, -1) == client.tokens)[clear].all()
