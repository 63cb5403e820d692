"""What the engine refuses: requests that can never run, a full queue, sizes out of range."""

from __future__ import annotations

import pytest

from flax_layers.models import Decoder
from flax_layers.sampling import Sampling
from flax_layers.serving import QueueFull, Request
from flax_layers.serving.penalties import Penalties
from tests import engine_cases
from tests.engine_cases import PROMPTS, Client, engine_of, recomputed, run


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


def test_a_prompt_longer_than_the_cache(model):
    engine = engine_of(model, num_pages=6)
    with pytest.raises(ValueError, match="must be shorter than 20 tokens, what the pages of the cache hold"):
        Client(engine, (1,) * 20)
    client = Client(engine, (1,) * 15, max_tokens=None)
    run(engine)
    assert len(client.tokens) == 5


def test_a_full_queue(model):
    engine = engine_of(model, max_waiting=2)
    clients = [Client(engine, (1,)) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait"):
        Client(engine, (1,))
    run(engine)
    assert [x.reason for x in clients] == ["length"] * 2


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
