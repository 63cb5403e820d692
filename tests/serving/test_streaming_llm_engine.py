"""The engine with StreamingLLM: tokens of the oracle, in a cache that does not grow with the sequences."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, EngineOptions, Streaming
from flax_layers.serving.device.penalties import Penalties
from tests.cases import streaming_llm_cases as oracle
from tests.cases.engine_cases import Client, run
from tests.support.rows import tiers

STREAMING = Streaming(sinks=3, window=9)
SIZES = {
    "max_requests": 4, "max_step_tokens": 16, "num_pages": 60, "page_size": 4, "context": 4096, "poison": True,
    "streaming": STREAMING,
}  # fmt: skip
SINKS, WINDOW = 1, 3  # pages: of 3 tokens, and of 9 at any offset
SYSTEM = tuple(range(30, 51))
PROMPTS = [(1, 2, 3), (*SYSTEM, 7, 8, 9, 7), (9,) * 7, (*SYSTEM, 5), (*SYSTEM, *SYSTEM, 3), (*SYSTEM[:12], 1, 1)]
COUNT = 30


@functools.cache
def model(max_positions: int = 16, layers: int = 2) -> Decoder:
    """Trained for few positions, so that only those within the cache can be right."""
    config = ModelConfig(
        vocabulary=64, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8,
        layers=(LayerConfig(rotary_base=40.0),) * layers, max_positions=max_positions,
        qk_norm=True, initializer_range=0.3,
    )  # fmt: skip
    return Decoder(config, implementation="xla", rngs=nnx.Rngs(0))


def engine_of(**options) -> Engine:
    return Engine(model(), EngineOptions(**SIZES | options))


def check_tokens(client: Client, count: int = COUNT) -> None:
    """Each token is the most probable one of the oracle after those before; all margins are large enough to say so."""
    prompt = client.ticket._sequence.request.prompt
    assert client.reason == "length"
    assert len(client.tokens) == count
    text = np.array([*prompt, *client.tokens], np.int32)
    logits = oracle.logits(model(), text, STREAMING)[len(prompt) - 1 : -1]
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    assert (first - second > 1e-4).all()
    np.testing.assert_array_equal(np.argmax(logits, -1), client.tokens)


OPTIONS = [{}, {"max_step_tokens": 4}, {"prefix_cache": False}, {"page_size": 1, "num_pages": 100}, {"page_size": 16}]


@tiers(full={"options": "{}"}, rest="long")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_those_of_the_oracle(options):
    engine = engine_of(**options)
    for _ in range(2):  # the second time, prefixes are cached
        clients = [Client(engine, prompt, max_tokens=COUNT) for prompt in PROMPTS]
        run(engine)
        for client in clients:
            check_tokens(client)
    shares = engine.options.prefix_cache and engine.options.page_size <= STREAMING.size
    assert (engine.stats().hit_tokens > 0) == shares


@tiers(full={"prefix_cache": "False-16"}, rest="long")
@pytest.mark.parametrize(("prefix_cache", "chunk"), [(False, 5), (False, 16), (True, 1), (True, 16)])
def test_pages_are_bounded(chunk, prefix_cache):
    """Of a long prompt in chunks, and of 60 tokens after it. A shared prefix is held until the window has left it."""
    engine = engine_of(max_requests=1, max_step_tokens=chunk, prefix_cache=prefix_cache)
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
    assert most <= engine.options.pages(model().config)[-1]
    check_tokens(client, 60)


@pytest.mark.full
def test_a_prompt_and_a_text_longer_than_the_cache():
    engine = engine_of(num_pages=1 + SINKS + WINDOW, max_requests=1)
    client = Client(engine, SYSTEM * 5, max_tokens=50)
    run(engine)
    check_tokens(client, 50)
    assert engine.stats().preemptions == 0


@tiers(full={"options": "{'num_pages': 12, 'prefix_cache': False}"}, rest="long")
@pytest.mark.parametrize(
    "options", [{"num_pages": 6}, {"num_pages": 9}, {"num_pages": 12, "prefix_cache": False}], ids=str
)
def test_preemption_changes_no_token(options):
    """Of texts that have become longer than the cache, beside prompts that are."""
    engine = engine_of(**options, max_step_tokens=12)
    clients = [Client(engine, prompt, max_tokens=COUNT + 10 * n) for n, prompt in enumerate([(1, 2), (9,), (60, 3)])]
    for _ in range(25):
        engine.step()
    clients += [Client(engine, prompt, max_tokens=COUNT) for prompt in (*PROMPTS, SYSTEM * 3)]
    run(engine)
    assert engine.stats().preemptions > 0
    for n, client in enumerate(clients):
        check_tokens(client, COUNT + 10 * n if n < 3 else COUNT)


@pytest.mark.full
def test_prompts_that_starve_each_other(monkeypatch):
    """If no prompt gets a page for its next token, the last one gives its pages to the others."""
    engine = engine_of(max_step_tokens=8)
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


@pytest.mark.full
def test_cancelled_requests_return_their_pages():
    engine = engine_of(max_step_tokens=7)
    clients = [Client(engine, prompt * 3, max_tokens=COUNT) for prompt in PROMPTS]
    for _ in range(9):
        engine.step()
    for client in clients[::2]:
        client.ticket.cancel()
    run(engine)
    for client in clients[1::2]:
        check_tokens(client)


@pytest.mark.full
def test_draws_and_penalties_know_the_whole_sequence():
    """A seed draws by the position in the sequence, and a penalty counts tokens whose pages are gone."""
    sampling = Sampling(1.0, seed=3)
    outputs = []
    for options in ({}, {"max_step_tokens": 5, "num_pages": 9}):
        engine = engine_of(**options)
        drawn = Client(engine, PROMPTS[4], max_tokens=COUNT, sampling=sampling)
        forbidden = Client(
            engine, SYSTEM, max_tokens=43, penalties=Penalties(presence_penalty=2.0, frequency_penalty=2.0)
        )
        run(engine)
        outputs.append((drawn.tokens, forbidden.tokens))
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0][1])) > 20


@tiers(full={"count": 2000}, rest="long")
@pytest.mark.parametrize("count", [2_000, 20_000])
def test_thousands_of_tokens_in_twenty_pages(count):
    """Every token is that of the oracle, to the last one."""
    streaming = Streaming(sinks=4, window=44)
    options = SIZES | {
        "num_pages": 21,
        "context": count + 4,
        "max_requests": 1,
        "poison": False,
        "streaming": streaming,
    }
    decoder = model(48, layers=1)
    engine, most = Engine(decoder, EngineOptions(**options)), 0
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streaming": Streaming(5, 12)}, r"`sinks` and `window` .* at most the 16 positions .* Got 5 and 12\. Lower"),
        ({"num_pages": 4}, r"`num_pages` must be at least 5: page 0, .* 3 sinks and a window of 9 .* Got 4"),
        ({"context": (1 << 24) + 1}, r"`context` must be from 2 to 16777216 with `streaming`, .* Got 16777217"),
        ({"streaming": None}, r"`context` must be from 2 to the 16 positions .* Got 4096\. `streaming` allows more"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(**options)


def test_a_text_beyond_the_context():
    with pytest.raises(ValueError, match=r"together must be at most 4096 tokens, the context length. Got 4000 and 97"):
        Client(engine_of(), (1,) * 4000, max_tokens=97)
