"""Scenarios of serving that no other test shows on its own: the prefix cache, plans, trees and the engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jflex
from flax_layers.models import Decoder, LayerConfig
from flax_layers.serving import Engine
from flax_layers.serving.device import inputs
from flax_layers.serving.device.options import Program
from jflex.backends.xla.paged import KEYS
from jflex.backends.xla.paged_bounds import walk_of
from jflex.masks import causal, tree_bits
from jflex.options import Settings
from jflex.paged import PagedBatch, PagedCache
from jflex.paged.attention import prepare
from pallas_kernels.config import Tiles
from pallas_kernels.split_kv import planner
from pallas_kernels.split_kv.work import Work, requests_on_host
from tests.cases import engine_cases
from tests.cases.engine_cases import PROMPTS, SYSTEM, Client, engine_of, recomputed, run
from tests.models.test_models import SMALL
from tests.support.rows import tiers
from tests.support.specs import spec_of

D, PAGE = 8, 4
SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(words: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a function to the table."""
    return lambda check: SCENARIOS.setdefault(words, check)


# --- the prefix cache in the engine


@scenario("a finished request leaves prompt and text in whole pages, and nothing of its last token")
def finished_text_is_cached():
    engine = engine_of(engine_cases.model())
    for length in (6, 7, 8):  # the last token, whose keys are not written, ends on, after and before the end of a page
        prompt = (length, *SYSTEM[: length - 1])
        first = Client(engine, prompt)
        run(engine)
        whole = (*prompt, *first.tokens)
        following = Client(engine, (*whole, 1, 2, 3, 4), max_tokens=1)
        run(engine)
        assert following.ticket.hit_tokens == (len(whole) - 1) // 4 * 4


@scenario("a prompt that is cached as a whole is computed from its last page on")
def full_hit_computes_a_token():
    engine = engine_of(engine_cases.model())
    for hit in (0, 16):  # 20 tokens end a page; their logits need the last one
        client = Client(engine, SYSTEM[:20])
        run(engine)
        assert client.tokens == recomputed(SYSTEM[:20])
        assert client.ticket.hit_tokens == hit


@scenario("a request that is cancelled in the middle of its prompt leaves no lock")
def cancelled_prompt_leaves_no_lock():
    engine = engine_of(engine_cases.model(), max_step_tokens=8)
    client = Client(engine, SYSTEM)
    engine.step()
    assert not client.tokens
    assert engine.stats().running == 1
    client.ticket.cancel()
    run(engine)
    assert engine._pages._cache.num_locks == 0
    assert client.reason == "cancelled"


@scenario("a hit and a cold prompt give the same tokens, with the same log probabilities to rounding")
def a_hit_changes_no_token():
    """XLA adds in an order that depends on the place in a batch; `test_engine_invariance.py` asks for the same bits."""
    engine = engine_of(engine_cases.model(), max_step_tokens=32)
    found = []
    for hit in (0, 20):
        client = Client(engine, (*SYSTEM, 5, 6), logprobs=2)
        run(engine)
        assert client.ticket.hit_tokens == hit
        assert client.tokens == recomputed((*SYSTEM, 5, 6))
        logprobs = [one for event in client.events for one in event.logprobs]
        found.append([[one.logprob, *(value for _, value in one.top)] for one in logprobs])
    np.testing.assert_allclose(*found, atol=1e-5)


@scenario("with windowed layers, a hit reads no page that was freed, and changes no token")
def windows_lose_no_cached_keys():
    """Of prompts, of text whose pages were dropped while it was written, and of what evictions leave."""
    in_windows = (LayerConfig(window=9), LayerConfig(window=5))
    for layers, expected in ((in_windows, [0, 20, 60]), (SMALL.layers, [0, 60, 60])):
        decoder = Decoder(dataclasses.replace(SMALL, layers=layers), implementation="xla", rngs=nnx.Rngs(0))
        engine, hits = engine_of(decoder, num_pages=24, max_step_tokens=9, context=80), []

        def check(prompt, count, decoder=decoder, engine=engine, hits=hits):
            client = continued(engine, prompt, count)
            cold = engine_of(decoder, prefix_cache=False, context=80)
            assert client.tokens == continued(cold, prompt, count).tokens
            hits.append(client.ticket.hit_tokens)
            return (*prompt, *client.tokens)

        text = check(SYSTEM, 40)
        for _ in range(2):
            check(text, 15)
        assert hits == expected
        for other in range(30, 60, 5):
            continued(engine, (other,) * other, 1)
            check(text, 1)
        assert {hit % 4 for hit in hits} == {0}
        assert min(hits[3:]) < 60


