"""Generation: the tokens of full recomputation from both caches, streamed or not, in two programs."""

import concurrent.futures
import dataclasses
import gc
import itertools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.generate import Sampling, generate
from flax_layers.generate import generation as generation_module
from flax_layers.generate.batch import bucket
from flax_layers.generate.sequences import KINDS
from flax_layers.generate.steps import Rules, State, write_chunk
from flax_layers.models import Decoder, LayerConfig, from_pretrained
from flax_layers.rotary_scaling import LongRopeScaling
from flax_layers.sampling import SamplingBatch
from tests.cases.train_cases import counted_compilations
from tests.models.test_models import SMALL
from tests.support.golden_models import NAMES, ROOT, expected, load, logits_of
from tests.support.rows import in_turns, tiers

caches = pytest.mark.parametrize("cache", KINDS)
PROMPTS = [[1, 2, 3], list(range(40, 51)), [9] * 7]
COUNT = 12
DRAWN = Sampling(0.9, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """With a window of 5 in one of its two layers."""
    return Decoder(SMALL, implementation="xla", rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def recomputed(model: Decoder) -> tuple[list[list[int]], float]:
    """Greedy tokens, each by a pass over its whole sequence; and by how much its logit was ahead, at the least."""
    texts, margin = [], np.inf
    for prompt in PROMPTS:
        text = np.zeros((1, 32), np.int32)
        text[0, : len(prompt)] = prompt
        for place in range(len(prompt), len(prompt) + COUNT):
            logits = np.asarray(logits_of(model, text))[0, place - 1]
            second, first = np.sort(logits)[-2:]
            margin = min(margin, float(first - second))
            text[0, place] = np.argmax(logits)
        texts.append(text[0, len(prompt) : len(prompt) + COUNT].tolist())
    return texts, margin


def tokens_of(model: Decoder, prompts=PROMPTS, **options) -> list[list[int]]:
    options = {"max_tokens": COUNT, "stop_tokens": ()} | options
    return [result.tokens for result in generate(model, prompts, **options).results()]


@pytest.mark.full
@caches
def test_greedy_tokens_are_those_of_full_recomputation(cache, model, recomputed):
    texts, margin = recomputed
    assert margin > 1e-3  # so that the order of sums cannot decide
    assert len(set().union(*texts)) > 5
    assert tokens_of(model, cache=cache) == texts


@pytest.mark.full
def test_both_caches_draw_the_same(model):
    dense, paged = (tokens_of(model, sampling=DRAWN, cache=cache) for cache in KINDS)
    assert dense == paged
    assert tokens_of(model, sampling=dataclasses.replace(DRAWN, seed=8)) != dense


@tiers(full={"sampling": "greedy"}, rest="long")
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_a_text_does_not_depend_on_those_around_it(sampling, model):
    together = tokens_of(model, sampling=sampling)
    each = [sampling, Sampling(1.0, seed=1), Sampling()]
    assert tokens_of(model, PROMPTS[::-1], sampling=sampling) == together[::-1]
    assert tokens_of(model, [PROMPTS[1], PROMPTS[0], PROMPTS[2]], sampling=each)[0] == together[1]
    assert tokens_of(model, PROMPTS[2:], sampling=sampling) == together[2:]


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("chunk", [1, 5])
@caches
def test_streaming_is_the_whole(cache, chunk, model, recomputed):
    generation = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=(), cache=cache, chunk=chunk)
    found = [[] for _ in PROMPTS]
    for piece in generation:
        assert 1 <= len(piece.tokens) <= chunk
        found[piece.row] += piece.tokens
        assert (piece.finish_reason == "length") == (len(found[piece.row]) == COUNT)
    assert found == recomputed[0] == [result.tokens for result in generation.results()]


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_stop_tokens_end_one_text_and_not_the_others(cache, model, recomputed):
    texts = recomputed[0]
    stop = next(token for token in texts[1][2:] if token not in texts[0])
    results = generate(model, PROMPTS, max_tokens=COUNT, cache=cache, stop_tokens=(stop, 63)).results()
    for result, text in zip(results, texts, strict=True):
        end = text.index(stop) if stop in text else COUNT
        assert result.tokens == text[:end]
        assert result.finish_reason == ("stop" if stop in text else "length")
    assert results[0].finish_reason == "length"


@pytest.mark.full
def test_stop_at_the_first_token(model, recomputed):
    results = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=[text[0] for text in recomputed[0]]).results()
    assert [(result.tokens, result.finish_reason) for result in results] == [([], "stop")] * 3


