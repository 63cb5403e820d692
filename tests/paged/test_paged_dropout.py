"""Dropout of pages, levels and splits: bit by bit what a dense call over the whole sequences drops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from tests.cases.paged_cases import PagedCase
from tests.support import dropout_bits, paged_evaluation
from tests.support.rows import in_turns

RATE, KEY, HQ, HKV = 0.3, jax.random.key(dropout_bits.KEY[1]), 4, 2
BACKENDS = {
    "reference": {"implementation": "reference"},
    "xla": {"implementation": "xla"},
    "triton-interpret": {"implementation": "triton", "config": jflex.Config(interpret=True)},
    "triton": {"implementation": "triton"},
}
backends = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.gpu) if name == "triton" else name for name in BACKENDS]
)
DROPOUT = {"dropout_rate": RATE, "dropout_key": KEY}
LENGTHS, COUNTS, SIZE = (20, 33, 0, 40), (3, 33, 0, 1), 64  # of keys, of queries; keys that are told from each other
INDPTR = np.cumsum([0, *COUNTS]).astype(np.int32)
ROWS = int(INDPTR[-1]) + 2  # two of padding


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


def batch_of(table):
    return PagedBatch(jnp.asarray(INDPTR), jnp.array(LENGTHS), jnp.asarray(table))


def drawn():
    """The weights that are kept, [rows, Hq, SIZE], of causal rows."""
    kept = np.zeros((ROWS, HQ, SIZE), bool)
    for r, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        q, k = np.arange(length - count, length)[:, None, None], np.arange(SIZE)
        bits = dropout_bits.kept(RATE, dropout_bits.KEY, r, np.arange(HQ)[None, :, None], q, k)
        kept[INDPTR[r] : INDPTR[r + 1]] = bits & (q >= k)
    return kept


@pytest.mark.full
@in_turns
@backends
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_drop_what_the_generator_says(backend, page_size):
    cache, table = cache_of(page_size)
    q = jnp.zeros((ROWS, HQ, 16))
    out = jflex.paged_attention(q, cache, batch_of(table), mask_mod=causal, **DROPOUT, **BACKENDS[backend])
    np.testing.assert_array_equal(np.asarray(out) > 0, drawn())


@pytest.mark.full
@in_turns
@backends
@pytest.mark.parametrize("cut", [16, 32])
def test_levels_drop_what_pages_drop(backend, cut):
    """Keys before `cut` on a level for each request and those after it on another, in groups of other numbers."""
    cache, table = cache_of()
    batch, lengths = batch_of(table), np.array(LENGTHS)
    first = PagedBatch(batch.qo_indptr, jnp.asarray(np.minimum(lengths, cut)), batch.page_table)
    rest = PagedBatch(batch.qo_indptr, jnp.asarray(np.maximum(lengths - cut, 0)), batch.page_table[:, cut // 16 :])
    levels = [jflex.CascadeLevel.paged(cache, rest, start=cut), jflex.CascadeLevel.paged(cache, first)]
    places = {"positions": token_positions(batch, ROWS), "requests": token_requests(batch, ROWS)}
    attend = functools.partial(jflex.cascade_attention, mask_mod=causal, **places, **DROPOUT, **BACKENDS[backend])
    np.testing.assert_array_equal(np.asarray(attend(jnp.zeros((ROWS, HQ, 16)), levels)) > 0, drawn())


@pytest.mark.full
@backends
def test_a_level_that_requests_share(backend):
    """One group of three requests: their rows drop by their own request, each as in a dense call."""
    values = jnp.broadcast_to(jnp.eye(40)[None, :, None], (1, 40, HKV, 40))
    level = jflex.CascadeLevel.dense(jnp.zeros((1, 40, HKV, 16)), values, qo_indptr=jnp.array([0, 3]), start=5)
    positions = jnp.array([60, 44, 60], jnp.int32)
    of = functools.partial(jflex.cascade_attention, jnp.zeros((3, HQ, 16)), [level], positions=positions, **DROPOUT)
    bits = lambda b: dropout_bits.kept(
        RATE, dropout_bits.KEY, b, np.arange(HQ)[:, None], np.asarray(positions)[:, None, None], np.arange(5, 45)
    )
    found = of(requests=jnp.array([2, 0, 1], jnp.int32), **BACKENDS[backend])
    np.testing.assert_array_equal(np.asarray(found) > 0, bits(np.array([2, 0, 1])[:, None, None]))
    np.testing.assert_array_equal(np.asarray(of(**BACKENDS[backend])) > 0, bits(0))


@pytest.mark.full
@backends
def test_nodes_of_a_tree_drop_as_the_branches_would(backend):
    """Nodes 1 and 2 of a fork are at one position: each drops what it would as the next token."""
    words, length = jflex.masks.tree_bits([-1, 0, 0]), 20
    cache, table = cache_of()
    batch = PagedBatch(jnp.array([0, 3]), jnp.array([length]), jnp.asarray(table[:1]), words[None])
    out = jflex.paged_attention(jnp.zeros((3, HQ, 16)), cache, batch, mask_mod=causal, **DROPOUT, **BACKENDS[backend])
    position, found = np.append(np.arange(19), 18), np.asarray(out)[:, :, :length] > 0
    bits = dropout_bits.kept(
        RATE, dropout_bits.KEY, 0, np.arange(HQ)[:, None], np.array([17, 18, 18])[:, None, None], position
    )
    seen = np.arange(length) <= np.array([17, 18, 17])[:, None]
    seen[2, 19] = True
    np.testing.assert_array_equal(found, bits & seen[:, None])


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_all_forms_have_one_mask(backend):
    """Dense, packed, paged and cascade, with the same sequences; results are in the tables of cases."""
    rng, how, T = np.random.default_rng(0), BACKENDS[backend], 33
    q, k, v = (jnp.asarray(rng.normal(size=(2, T, h, 16)), jnp.float32) for h in (HQ, HKV, HKV))
    lengths, ends = jnp.array([20, 33], jnp.int32), jnp.array([0, 20, 53], jnp.int32)
    whole = jflex.flex_attention(q, k, v, mask_mod=causal, kv_lengths=lengths, **DROPOUT, **how)
    right = jnp.concatenate([whole[0, :20], whole[1]])
    packed = [jnp.concatenate([x[0, :20], x[1]]) for x in (q, k, v)]
    of_packed = jflex.flex_attention_varlen(
        *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, mask_mod=causal, **DROPOUT, **how
    )
    cache, table = PagedCache.create(8, 16, HKV, 16, dtype=jnp.float32), jnp.array([[5, 2, 0], [1, 7, 3]], jnp.int32)
    batch = PagedBatch(ends, lengths, table)
    cache = jflex.paged.write(cache, *packed[1:], jflex.paged.token_slots(batch, 53, 16))
    paged = jflex.paged_attention(packed[0], cache, batch, mask_mod=causal, **DROPOUT, **how)
    places = {"positions": token_positions(batch, 53), "requests": token_requests(batch, 53)}
    level = jflex.CascadeLevel.paged(cache, batch)
    cascade = jflex.cascade_attention(packed[0], [level], mask_mod=causal, **places, **DROPOUT, **how)
    for found in (of_packed, paged, cascade):
        np.testing.assert_allclose(found, right, rtol=3e-5, atol=3e-5)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "xla", "triton-interpret"])
def test_lse_and_statistics_are_those_without_dropout(backend):
    case = PagedCase("statistics_of_dropout", (3, 20), (40, 25))
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    call = functools.partial(
        jflex.paged_attention, x.query, cache, paged_evaluation.batch_of(case, table), mask_mod=causal
    )
    stats = [call(return_stats=("lse", "max", "entropy"), **BACKENDS[backend], **more)[1] for more in ({}, DROPOUT)]
    jax.tree.map(np.testing.assert_array_equal, *stats)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_a_rate_of_0_and_no_statistics_are_the_program_without(backend):
    cache, table = cache_of()
    q, batch, how = jnp.zeros((ROWS, HQ, 16)), batch_of(table), BACKENDS[backend]
    level = jflex.CascadeLevel.paged(cache, batch)
    off = {"dropout_rate": 0.0, "dropout_key": KEY}
    paged = lambda **more: str(jax.make_jaxpr(
        lambda q, cache: jax.tree.leaves(jflex.paged_attention(q, cache, batch, mask_mod=causal, **how, **more))
    )(q, cache))  # fmt: skip
    cascade = lambda **more: str(
        jax.make_jaxpr(lambda q: jax.tree.leaves(jflex.cascade_attention(q, [level, level], **how, **more)))(q)
    )
    for text in (paged, cascade):
        assert text(**off) == text()
        assert text(return_stats=("lse",)) == text(return_lse=True)
        assert text(return_stats=("max",)) != text(return_lse=True)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_keys_are_data_and_may_be_mapped(backend):
    cache, table = cache_of()
    q, batch, traced = jnp.zeros((ROWS, HQ, 16)), batch_of(table), []

    def call(key):
        traced.append(1)
        return jflex.paged_attention(q, cache, batch, dropout_rate=RATE, dropout_key=key, **BACKENDS[backend])

    run, keys = jax.jit(call), jax.random.split(KEY, 2)
    first, second = map(run, keys)
    assert len(traced) == 1
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(keys), jnp.stack([first, second]))
    assert ((np.asarray(first) > 0) != (np.asarray(second) > 0)).any()


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_heads_over_two_devices_drop_what_one_drops(backend):
    """And their statistics are those of the whole."""
    cache, table = cache_of()
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    P = jax.sharding.PartitionSpec
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))
    q = place(jnp.zeros((ROWS, HQ, 16)), None, "heads")
    cache = jax.tree.map(lambda x: place(x, None, None, "heads"), cache)
    attend = jax.jit(functools.partial(
        jflex.paged_attention, mask_mod=causal, return_stats=("max", "entropy"), **DROPOUT, **BACKENDS[backend]
    ))  # fmt: skip
    out, stats = attend(q, cache, batch_of(table))
    np.testing.assert_array_equal(np.asarray(out) > 0, drawn())
    seen = drawn().shape[0] - 2
    positions = np.asarray(token_positions(batch_of(table), ROWS))[:seen]
    np.testing.assert_allclose(stats.entropy[:seen], np.log(positions + 1)[:, None].repeat(HQ, 1), atol=2e-5)
    assert out.sharding.is_equivalent_to(q.sharding, 3)


@pytest.mark.full
def test_derivative_of_the_reference():
    """That of the dense call with the same dropout."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 18, h, 16)), jnp.float32) for h in (HQ, HKV, HKV))
    level = lambda k, v, a, b: jflex.CascadeLevel.dense(k[:, a:b], v[:, a:b], qo_indptr=jnp.array([0, 18]), start=a)
    how = {"mask_mod": causal, "implementation": "reference", **DROPOUT}

    def cascade(q, k, v):
        levels = [level(k, v, 0, 7), level(k, v, 7, 18)]
        return jflex.cascade_attention(q[0], levels, positions=jnp.arange(18), **how)

    of = lambda call: jax.grad(lambda *xs: jnp.sum(jnp.sin(call(*xs))), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(of(cascade), of(lambda *xs: jflex.flex_attention(*xs, **how)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


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
    cache, table = cache_of()
    q, level = jnp.zeros((ROWS, HQ, 16)), jflex.CascadeLevel.paged(cache, batch_of(table))
    with pytest.raises(error, match=message):
        jflex.paged_attention(q, cache, batch_of(table), **options)
    with pytest.raises(error, match=message):
        jflex.cascade_attention(q, [level], positions=jnp.zeros(ROWS, jnp.int32), **options)


def test_levels_need_positions():
    cache, table = cache_of()
    level = jflex.CascadeLevel.paged(cache, batch_of(table))
    with pytest.raises(ValueError, match=r"`positions` must be passed with .* or a `dropout_rate`"):
        jflex.cascade_attention(jnp.zeros((ROWS, HQ, 16)), [level], **DROPOUT)


def test_explain_takes_the_shape_of_a_key():
    cache, table = jax.eval_shape(lambda: PagedCache.create(8, 16, 2, 64, dtype=jnp.float32)), jnp.ones((2, 2), int)
    batch = PagedBatch(jnp.array([0, 1, 2]), jnp.array([20, 30]), table)
    q, key = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32), jax.eval_shape(lambda: KEY)
    account = jflex.explain(
        jflex.paged_attention, q, cache, batch, dropout_rate=RATE, dropout_key=key, return_stats=("entropy",),
        **BACKENDS["triton-interpret"],
    )  # fmt: skip
    assert account.backend == "triton"
