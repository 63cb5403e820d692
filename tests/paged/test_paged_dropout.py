"""Dropout of levels, trees and shards: bit by bit what a dense call drops. `paged_cases` has dropout of pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from tests.calls.test_cascade import BACKENDS
from tests.support import dropout_bits

RATE, KEY, HQ, HKV = 0.3, jax.random.key(dropout_bits.KEY[1]), 4, 2
GPU = pytest.param("triton", marks=pytest.mark.gpu)
backends = pytest.mark.parametrize("backend", ["xla", "triton-interpret", GPU])
DROPOUT = {"dropout_rate": RATE, "dropout_key": KEY}
LENGTHS, COUNTS, SIZE = (20, 33, 0, 40), (3, 33, 0, 1), 64  # of keys, of queries; keys that are told from each other
INDPTR = np.cumsum([0, *COUNTS]).astype(np.int32)
ROWS = int(INDPTR[-1]) + 2  # two of padding
QUERY = jnp.zeros((ROWS, HQ, 16))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def cache_of(page_size=16):
    """Keys of zeros, and values that are a unit matrix: the output of a query is its weights."""
    pages = -(-SIZE // page_size)
    table = 1 + np.arange(len(LENGTHS) * pages, dtype=np.int32).reshape(len(LENGTHS), pages)[::-1]
    values = np.full((1 + table.size, page_size, HKV, SIZE), np.nan, np.float32)
    for row in table:
        values[row] = np.eye(SIZE, dtype=np.float32).reshape(pages, page_size, 1, SIZE)
    keys = jnp.zeros((len(values), page_size, HKV, 16))
    return PagedCache(keys, jnp.asarray(values)), table


CACHE, TABLE = cache_of()
BATCH = PagedBatch(jnp.asarray(INDPTR), jnp.array(LENGTHS), jnp.asarray(TABLE))
kept = functools.partial(dropout_bits.kept, RATE, dropout_bits.KEY)
"""The weights that the generator keeps, of a request, a head, a query and keys."""


def drawn():
    """The weights that are kept, [rows, Hq, SIZE], of causal rows."""
    weights = np.zeros((ROWS, HQ, SIZE), bool)
    for r, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        q, k = np.arange(length - count, length)[:, None, None], np.arange(SIZE)
        weights[INDPTR[r] : INDPTR[r + 1]] = kept(r, np.arange(HQ)[None, :, None], q, k) & (q >= k)
    return weights


@pytest.mark.full
@backends
def test_levels_drop_what_pages_drop(backend):
    """Keys before a cut on a level for each request and those after it on another, in groups of other numbers."""
    cut, lengths = 16, np.array(LENGTHS)
    first = PagedBatch(BATCH.qo_indptr, jnp.asarray(np.minimum(lengths, cut)), BATCH.page_table)
    rest = PagedBatch(BATCH.qo_indptr, jnp.asarray(np.maximum(lengths - cut, 0)), BATCH.page_table[:, cut // 16 :])
    levels = [jflex.CascadeLevel.paged(CACHE, rest, start=cut), jflex.CascadeLevel.paged(CACHE, first)]
    places = {"positions": token_positions(BATCH, ROWS), "requests": token_requests(BATCH, ROWS)}
    attend = functools.partial(jflex.cascade_attention, mask_mod=causal, **places, **DROPOUT, **BACKENDS[backend])
    np.testing.assert_array_equal(np.asarray(jax.jit(attend)(QUERY, levels)) > 0, drawn())


@pytest.mark.full
@backends
def test_a_level_that_requests_share(backend):
    """One group of three requests: their rows drop by their own request, each as in a dense call."""
    values = jnp.broadcast_to(jnp.eye(40)[None, :, None], (1, 40, HKV, 40))
    level = jflex.CascadeLevel.dense(jnp.zeros((1, 40, HKV, 16)), values, qo_indptr=jnp.array([0, 3]), start=5)
    positions, attend = jnp.array([60, 44, 60], jnp.int32), functools.partial(jflex.cascade_attention, QUERY[:3])
    attend = jax.jit(functools.partial(attend, [level], positions=positions, **DROPOUT, **BACKENDS[backend]))
    bits = lambda b: kept(b, np.arange(HQ)[:, None], np.asarray(positions)[:, None, None], np.arange(5, 45))
    found = attend(requests=jnp.array([2, 0, 1], jnp.int32))
    np.testing.assert_array_equal(np.asarray(found) > 0, bits(np.array([2, 0, 1])[:, None, None]))
    np.testing.assert_array_equal(np.asarray(attend()) > 0, bits(0))


@pytest.mark.full
@backends
def test_nodes_of_a_tree_drop_as_the_branches_would(backend):
    """Nodes 1 and 2 of a fork are at one position: each drops what it would as the next token."""
    words, length = jflex.masks.tree_bits([-1, 0, 0]), 20
    batch = PagedBatch(jnp.array([0, 3]), jnp.array([length]), jnp.asarray(TABLE[:1]), words[None])
    attend = functools.partial(jflex.paged_attention, mask_mod=causal, **DROPOUT, **BACKENDS[backend])
    found = np.asarray(jax.jit(attend)(QUERY[:3], CACHE, batch))[:, :, :length] > 0
    bits = kept(0, np.arange(HQ)[:, None], np.array([17, 18, 18])[:, None, None], np.append(np.arange(19), 18))
    seen = np.arange(length) <= np.array([17, 18, 17])[:, None]
    seen[2, 19] = True
    np.testing.assert_array_equal(found, bits & seen[:, None])


@pytest.mark.full
def test_a_rate_of_0_and_no_statistics_are_the_program_without():
    level = jflex.CascadeLevel.paged(CACHE, BATCH)
    off = {"dropout_rate": 0.0, "dropout_key": KEY, "implementation": "xla"}
    paged = lambda **more: str(jax.make_jaxpr(
        lambda q, cache: jax.tree.leaves(jflex.paged_attention(q, cache, BATCH, mask_mod=causal, **off | more))
    )(QUERY, CACHE))  # fmt: skip
    cascade = lambda **more: str(
        jax.make_jaxpr(lambda q: jax.tree.leaves(jflex.cascade_attention(q, [level, level], **off | more)))(QUERY)
    )
    for text in (paged, cascade):
        assert text() == text(dropout_key=None)
        assert text(return_stats=("lse",)) == text(return_lse=True)
        assert text(return_stats=("max",)) != text(return_lse=True)


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_heads_over_two_devices_drop_what_one_drops(backend):
    """And their statistics are those of the whole."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    P = jax.sharding.PartitionSpec
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))
    q, cache = place(QUERY, None, "heads"), jax.tree.map(lambda x: place(x, None, None, "heads"), CACHE)
    attend = jax.jit(functools.partial(
        jflex.paged_attention, mask_mod=causal, return_stats=("max", "entropy"), **DROPOUT, **BACKENDS[backend]
    ))  # fmt: skip
    out, stats = attend(q, cache, BATCH)
    np.testing.assert_array_equal(np.asarray(out) > 0, drawn())
    seen = ROWS - 2
    positions = np.asarray(token_positions(BATCH, ROWS))[:seen]
    np.testing.assert_allclose(stats.entropy[:seen], np.log(positions + 1)[:, None].repeat(HQ, 1), atol=2e-5)
    assert out.sharding.is_equivalent_to(q.sharding, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_rate": 0.1}, ValueError, "`dropout_rate` is 0.1, and there is no `dropout_key`"),
        ({"dropout_rate": 1.0, "dropout_key": KEY}, ValueError, "`dropout_rate` must be at least 0"),
        ({"dropout_rate": 0.0, "dropout_key": 3}, TypeError, "`dropout_key` must be one random key"),
    ],
    ids=["no_key", "rate", "key"],
)
def test_wrong_input(options, error, message):
    level = jflex.CascadeLevel.paged(CACHE, BATCH)
    with pytest.raises(error, match=message):
        jflex.paged_attention(QUERY, CACHE, BATCH, **options)
    with pytest.raises(error, match=message):
        jflex.cascade_attention(QUERY, [level], positions=jnp.zeros(ROWS, jnp.int32), **options)
    with pytest.raises(ValueError, match=r"`positions` must be passed with .* or a `dropout_rate`"):
        jflex.cascade_attention(QUERY, [level], **DROPOUT)