@pytest.mark.full
def test_the_configuration_says_what_stops(model, recomputed):
    config, text = model.config, recomputed[0][0]
    stop = text[3]
    model.config = dataclasses.replace(config, eos_token_ids=(stop,))
    try:
        [result] = generate(model, PROMPTS[:1], max_tokens=COUNT).results()
    finally:
        model.config = config
    assert (result.tokens, result.finish_reason) == (text[: text.index(stop)], "stop")


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_a_text_ends_at_the_last_position(cache, recomputed):
    """The model has 16 positions: one prompt leaves 13 of them, one leaves 5."""
    config = dataclasses.replace(SMALL, max_positions=16)
    small = Decoder(config, implementation="xla", rngs=nnx.Rngs(0))
    results = generate(small, PROMPTS, max_tokens=COUNT, stop_tokens=(), cache=cache).results()
    assert [result.tokens for result in results] == [recomputed[0][0], recomputed[0][1][:5], recomputed[0][2][:9]]
    assert {result.finish_reason for result in results} == {"length"}


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_one_token(cache, model, recomputed):
    assert tokens_of(model, max_tokens=1, cache=cache) == [text[:1] for text in recomputed[0]]


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


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 48, 49, 64, 65, 97)] == [
        16, 16, 24, 24, 32, 48, 48, 64, 64, 96, 128
    ]  # fmt: skip
    assert all(n <= bucket(n) <= 1.5 * n for n in range(12, 5000))


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_sequences_read_on_by_any_number_of_tokens(cache, model):
    """By none, too: such a sequence stays as it is."""
    tokens = np.random.default_rng(0).integers(0, SMALL.vocabulary, (3, 40)).astype(np.int32)
    expected = np.asarray(logits_of(model, tokens))
    read = nnx.jit(lambda model, sequences, tokens, counts: sequences.read(model, tokens, counts))
    sequences, lengths = KINDS[cache].empty(model, 3, 40), np.zeros(3, int)
    for counts in ([20, 1, 7], [1, 1, 1], [1, 0, 1], [3, 20, 17], [0, 1, 0]):
        new = np.zeros((3, max(counts)), np.int32)
        for row, count in enumerate(counts):
            new[row, :count] = tokens[row, lengths[row] : lengths[row] + count]
        logits, sequences = read(model, sequences, jnp.asarray(new), jnp.asarray(counts, jnp.int32))
        lengths += counts
        going = np.flatnonzero(counts)
        np.testing.assert_allclose(logits[going], expected[going, lengths[going] - 1], rtol=2e-4, atol=2e-4)
        assert sequences.lengths.tolist() == lengths.tolist()


def state_of(model: Decoder, cache: str, room: int) -> tuple[State, Rules]:
    zeros = jnp.zeros(2, jnp.int32)
    rules = Rules(SamplingBatch(), jnp.full(2, 9, jnp.int32), jnp.zeros(1, jnp.int32))
    return State(KINDS[cache].empty(model, 2, room), zeros, zeros, zeros > 0), rules


