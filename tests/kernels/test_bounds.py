"""What Triton kernels load and store lies within its arrays: the interpreter clamps an index, and a GPU does not.

Seen are loads and stores of tiles; single elements that a kernel reads as ``ref[...]`` are not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jflex
from jflex._jax import primitive
from jflex.paged import PagedBatch, PagedCache
from pallas_kernels.config import Tiles
from pallas_kernels.split_kv import paged
from pallas_kernels.triton.launch import Interpreter, by_arrays
from tests.cases import paged_cases
from tests.support import paged_evaluation
from tests.support.rows import tiers

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
NAMES = ("mixed", "e4m3", "e5m2_pages_of_1", "int8_head_size_80", "rotated_pages_of_16")


@pytest.fixture
def outside(monkeypatch):
    """Loads and stores of elements, by how many of them were out of range; the last entry counts what was checked."""
    found = {"load": 0, "store": 0, "checked": 0}

    def note(name, count):
        found["checked"] += 1
        found[name] += int(count)

    def check(name, ref, mask):
        whole, index = by_arrays(ref)
        if index is None:
            return
        wrong = functools.reduce(jnp.logical_or, [(x < 0) | (x >= n) for x, n in zip(index, whole.shape, strict=True)])
        count = jnp.sum(wrong if mask is None else wrong & mask)
        jax.debug.callback(functools.partial(note, name), count)

    def load(self, ref, *, mask=None, other=0):
        check("load", ref, mask)
        return self.load_by_index(ref, mask, other)

    def store(self, ref, x, *, mask=None):
        check("store", ref, mask)
        self.store_by_index(ref, x, mask)

    forget = [primitive._trace, primitive._batched, primitive._compiled]
    monkeypatch.setattr(Interpreter, "load", load)
    monkeypatch.setattr(Interpreter, "store", store)
    for cached in forget:  # traces are cached by spec
        cached.cache_clear()
    yield found
    for cached in forget:
        cached.cache_clear()


def within(outside):
    jax.effects_barrier()
    assert outside["checked"] > 10
    assert outside["load"] == outside["store"] == 0


@tiers(full={"name": "int8_head_size_80"}, rest="long")
@pytest.mark.parametrize("name", NAMES)
def test_pages(name, outside):
    case = next(case for case in paged_cases.CASES if case.name == name)
    paged_evaluation.run(paged_cases.in_dtype(case, "bfloat16"), "triton-interpret")
    within(outside)


@tiers(full={"counts": "(1, 1, 1, 0)-4", "always": True}, rest="long")
@pytest.mark.parametrize("always", [False, True], ids=["few_rows", "always"])
@pytest.mark.parametrize(("counts", "N"), [((1, 1, 1, 0), 4), ((1, 40, 1, 1), 64), ((70,), 128)], ids=str)
def test_words_of_two_columns_in_tiles_of_several_pages(counts, N, always, outside, monkeypatch):
    """As a server calls it: a stacked cache, requests of any length, padding, and pages of no request."""
    if always:
        monkeypatch.setattr(paged, "MIN_WGMMA_ROWS", 1 << 20)
    rng, integers = np.random.default_rng(N), functools.partial(jnp.asarray, dtype=jnp.int32)
    R, pages, page = len(counts), 5, 64
    lengths = [max(count, int(rng.integers(1, pages * page))) if count else 0 for count in counts]
    table = rng.permutation(np.arange(1, 1 + R * pages)).reshape(R, pages)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // page) :] = -(10**6)
    cache = PagedCache.create(1 + R * pages, page, 2, 16, dtype="float8_e4m3fn", layers=2)
    cache = dataclasses.replace(cache, v_scale=cache.v_scale * jnp.nan)  # so that the repair runs, too
    batch = PagedBatch(integers(np.cumsum([0, *counts])), integers(lengths), integers(table))
    config = jflex.Config(interpret=True, decode=Tiles(16, 128, 4, 4))
    query = jnp.asarray(rng.normal(size=(N, 8, 16)), jnp.bfloat16)
    jflex.paged_attention(
        query, cache, batch, mask_mod=CAUSAL, layer=integers(1), implementation="triton", config=config
    )
    within(outside)


def test_what_is_out_of_range_is_seen(outside):
    def beyond(x, out):
        at = jnp.arange(8, dtype=jnp.int32) + 4
        Interpreter("").store(out.at[at], Interpreter("").load(x.at[at]), mask=at < 10)

    run = pl.pallas_call(beyond, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)
    run(jnp.zeros(8))
    jax.effects_barrier()
    assert (outside["load"], outside["store"]) == (4, 2)
