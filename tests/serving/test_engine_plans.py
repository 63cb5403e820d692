"""What the host plans: shapes of steps, packed steps, copies of pages, and the prefix that a cascade reads once."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from flax_layers.models.form import flatten_model
from flax_layers.serving import EngineOptions
from flax_layers.serving.device import inputs
from flax_layers.serving.device.options import Program, Shape
from flax_layers.serving.device.step import empty_state, make_step
from flax_layers.serving.engine.cascades import NO_PREFIX, Cascades
from flax_layers.serving.engine.packing import pack
from flax_layers.serving.engine.requests import Request
from flax_layers.serving.engine.scheduler import Chunk
from flax_layers.serving.engine.sequence import Sequence
from jflex.paged import PagePool, PrefixCache
from tests.cases.engine_cases import PROMPTS, Client, engine_of, model
from tests.support import gpu_compile


def test_a_step_is_planned_and_packed_by_the_host_alone(monkeypatch):
    class Untouched:
        def __getattr__(self, name):
            raise AssertionError(f"`{name}` is used")

    engine = engine_of()
    for prompt in PROMPTS:
        Client(engine, prompt)
    for name in ("jax", "jnp"):
        monkeypatch.setattr(inputs, name, Untouched())
    engine._take_in()
    chunks = engine._schedule()
    tokens = sum(chunk.size for chunk in chunks)
    program = Program(engine.options.shape_for(tokens, len(chunks), 8, engine.config))
    packed = [engine._dispatcher.packed(chunks, program) for _ in range(2)]
    assert type(packed[0]) is np.ndarray
    np.testing.assert_array_equal(packed[0], packed[1])


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_a_gpu_computes_nothing_twice_beside_a_large_cache():
    """XLA counts a donated cache twice, and rematerialized to save memory that is not short."""
    options = EngineOptions(num_pages=1 << 22, page_size=64, max_requests=4, max_step_tokens=64)
    state = jax.eval_shape(lambda: empty_state(model(), options, None))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) > 60e9
    program = Program(options.shapes(model().config)[0])
    parameters, form = flatten_model(model())
    arrays = (parameters, state, pack([], program.shape, options.max_requests))
    assert ".remat" not in gpu_compile.compiled_of(make_step(form, None), *arrays, program=program).as_text()


def test_when_a_cascade_pays():
    """The shapes of decoding, and among them only those that could save enough."""
    found = Cascades(EngineOptions(max_requests=64, page_size=64, cascade_bytes=1_000_000), token_bytes=100)
    assert found.pays(11, 1000)
    assert not found.pays(10, 1000)
    shapes = [Shape(1, 1, 512), Shape(4, 4, 8), Shape(4, 4, 512), Shape(64, 64, 8), Shape(128, 64, 512)]
    assert found.shapes(shapes) == [Shape(4, 4, 512), Shape(64, 64, 8)]
    assert Cascades(EngineOptions(cascade_bytes=None), token_bytes=100).shapes(shapes) == []


def test_the_best_prefix_is_found():
    """Against all groups of requests, over random trees of prefixes."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        pool = PagePool(200, 2)
        cache, chunks = PrefixCache(pool), []
        for number in range(int(rng.integers(0, 8))):
            tokens = rng.integers(0, 2, 2 * int(rng.integers(0, 7))).tolist()
            missing = cache.match(tokens)
            pages = [*missing.pages, *cache.alloc(len(tokens) // 2 - len(missing.pages))]
            sequence = Sequence(Request((1,)), 1, lambda event: None, np.zeros(0, np.int32), number)
            sequence.prefix = cache.insert(tokens, pages, missing)
            chunks.append(Chunk(sequence, 0, 1, samples=True))
        prefixes = [chunk.sequence.prefix.pages for chunk in chunks if chunk.sequence.prefix is not None]
        common = lambda start, prefixes=prefixes: sum(prefix[: len(start)] == start for prefix in prefixes)
        saved = {prefix[:n]: (common(prefix[:n]) - 1) * 2 * n for prefix in prefixes for n in range(1, len(prefix) + 1)}
        ordered, shared = Cascades(EngineOptions(page_size=2, cascade_bytes=1), 1).arrange(chunks)
        assert (shared.requests - 1) * shared.tokens == max([0, *saved.values()]) or shared == NO_PREFIX
        assert (shared == NO_PREFIX) == (max([0, *saved.values()]) == 0)
        assert sorted(map(id, ordered)) == sorted(map(id, chunks))
        first = [x.sequence.prefix.pages[: shared.tokens // 2] for x in ordered if x.sequence.prefix is not None]
        assert len(set(first[: shared.requests])) <= 1