def continued(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> Client:
    """Runs a request; after each step, all pages of its table are the prefix's or its own, once each."""
    client = Client(engine, prompt, max_tokens=max_tokens)
    while engine.step():
        engine.check()
        for sequence in engine._scheduler.running:
            assert sequence.prefix is not None
            assert sequence.pages[: len(sequence.prefix.pages)] == [*sequence.prefix.pages]
            assert 0 not in sequence.prefix.pages
            assert (engine._pages._pool.owner_counts(np.array(sequence.prefix.pages, int)) == 1).all()
    return client


# --- plans


@scenario("the work items of a batch cover each tile of queries and keys once, and as many as there is room for")
def work_covers_each_tile_once():
    for seed in range(4):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 3, 9) * rng.integers(1, 40, 9)
        lengths = (rng.integers(0, 3, 9) * rng.integers(1, 4000, 9)).astype(np.int32)
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        spec = spec_of(B=9, T=int(indptr[-1]), S=8192, Hq=4, Hkv=2)
        work = Work(Tiles(block_q=32, block_kv=64), min_queries=0, max_queries=1 << 20)
        plan = requests_on_host(spec, work, indptr, lengths)
        splits = np.asarray(plan.splits)
        find = jax.vmap(functools.partial(planner.find_work_item, plan.tiles * plan.splits))
        items = np.stack(find(jnp.arange(work.num_items(spec), dtype=jnp.int32)), axis=1)
        covered = [
            np.zeros((-(-n // work.queries(spec)), -(-s // 64)), int) for n, s in zip(counts, lengths, strict=True)
        ]
        for request, within in items[items[:, 0] < 9]:
            tile, split = divmod(within, splits[request])
            first, end = planner.split_range(covered[request].shape[1], int(split), int(splits[request]))
            covered[request][tile, int(first) : int(end)] += 1
        assert all((one == 1).all() for one in covered)
        assert splits.max() > 1


@scenario("tiles of keys behind the last query of a tile are not read")
def causal_tiles_end():
    queries = 4 * KEYS
    cache = PagedCache.create(1 + queries // PAGE, PAGE, 2, D, dtype="float32")
    table = jnp.arange(1, cache.num_pages, dtype=jnp.int32)[None]
    batch = PagedBatch(jnp.array([0, queries]), jnp.array([queries]), table)
    call = prepare(jnp.zeros((queries, 2, D)), cache, batch, Settings(mask_mod=causal()))
    for first, end in ((0, 1), (KEYS, 2), (queries - 8, 4)):
        rows = jnp.arange(first, first + 8, dtype=jnp.int32)
        heads = jnp.arange(2, dtype=jnp.int32)
        walk = walk_of(call.spec, call.inputs(), jnp.int32(0), rows, heads, batch.kv_lengths[0], KEYS)
        assert [int(x) for x in walk] == [0, end]


@scenario("a step is planned and packed by the host alone, and the same each time")
def packing_touches_no_device():
    class Untouched:
        def __getattr__(self, name):
            raise AssertionError(f"`{name}` is used")

    engine = engine_of(engine_cases.model())
    for prompt in PROMPTS:
        Client(engine, prompt)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("jax", "jnp"):
            patch.setattr(inputs, name, Untouched())
        engine._take_in()
        chunks = engine._schedule()
        tokens = sum(chunk.size for chunk in chunks)
        program = Program(engine.options.shape_for(tokens, len(chunks), 8, engine.config))
        packed = [engine._dispatcher.packed(chunks, program) for _ in range(2)]
    assert type(packed[0]) is np.ndarray
    np.testing.assert_array_equal(packed[0], packed[1])


@scenario("a step that was packed for another shape is refused, and the engine goes on")
def another_shape_is_refused():
    engine = engine_of(engine_cases.model())
    small, large = (Program(shape) for shape in engine.options.shapes(engine.config)[:2])
    with pytest.raises((TypeError, ValueError)):
        engine._executor.run(engine._dispatcher.packed([], small), large)
    client = Client(engine, PROMPTS[0])
    run(engine)
    assert client.tokens == recomputed(PROMPTS[0])


# --- trees


def attend(query, cache, before: int, queries: int, **ancestors) -> np.ndarray:
    """Of one request with so many keys before its queries, on pages in order."""
    pages = -(-(before + queries) // PAGE)
    table = jnp.arange(1, 1 + pages, dtype=jnp.int32)[None]
    batch = PagedBatch(jnp.array([0, queries]), jnp.array([before + queries]), table, **ancestors)
    return np.asarray(jflex.paged_attention(query, cache, batch, mask_mod=causal(), implementation="xla"))


def drawn(rows: int):
    keys, values = np.random.default_rng(0).normal(size=(2, 9 * PAGE, 2, D)).astype(np.float32)
    query = np.random.default_rng(1).normal(size=(rows, 2, D)).astype(np.float32)
    return query, keys, values


def cache_of(keys, values) -> PagedCache:
    return PagedCache(*(jnp.asarray(x).reshape(9, PAGE, 2, D) for x in (keys, values)))


@scenario("a tree that is a chain is causal attention, bit by bit")
def a_chain_is_causal():
    query, keys, values = drawn(7)
    words = jnp.asarray(tree_bits(range(-1, 6)))[None]
    cache = cache_of(keys, values)
    np.testing.assert_array_equal(attend(query, cache, 13, 7, ancestors=words), attend(query, cache, 13, 7))


@scenario("each branch of a tree of seven nodes is that branch alone")
def branches_are_alone():
    parents, before = [-1, 0, 0, 1, 1, 2, 2], 13
    query, keys, values = drawn(7)
    found = attend(query, cache_of(keys, values), before, 7, ancestors=jnp.asarray(tree_bits(parents))[None])
    for leaf in (3, 4, 5, 6):
        branch = [0, parents[leaf], leaf]
        alone = [np.array(x) for x in (keys, values)]
        for x, whole in zip(alone, (keys, values), strict=True):
            x[PAGE + before : PAGE + before + 3] = whole[[PAGE + before + node for node in branch]]
        right = attend(query[branch], cache_of(*alone), before, 3)
        np.testing.assert_allclose(found[branch], right, rtol=1e-5, atol=1e-6)


# --- the engine


@scenario("twenty random prompts get the tokens of full recomputation")
def random_prompts():
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, 64, rng.integers(1, 30)).tolist()) for _ in range(20)]
    engine = engine_of(engine_cases.model())
    clients = [Client(engine, prompt) for prompt in prompts]
    run(engine)
    assert [client.tokens for client in clients] == [recomputed(prompt) for prompt in prompts]


@scenario("a request that is cancelled has ended and returned its pages after the next step")
def cancelled_within_a_step():
    engine = engine_of(engine_cases.model(), prefix_cache=False)
    leaving, staying = (Client(engine, prompt, max_tokens=20) for prompt in PROMPTS[:2])
    for _ in range(4):
        engine.step()
    leaving.ticket.cancel()
    engine.step()
    assert leaving.reason == "cancelled"
    assert len(leaving.tokens) == 3  # those of the step before are not read for it
    assert engine.stats().used_pages == len(staying.ticket._sequence.pages)
    run(engine)
    assert staying.reason == "length"


@scenario("a prompt longer than all pages is refused at once, with both numbers, and others run on")
def too_long_for_the_pages():
    engine = engine_of(engine_cases.model(), num_pages=6)
    other = Client(engine, (1, 2, 3))
    engine.step()
    with pytest.raises(ValueError, match=r"shorter than 20 tokens.*Got 21"):
        Client(engine, SYSTEM)
    run(engine)
    assert other.tokens == recomputed((1, 2, 3))


@tiers(
    default={"words": [
        "a step is planned and packed by the host alone, and the same each time",
        "a tree that is a chain is causal attention, bit by bit",
    ]}
)  # fmt: skip
@pytest.mark.parametrize("words", SCENARIOS)
def test_scenario(words):
    SCENARIOS[words]()
