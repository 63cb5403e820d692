"""Generation: the tokens of full recomputation from both caches, streamed or not, in two programs."""

import dataclasses
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array

from flax_layers.generate import Sampling, generate
from flax_layers.generate.batch import bucket
from flax_layers.generate.sequences import KINDS
from flax_layers.generate.steps import Programs, Rules, State, make_programs
from flax_layers.models import Decoder, fuse_projections
from flax_layers.models.form import flatten_model
from flax_layers.sampling import SamplingBatch
from tests.cases.engine_cases import greedy, recomputed
from tests.cases.engine_cases import model as small_model
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.support.golden_models import expected, load
from tests.support.rows import tiers

caches = pytest.mark.parametrize("cache", KINDS)
PROMPTS = [(1, 2, 3), tuple(range(40, 51)), (9,) * 7]
COUNT = 12
DRAWN = Sampling(0.9, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small_model()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Greedy tokens, each by a pass over its whole sequence."""
    return [recomputed(prompt, count=COUNT) for prompt in PROMPTS]


def tokens_of(model: Decoder, prompts=PROMPTS, **options) -> list[list[int]]:
    options = {"max_tokens": COUNT, "stop_tokens": ()} | options
    return [result.tokens for result in generate(model, prompts, **options).results()]


@pytest.mark.full
@pytest.mark.parametrize(("cache", "chunk"), [("dense", 5), ("paged", 1)])
def test_greedy_tokens_are_those_of_full_recomputation(cache, chunk, model, texts):
    """Streamed and as a whole."""
    generation = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=(), cache=cache, chunk=chunk)
    found = [[] for _ in PROMPTS]
    for piece in generation:
        assert 1 <= len(piece.tokens) <= chunk
        found[piece.row] += piece.tokens
        assert (piece.finish_reason == "length") == (len(found[piece.row]) == COUNT)
    assert found == texts == [result.tokens for result in generation.results()]
    speed = generation.speed
    assert (speed.prompt_tokens, speed.tokens, speed.rows) == (21, 3 * COUNT, 3)
    assert speed.decode_rate == pytest.approx(3 * (COUNT - 1) / speed.decode_seconds)
    assert speed.prefill_rate == pytest.approx(21 / speed.prefill_seconds)


@pytest.mark.full
def test_both_caches_draw_the_same_beside_any_others(model):
    together, paged = (tokens_of(model, sampling=DRAWN, cache=cache) for cache in KINDS)
    assert together == paged
    assert tokens_of(model, sampling=dataclasses.replace(DRAWN, seed=8)) != together
    each = [DRAWN, Sampling(1.0, seed=1), Sampling()]
    assert tokens_of(model, PROMPTS[::-1], sampling=DRAWN) == together[::-1]
    assert tokens_of(model, [PROMPTS[1], PROMPTS[0], PROMPTS[2]], sampling=each)[0] == together[1]
    assert tokens_of(model, PROMPTS[2:], sampling=DRAWN) == together[2:]


@pytest.mark.full
def test_stop_tokens_end_one_text_and_not_the_others(model, texts):
    stop = next(token for token in texts[1][2:] if token not in texts[0])
    results = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=(stop, 63)).results()
    for result, text in zip(results, texts, strict=True):
        end = text.index(stop) if stop in text else COUNT
        assert result.tokens == text[:end]
        assert result.finish_reason == ("stop" if stop in text else "length")
    assert results[0].finish_reason == "length"
    results = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=[text[0] for text in texts]).results()
    assert [(result.tokens, result.finish_reason) for result in results] == [([], "stop")] * 3
    assert tokens_of(model, max_tokens=1) == [text[:1] for text in texts]


@pytest.mark.full
def test_prompts_and_numbers_may_be_arrays(model, texts):
    prompts = np.array(PROMPTS[:1])
    for same in (prompts, jnp.asarray(prompts), list(prompts)):
        [result] = generate(model, same, max_tokens=np.int64(COUNT), stop_tokens=np.array([], int)).results()
        assert result.tokens == texts[0]


@pytest.mark.full
def test_the_configuration_says_what_stops(model, texts, monkeypatch):
    stop = texts[0][3]
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_token_ids=(stop,)))
    [result] = generate(model, PROMPTS[:1], max_tokens=COUNT).results()
    assert (result.tokens, result.finish_reason) == (texts[0][: texts[0].index(stop)], "stop")


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_a_text_ends_at_the_last_position(cache, model, texts):
    """The model has 16 positions: one prompt leaves 13 of them, one leaves 5."""
    graph, state = nnx.split(model)
    small = nnx.merge(graph, state)
    small.config = dataclasses.replace(SMALL, max_positions=16)
    results = generate(small, PROMPTS, max_tokens=COUNT, stop_tokens=(), cache=cache).results()
    assert [result.tokens for result in results] == [texts[0], texts[1][:5], texts[2][:9]]
    assert {result.finish_reason for result in results} == {"length"}


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_prompts_of_a_bucket_compile_nothing(cache, model):
    tokens_of(model, cache=cache, sampling=DRAWN)
    others = [[5], [6, 7], list(range(16))]
    other = [dataclasses.replace(DRAWN, seed=3), Sampling(), Sampling(2.0, top_k=3, top_p=0.5)]
    with counted_compilations() as compiled:
        generation = generate(model, others, max_tokens=COUNT - 2, cache=cache, sampling=other, stop_tokens=())
        assert [len(result.tokens) for result in generation.results()] == [COUNT - 2] * 3
    assert not compiled


@pytest.mark.long
def test_a_changed_model_is_seen():
    """Other weights run the same programs; other attributes and modules run others."""
    changed, seen = nnx.clone(small_model()), []
    first, second = (block.mlp for block in changed.blocks)
    for change, compiles in (
        (lambda: None, True),
        (lambda: first.up.kernel.set_value(first.up.kernel[..., ::-1]), False),
        (lambda: setattr(first.gate, "kernel", nnx.Param(-first.gate.kernel[...])), False),
        (lambda: setattr(first, "clamp", (0.1, 1.0)), True),
        (lambda: setattr(changed.blocks[0], "mlp", second), True),  # shared
        (lambda: fuse_projections(changed), True),
    ):
        change()
        with counted_compilations() as compiled:
            seen.append(tokens_of(changed, PROMPTS[1:2], max_tokens=4)[0])
        assert bool(compiled) == compiles
        assert seen[-1] == greedy(changed, PROMPTS[1], 4)
    assert len(set(map(tuple, seen))) == 5  # to fuse projections changes no token
    changed.notes = nnx.static([])  # changes of a list are not seen
    with pytest.raises(TypeError, match="unhashable"):
        tokens_of(changed)


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 48, 49, 64, 65, 97)] == [
        16, 16, 24, 24, 32, 48, 48, 64, 64, 96, 128
    ]  # fmt: skip
    assert all(n <= bucket(n) <= 1.5 * n for n in range(12, 5000))


def programs_of(model: Decoder) -> tuple[Programs, list[Array]]:
    parameters, form = flatten_model(model)
    return make_programs(form), parameters


def state_of(model: Decoder, cache: str, room: int) -> tuple[State, Rules]:
    zeros = jnp.zeros(2, jnp.int32)
    rules = Rules(SamplingBatch(), jnp.full(2, 9, jnp.int32), jnp.zeros(1, jnp.int32))
    return State(KINDS[cache].empty(model, 2, room), zeros, zeros, zeros > 0), rules


@tiers(rest="full")
@caches
def test_the_cache_is_updated_in_place(cache):
    config = dataclasses.replace(SMALL, max_positions=1 << 14)
    large = Decoder(config, implementation="xla", rngs=nnx.Rngs(0))
    programs, parameters = programs_of(large)
    state, rules = state_of(large, cache, 1 << 14)
    memory = programs.write_chunk.lower(parameters, state, rules, steps=4).compile().memory_analysis()
    assert memory is not None
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes > 0.99 * held
    assert memory.temp_size_in_bytes < held / 20


def attention_calls(jaxpr) -> list[list[str]]:
    """The integer operands of each call of attention, by shape."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jflex_call":
            found.append([str(x.aval.shape) for x in equation.invars if x.aval.dtype == jnp.int32])
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns") and equation.primitive.name != "jflex_call":
                    found += attention_calls(inner)
    return found


def test_a_step_reads_only_the_window_of_a_dense_cache(model):
    """By the jaxpr of the compiled loop: the layer with a window gets the list of its blocks of 512 keys."""
    programs, parameters = programs_of(model)
    state, rules = state_of(model, "dense", 512)
    traced = programs.write_chunk.trace(parameters, state, rules, steps=4)
    windowed, full = attention_calls(traced.jaxpr.jaxpr)
    assert "(2, 1, 1, 4)" in windowed
    assert "(2, 1, 1, 4)" not in full


@tiers(full={"name": ["gemma3", "deepseek_v3", "gpt_oss"]}, rest="long")
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("gpt_oss", "dense"), ("gemma3", "dense"), ("llama3", "dense"), ("deepseek_v3", "paged"),
        ("deepseek_v2", "paged"), ("mixtral", "paged"),
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(name, cache):
    known = expected(name)
    prompts, greedy = known["tokens"].tolist(), known["greedy"].tolist()
    assert tokens_of(load(name), prompts, max_tokens=len(greedy[0]), cache=cache) == greedy


@tiers(full={"cache": "dense"}, rest="long")
@pytest.mark.parametrize(("cache", "chunk"), [("dense", 3), ("paged", 16)])
def test_longrope_beyond_its_original_context(cache, chunk):
    """Of 16 positions. When a sequence has more, `transformers` computes the cache again. One begins with more."""
    known, model = expected("phi3"), load("phi3")
    short = known["tokens"][:, : known["short_logits"].shape[1]].tolist()
    prompts = [short[0], known["tokens"][1].tolist(), short[1]]
    generation = generate(model, prompts, max_tokens=32, stop_tokens=(), cache=cache, chunk=chunk)
    texts = [[] for _ in prompts]
    for piece in generation:
        texts[piece.row] += piece.tokens
        assert (piece.finish_reason is not None) == (len(texts[piece.row]) == 32)
    assert texts == [known["short_greedy"][0].tolist(), known["greedy"][1].tolist(), known["short_greedy"][1].tolist()]
    speed = generation.speed  # the short ones were read twice
    assert (speed.rows, speed.tokens, speed.first_tokens) == (3, 96, 5)
    assert speed.prompt_tokens == 2 * 13 + 24 + 2 * 17


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_longrope_within_its_original_context(cache):
    """And stop tokens within it, and beyond."""
    known, tokens = expected("phi3"), expected("phi3")["short_greedy"].tolist()
    model, prompts = load("phi3"), known["tokens"][:, :13].tolist()
    assert tokens_of(model, prompts, max_tokens=4, cache=cache) == [text[:4] for text in tokens]
    for place in (0, 2, 3, 4, 9):  # the fifth is the first that is chosen beyond
        stop = tokens[0][place]
        [result] = generate(model, prompts[:1], max_tokens=20, stop_tokens=[stop], cache=cache).results()
        end = tokens[0].index(stop)
        assert (result.tokens, result.finish_reason) == (tokens[0][:end], "stop")


@pytest.mark.full
def test_a_stream_that_is_dropped_ends_its_thread(model):
    before = set(threading.enumerate())
    generation = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=(), chunk=1)
    for _ in range(4):  # of the prompts, and of the first step
        next(generation)
    (thread,) = set(threading.enumerate()) - before
    del generation
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
