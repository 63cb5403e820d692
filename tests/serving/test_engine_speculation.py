"""Speculation in the engine: tokens are those without it, whatever is drafted; and no page is lost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, from_pretrained
from flax_layers.nnx import AlibiBias
from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, EngineOptions, Streaming
from flax_layers.serving.device.options import Program, Shape
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.engine import drafts
from flax_layers.serving.engine.drafts import Draft, PromptLookup
from flax_layers.serving.engine.packing import pack
from tests.cases import engine_cases
from tests.cases.engine_cases import COUNT, PROMPTS, SYSTEM, Client, engine_of, fail_once, recomputed, run
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.support.golden_models import ROOT, expected, logits_of
from tests.support.rows import tiers

LONG = 24
REPEATED = [(1, 2, 3, 4) * 4, (5,) * 9, (*SYSTEM, *SYSTEM[:6])]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return engine_cases.model()


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


@pytest.fixture
def foresee(monkeypatch) -> Callable[..., None]:
    """Makes the engine draft from known futures."""

    def begin(futures: dict[tuple[int, ...], Sequence[int]]) -> None:
        monkeypatch.setattr("flax_layers.serving.engine.engine.PromptLookup", Foreseeing)
        monkeypatch.setattr(Foreseeing, "futures", futures)

    return begin


def outputs(engine: Engine, prompts, **options) -> list[list[int]]:
    clients = [Client(engine, prompt, **options) for prompt in prompts]
    run(engine)
    return [client.tokens for client in clients]


def accepted(engine: Engine) -> int:
    stats = engine.stats()
    assert 0 <= stats.accepted_tokens <= stats.drafted_tokens
    return stats.accepted_tokens


# --- greedy


@tiers(full={"options": "{'draft_tokens': 3, 'max_step_tokens': 9}"}, rest="long")
@pytest.mark.parametrize(
    "options",
    [
        {"draft_tokens": 31, "max_step_tokens": 60},
        {"draft_tokens": 3, "max_step_tokens": 9},
        {"draft_tokens": 5, "max_step_tokens": 17, "max_requests": 3},
        {"draft_tokens": 6, "prefix_cache": False, "page_size": 1},
    ],
    ids=str,
)
def test_tokens_are_those_of_full_recomputation(options, model, foresee):
    foresee({prompt: recomputed(prompt) for prompt in PROMPTS})
    engine = engine_of(model, **options)
    for _ in range(2):  # the second time, prefixes are cached
        assert outputs(engine, PROMPTS) == [recomputed(prompt) for prompt in PROMPTS]
    assert accepted(engine) > 10
    assert (engine.stats().hit_tokens > 0) == engine.options.prefix_cache


@pytest.mark.full
def test_staggered_arrivals(model, foresee):
    foresee({prompt: recomputed(prompt) for prompt in PROMPTS})
    engine = engine_of(model, max_step_tokens=19, draft_tokens=6)
    engine_cases.check_staggered_arrivals(engine)
    assert accepted(engine) > 16


@tiers(full={"num_pages": 12}, rest="long")
@pytest.mark.parametrize("num_pages", [12, 14])
def test_preemption_changes_no_token(num_pages, model, foresee):
    prompts = [(1, 2, 3), (9,) * 7, (60,), SYSTEM[:8], (2, 4, 6)]
    foresee({prompt: recomputed(prompt) for prompt in prompts})
    engine = engine_of(model, num_pages=num_pages, prefix_cache=num_pages == 12, draft_tokens=7)
    assert outputs(engine, prompts) == [recomputed(prompt) for prompt in prompts]
    assert engine.stats().preemptions > 0
    assert accepted(engine) > 0


@pytest.mark.full
def test_what_was_accepted_is_shared(model, foresee):
    """Its pages are hit by a request that goes on where the first one ended."""
    foresee({PROMPTS[1]: recomputed(PROMPTS[1]), (prompt := (*PROMPTS[1], *recomputed(PROMPTS[1])[:9])): []})
    engine = engine_of(model, draft_tokens=7)
    first = Client(engine, PROMPTS[1])
    run(engine)
    second = Client(engine, prompt, max_tokens=1)
    run(engine)
    assert first.tokens == [*recomputed(PROMPTS[1])[:9], *second.tokens]
    assert second.ticket.hit_tokens == (len(prompt) - 1) // 4 * 4
    assert accepted(engine) > 0


@pytest.mark.full
def test_a_budget_gives_prompts_precedence(model, foresee):
    """Drafts take what decoding and prompts leave."""
    foresee({PROMPTS[0]: recomputed(PROMPTS[0]), PROMPTS[1]: recomputed(PROMPTS[1])})
    engine = engine_of(model, max_step_tokens=9, draft_tokens=7)
    first = Client(engine, PROMPTS[0])
    engine.step()
    second = Client(engine, PROMPTS[1])  # 25 tokens, 8 in each step
    for _ in range(4):
        engine.step()
    assert engine.stats().drafted_tokens == 0
    run(engine)
    assert [first.tokens, second.tokens] == [recomputed(PROMPTS[0]), recomputed(PROMPTS[1])]
    assert accepted(engine) > 0


@pytest.mark.full
def test_repetitive_text_takes_fewer_steps(model):
    """By real look-up; both engines give the same tokens."""
    plain, speculating = engine_of(model, num_pages=200), engine_of(model, num_pages=200, draft_tokens=7, draft_match=1)
    right = outputs(plain, REPEATED, max_tokens=LONG)
    assert outputs(speculating, REPEATED, max_tokens=LONG) == right
    assert accepted(speculating) > LONG / 2
    assert speculating.stats().steps < plain.stats().steps * 0.9
    assert plain.stats().drafted_tokens == 0


@tiers(full={"place": 2}, rest="long")
@pytest.mark.parametrize("place", range(2, 9, 2))
def test_a_stop_token_inside_an_accepted_run(place, model, foresee):
    tokens = recomputed(PROMPTS[2])
    foresee({prompt: recomputed(prompt) for prompt in PROMPTS[1:3]})
    engine = engine_of(model, draft_tokens=15)
    client = Client(engine, PROMPTS[2], stop_tokens=(tokens[place],))
    other = Client(engine, PROMPTS[1])
    run(engine)
    assert client.tokens == tokens[: tokens.index(tokens[place])]
    assert client.reason == "stop"
    assert other.tokens == recomputed(PROMPTS[1])
    assert engine.stats().generated_tokens == len(client.tokens) + COUNT


@tiers(full={"most": [2, 5]}, rest="long")
@pytest.mark.parametrize("most", [1, 2, 5])
def test_limits_inside_an_accepted_run(most, model, foresee):
    foresee({PROMPTS[0]: recomputed(PROMPTS[0]), SYSTEM: recomputed(SYSTEM)})
    engine = engine_of(model, draft_tokens=31, context=len(SYSTEM) + 4, num_pages=8, max_step_tokens=60)
    client, whole = Client(engine, PROMPTS[0], max_tokens=most), Client(engine, SYSTEM, max_tokens=None)
    run(engine)
    assert client.tokens == recomputed(PROMPTS[0])[:most]
    assert whole.tokens == recomputed(SYSTEM)[:4]
    assert {client.reason, whole.reason} == {"length"}


def with_alibi() -> Decoder:
    bias = functools.partial(AlibiBias, SMALL.num_heads)
    return Decoder(SMALL, score_mod=bias, implementation="xla", rngs=nnx.Rngs(0))


def in_windows() -> Decoder:
    config = dataclasses.replace(SMALL, layers=(LayerConfig(window=9), LayerConfig(window=5)))
    return Decoder(config, implementation="xla", rngs=nnx.Rngs(0))


@tiers(full={"prefix_cache": True}, rest="long")
@pytest.mark.parametrize(("make", "prefix_cache"), [(with_alibi, True), (in_windows, False)])
def test_biases_and_windows(make, prefix_cache, foresee):
    """Of positions, not of rows: also where all layers have windows, and pages out of them are dropped."""
    model = make()
    prompts = [PROMPTS[0], PROMPTS[2], SYSTEM]
    right = outputs(engine_of(model), prompts, max_tokens=LONG)
    text = np.array([[*SYSTEM, *right[2]]], np.int32)
    assert np.argmax(logits_of(model, text)[0], axis=-1)[len(SYSTEM) - 1 : -1].tolist() == right[2]
    foresee(dict(zip(prompts, right, strict=True)))
    engine = engine_of(model, draft_tokens=7, prefix_cache=prefix_cache)
    assert outputs(engine, prompts, max_tokens=LONG) == right
    assert accepted(engine) > LONG


# --- sampled


@tiers(full={"sampling": "sampling0"}, rest="long")
@pytest.mark.parametrize("sampling", [Sampling(0.9, top_k=40, top_p=0.95, seed=7), Sampling(0.7, min_p=0.1, seed=5)])
def test_a_seed_draws_the_tokens_that_it_draws_without_speculation(sampling, model, foresee):
    right = outputs(engine_of(model), PROMPTS, sampling=sampling)
    foresee(dict(zip(PROMPTS, right, strict=True)))
    engine = engine_of(model, draft_tokens=7)
    assert outputs(engine, PROMPTS, sampling=sampling) == right
    assert accepted(engine) > 10


@pytest.mark.full
def test_other_requests_beside_speculated_ones(model, foresee):
    """Penalties and log probabilities are not speculated, and come out as without."""
    options = [
        {},
        {"penalties": Penalties(frequency_penalty=1.5)},
        {"logprobs": 2},
        {"sampling": Sampling(1.0, seed=3)},
        {"sampling": Sampling(0.8, seed=4), "logprobs": 1, "penalties": Penalties(presence_penalty=1.0)},
    ]
    events = []
    for settings in ({}, {"draft_tokens": 7}):
        engine = engine_of(model, max_step_tokens=60, **settings)
        clients = [Client(engine, prompt, **each) for prompt, each in zip(PROMPTS, options, strict=False)]
        run(engine)
        events.append([(x.tokens, [one for event in x.events for one in event.logprobs]) for x in clients])
        foresee({prompt: x.tokens for prompt, x in zip(PROMPTS, clients, strict=False)})
    assert accepted(engine) > 0
    for (tokens, logprobs), (right, known) in zip(events[1], events[0], strict=True):
        assert tokens == right
        assert len(logprobs) == len(known)
        for one, other in zip(logprobs, known, strict=True):
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.long
def test_tensor_parallel(foresee):
    known = expected("gemma3")
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    model = from_pretrained(ROOT / "gemma3", dtype=jnp.float32, implementation="xla", mesh=mesh)
    prompts = [tuple(prompt) for prompt in known["tokens"].tolist()]
    foresee(dict(zip(prompts, known["greedy"].tolist(), strict=True)))
    engine = engine_of(model, max_step_tokens=40, context=None, draft_tokens=7)
    assert outputs(engine, prompts, max_tokens=32) == known["greedy"].tolist()
    assert accepted(engine) > 32


# --- the loop around the step


@tiers(full={"when_read": True}, rest="long")
@pytest.mark.parametrize("when_read", [False, True])
def test_a_failed_step_ends_its_requests_alone(when_read, model, foresee, monkeypatch):
    foresee({prompt: recomputed(prompt) for prompt in PROMPTS})
    engine = engine_of(model, max_requests=2, draft_tokens=5)
    fail_once(monkeypatch, engine, 3, when_read=when_read)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    run(engine)
    assert engine.stats().failures == 1
    assert [x.reason for x in clients[:2]] == ["error", "error"]
    assert [x.tokens for x in clients[2:]] == [recomputed(prompt) for prompt in PROMPTS[2:]]


@pytest.mark.full
def test_cancelled_requests_return_their_pages(model, foresee):
    foresee({prompt: recomputed(prompt) for prompt in PROMPTS})
    engine = engine_of(model, draft_tokens=7)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    for _ in range(2):
        engine.step()
    clients[0].ticket.cancel()
    run(engine)
    assert clients[0].reason == "cancelled"
    assert [x.tokens for x in clients[1:]] == [recomputed(prompt) for prompt in PROMPTS[1:]]


@pytest.mark.full
def test_nothing_is_compiled_after_warm_up(model):
    engine = engine_of(model, poison=False, draft_tokens=5, draft_match=1)
    engine.warm_up()
    rng = np.random.default_rng(0)
    with counted_compilations() as compiled:
        for _ in range(40):
            prompt = rng.integers(0, 6, rng.integers(1, 30)).tolist()
            sampling = Sampling(float(rng.integers(0, 2)), top_k=2, seed=int(rng.integers(9)))
            penalties = Penalties(presence_penalty=float(rng.integers(0, 4) == 0))
            Client(engine, prompt, sampling=sampling, penalties=penalties, max_tokens=int(rng.integers(1, 20)))
            engine.step()
        run(engine)
    assert not compiled
    assert engine.stats().drafted_tokens > 20


def test_shapes():
    options = EngineOptions(max_requests=8, max_step_tokens=24, num_pages=100, page_size=4, draft_tokens=3)
    off = dataclasses.replace(options, draft_tokens=0)
    shapes = options.shapes(SMALL)
    assert [shape for shape in shapes if not shape.drafts] == list(off.shapes(SMALL))
    for rows in range(1, 9):
        for tokens in range(rows, 25):
            for is_drafted in (False, True):
                shape = options.shape_for(tokens, rows, 5, SMALL, drafts=is_drafted)
                assert shape in shapes
                assert shape.tokens >= tokens
                assert shape.rows >= rows
                assert shape.drafts == (3 if is_drafted else 0)
    assert options.shape_for(7, 2, 5, SMALL, drafts=True) == Shape(16, 4, 25, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 32}, r"`draft_tokens` must be from 0 to 31\. Got 32\. Use 0 for no speculation\."),
        ({"draft_tokens": -1}, r"`draft_tokens` must be from 0 to 31\. Got -1"),
        ({"draft_match": 0}, r"`draft_match` must be at least 1\. Got 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)


@tiers(full={"held": "float8_e4m3fn"}, rest="long")
@pytest.mark.parametrize(
    ("dtype", "held"),
    [("bfloat16", None), ("float16", None), ("float32", None), ("float32", "int8"), ("float32", "float8_e4m3fn")],
)
def test_a_step_holds_no_second_cache(dtype, held):
    """With the moves of accepted keys; the cache is 37 to 100 MB. `test_paged_cache.py` compiles them for a GPU.

    XLA's CPU compiler once widened caches of bfloat16 and of eight-bit floats (`jflex.backends.xla.narrow`).
    """
    model = Decoder(SMALL, dtype=dtype, implementation="xla", rngs=nnx.Rngs(0))
    engine = engine_of(model, num_pages=6000, page_size=64, draft_tokens=7, poison=False, cache_dtype=held)
    executor = engine._executor
    size = sum(x.nbytes for x in jax.tree.leaves(executor._state.cache))
    without, drafted = (shape for shape in engine.options.shapes(SMALL) if shape.rows == 4)
    temporary = []
    for shape in (without, drafted):
        arguments = executor._parameters, executor._state, jnp.asarray(pack([], shape, no_slot=8))
        program = Program(shape, is_greedy=True)
        memory = executor._step.lower(*arguments, program=program).compile().memory_analysis()  # pyright: ignore
        assert memory.alias_size_in_bytes >= size
        temporary.append(memory.temp_size_in_bytes)
    assert drafted.drafts
    assert max(temporary) < 0.05 * size


@pytest.mark.full
def test_drafts_beside_a_shared_prefix_that_is_read_once(model):
    """A step is either of both: drafts where a request has some, a cascade otherwise."""
    engine = engine_of(model, draft_tokens=3, cascade_bytes=1, max_step_tokens=64)
    for _ in range(2):
        clients = [Client(engine, prompt) for prompt in PROMPTS]
        run(engine)
        assert [client.tokens for client in clients] == [recomputed(prompt) for prompt in PROMPTS]
    assert engine.stats().cascade_steps > 0
    assert engine.stats().drafted_tokens > 0


@pytest.mark.full
def test_streaming_is_refused():
    with pytest.raises(ValueError, match=r"`draft_tokens` must be 0 with `streaming`, .* Got 3\. Leave one of"):
        EngineOptions(draft_tokens=3, streaming=Streaming())


@pytest.mark.full
def test_look_up_is_off_by_default(model, monkeypatch):
    monkeypatch.setattr(drafts, "PromptLookup", None)
    engine = engine_of(model)
    client = Client(engine, PROMPTS[2])
    assert client.ticket._sequence.runs_ahead
    run(engine)
    assert client.tokens == recomputed(PROMPTS[2])