@tiers(default={"cache": "dense"})
@caches
def test_the_cache_is_updated_in_place(cache):
    config = dataclasses.replace(SMALL, max_positions=1 << 14)
    large = Decoder(config, implementation="xla", rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(large)
    state, rules = state_of(large, cache, 1 << 14)
    memory = write_chunk.lower(graph, parameters, state, rules, steps=4).compile().memory_analysis()
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
    graph, parameters = nnx.split(model)
    state, rules = state_of(model, "dense", 512)
    traced = write_chunk.trace(graph, parameters, state, rules, steps=4)
    windowed, full = attention_calls(traced.jaxpr.jaxpr)
    assert "(2, 1, 1, 4)" in windowed
    assert "(2, 1, 1, 4)" not in full


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("name", NAMES)
@caches
def test_tokens_are_those_of_transformers(cache, name):
    known = expected(name)
    prompts, greedy = known["tokens"].tolist(), known["greedy"].tolist()
    assert tokens_of(load(name), prompts, max_tokens=len(greedy[0]), cache=cache) == greedy


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("chunk", [3, 16])
@caches
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


def decoder_with(scaling: LongRopeScaling) -> Decoder:
    layers = (LayerConfig(rotary_scaling=scaling, rotary_dim=4),) * 2
    config = dataclasses.replace(SMALL, max_positions=64, layers=layers)
    return Decoder(config, implementation="xla", rngs=nnx.Rngs(0))


@pytest.mark.full
@in_turns
@caches
@pytest.mark.parametrize("original", [20, 25])
def test_an_original_context_of_any_length(cache, original):
    """Greedy tokens by passes over whole sequences, with one set of factors or the other."""
    short, long = (1.0, 1.5), (3.0, 9.0)
    of_length = [decoder_with(LongRopeScaling(factors, factors, original, 64)) for factors in (short, long)]
    text = np.zeros((1, 40), np.int32)
    text[0, :9] = range(9)
    for length in range(9, 40):
        text[0, length] = np.argmax(logits_of(of_length[length > original], text)[0, length - 1])
    model = decoder_with(LongRopeScaling(short, long, original, 64))
    assert tokens_of(model, [text[0, :9].tolist()], max_tokens=31, cache=cache) == [text[0, 9:].tolist()]


@tiers(full={"cache": "dense"}, rest="long")
@caches
def test_tensor_parallel(cache):
    known = expected("gemma3")
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    model = from_pretrained(ROOT / "gemma3", dtype=jnp.float32, implementation="xla", mesh=mesh)
    found = tokens_of(model, known["tokens"].tolist(), max_tokens=len(known["greedy"][0]), cache=cache, chunk=8)
    assert found == known["greedy"].tolist()


@pytest.mark.full
def test_speed(model):
    generation = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=())
    generation.results()
    speed = generation.speed
    assert (speed.prompt_tokens, speed.tokens, speed.rows) == (21, 3 * COUNT, 3)
    assert speed.decode_rate == pytest.approx(3 * (COUNT - 1) / speed.decode_seconds)
    assert speed.prefill_rate == pytest.approx(21 / speed.prefill_seconds)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_time_of_the_consumer_is_not_that_of_decoding(chunk, model, monkeypatch):
    """By a clock on which each look takes a second, and the consumer 1000; chunks are copied as they are pushed."""
    now = itertools.count()
    consumed = 0

    class AtOnce:
        def __init__(self, workers):
            self.shutdown = lambda: None

        def submit(self, function, *args):
            future = concurrent.futures.Future()
            future.set_result(function(*args))
            return future

    clock = types.SimpleNamespace(perf_counter=lambda: next(now) + 1000 * consumed)
    monkeypatch.setattr(generation_module, "time", clock)
    monkeypatch.setattr(generation_module, "ThreadPoolExecutor", AtOnce)
    generation = generate(model, PROMPTS, max_tokens=COUNT, stop_tokens=(), chunk=chunk)
    for _ in generation:
        consumed += 1
    assert consumed >= 9
    assert 0 < generation.speed.decode_seconds < 1000


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


ERRORS = {
    "no prompt": ({"prompts": []}, "`prompts` must hold at least one prompt. Got none. Pass lists of tokens"),
    "empty prompt": (
        {"prompts": [[1], []]},
        "`prompts` must have at least one token each. Prompt 1 is empty. Pass",
    ),
    "long prompt": (
        {"prompts": [[1] * 512]},
        "`prompts` must be shorter than the 512 positions .* Prompt 0 has 512 tokens. Truncate it to 511",
    ),
    "unknown token": ({"prompts": [[1, 64]]}, "tokens from 0 to 63, .* Prompt 0 holds 1 to 64. Use the tokenizer of"),
    "negative token": ({"prompts": [[-1]]}, "Prompt 0 holds -1 to -1"),
    "no tokens": ({"max_tokens": 0}, "`max_tokens` must be at least 1. Got 0. Pass the number"),
    "samplings": ({"sampling": [DRAWN] * 2}, "`sampling` must be one .* Got 2 for 3 prompts"),
    "cache": ({"cache": "none"}, "`cache` must be one of dense, paged. Got 'none'"),
    "cache dtype": ({"cache": "paged", "cache_dtype": "fp8"}, "`cache_dtype` must be one of int8, .* Got 'fp8'"),
    "dense": ({"cache_dtype": "int8"}, "`cache_dtype` must be None unless `cache` is paged. Got int8. Pass both"),
    "chunk": ({"chunk": 0}, "`chunk` must be at least 1. Got 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_calls(name, model):
    options, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        generate(model, **({"prompts": PROMPTS} | options))
