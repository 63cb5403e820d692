"""`return_stats` where keys are split: pages, levels, and decoding; of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from pallas_kernels.split_kv import planner
from tests.calls import test_cascade
from tests.cases.paged_cases import CASES, PagedCase
from tests.support import dropout_bits, oracle, paged_evaluation
from tests.support.layer_flavours import FLAVOURS
from tests.support.rows import in_turns, tiers

pytestmark = pytest.mark.usefixtures("settings_of_device")
ALL = ("lse", "max", "entropy")
GPU = pytest.param("triton", marks=pytest.mark.gpu)
TABLE = [case for case in CASES if case.normalize == "softmax"]
# As in tests/paged/test_paged_attention.py, of each launch and each way in which keys are split.
INTERPRETED = ["decode", "mixed", "group_5", "divided_with_parts_that_see_nothing", "divided_dropout"]
OPTIONS = test_cascade.BACKENDS
every_backend = pytest.mark.parametrize("backend", ["reference", "xla", "triton-interpret", GPU])
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# --- pages


@tiers(
    default={"backend": "xla", "case": ["decode", "mixed", "mixed_with_padding_and_empty_requests"]},
    full=[{"backend": "xla", "case": ["softcap_group_8", "norms_of_values", "e4m3"]},
          {"backend": ["xla", "reference"], "case": ["extreme_logits", "divided_dropout"]}],
    rest="gpu",
)  # fmt: skip
@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.parametrize("backend", ["reference", "xla", GPU])
def test_pages_against_float64(case, backend):
    out, stats = paged_evaluation.run(case, backend, stats=ALL)
    paged_evaluation.check(case, (out, stats.lse))
    paged_evaluation.check_stats(case, stats)


@tiers(default={"case": "decode"}, share=2)
@pytest.mark.parametrize("case", [case for case in TABLE if case.name in INTERPRETED], ids=str)
def test_pages_interpreted_against_float64(case):
    out, stats = paged_evaluation.run(case, "triton-interpret", stats=ALL)
    paged_evaluation.check(case, (out, stats.lse))
    paged_evaluation.check_stats(case, stats)


@pytest.mark.full
@every_backend
def test_sinks_of_pages_and_padding(backend):
    """Against the oracle, request by request; an empty request and padding have the sink alone."""
    case, sinks = PagedCase("sinks_of_stats", (2, 20, 1), (40, 25, 0), 3), np.array([-1.0, 0.5, 2.0, -np.inf])
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    attend = functools.partial(jflex.paged_attention, mask_mod=causal, sinks=jnp.asarray(sinks, jnp.float32))
    attend = jax.jit(functools.partial(attend, return_stats=("max", "entropy"), **OPTIONS[backend]))
    out, stats = attend(x.query, cache, paged_evaluation.batch_of(case, table))
    row_max, entropy, right = np.full((case.N, 4), -np.inf), np.zeros((case.N, 4)), np.zeros(out.shape)
    for r, length in enumerate(case.lengths):
        rows, offset = slice(case.indptr[r], case.indptr[r + 1]), length - case.queries[r]
        arrays = [a[None].astype(np.float64) for a in (x.query[rows], x.keys[r], x.values[r])]
        mask = lambda b, h, q, k, _, offset=offset: q + offset >= k
        found = oracle.forward(*arrays, case.D**-0.5, None, mask, {}, sinks)
        right[rows], row_max[rows] = found.out[0], oracle.row_max(found, None, {})[0].T
        entropy[rows] = oracle.entropy(found, sinks)[0].T
    assert stats.lse is None
    for found, expected in ((out, right), (stats.max, row_max), (stats.entropy, entropy)):
        assert_close(found, expected)


@pytest.mark.full
@every_backend
def test_masked_nan_changes_no_statistic(backend):
    """Of values, which marks the lse of a split, and of keys; a mask that hides them comes before the max."""
    case = PagedCase("nan_of_stats", (1, 2), (300, 90), page_size=16)
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    batch, shown = paged_evaluation.batch_of(case, table), lambda b, h, q, k: (q >= k) & (k % 5 != 1)
    hidden = jflex.paged.slots_of(jnp.asarray(table[0]), jnp.array([1, 101, 296]), 16)
    poisoned = jflex.paged.write(cache, *[jnp.full((3, 2, 16), jnp.nan)] * 2, hidden)
    attend = functools.partial(jflex.paged_attention, mask_mod=shown, return_stats=ALL, **OPTIONS[backend])
    found, right = (jax.jit(attend)(x.query, c, batch) for c in (poisoned, cache))
    jax.tree.map(assert_close, found, right)


@pytest.mark.full
def test_derivative_of_the_reference():
    """As of the dense call, which is held against float64 in test_return_stats.py; none flows from the max."""
    case = PagedCase("derivative_of_stats", (3,), (18,))
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    batch = paged_evaluation.batch_of(case, table)
    loss = lambda stats: jnp.sum(jnp.sin(stats.entropy)) + jnp.sum(jnp.cos(stats.lse)) + jnp.sum(stats.max)
    how = {"return_stats": ALL, "implementation": "reference"}
    paged = lambda q: loss(jflex.paged_attention(q, cache, batch, mask_mod=causal, **how)[1])
    mask = jflex.with_offset(causal, 15)
    dense = lambda q: loss(jflex.flex_attention(q[None], x.keys[0][None], x.values[0][None], mask_mod=mask, **how)[1])
    assert_close(*(jax.jit(jax.grad(loss_of))(x.query) for loss_of in (paged, dense)))


# --- levels


@pytest.mark.full
@in_turns
@every_backend
@pytest.mark.parametrize(
    ("tree", "mods"), [("append", "alibi"), ("three_levels", "window"), ("decode", "causal"), ("decode", "softcap")]
)
def test_levels_against_float64(tree, mods, backend):
    x, mods = test_cascade.drawn(tree), test_cascade.MODS[mods]
    rows = {"positions": jflex.paged.token_positions(x.batch, len(x.q))}
    rows["requests"] = jflex.paged.token_requests(x.batch, len(x.q))
    levels = test_cascade.paged_levels(tree)
    with jax.default_matmul_precision("highest"):
        attend = functools.partial(jflex.cascade_attention, **rows, **mods.given, **OPTIONS[backend])
        out, stats = jax.jit(functools.partial(attend, return_stats=ALL))(jnp.asarray(x.q), levels)
    for found, expected in zip((out, *stats), test_cascade.flat(tree, mods), strict=True):
        assert_close(found, expected)


@pytest.mark.full
def test_no_levels_and_levels_without_keys():
    out, stats = jflex.cascade_attention(jnp.ones((2, 4, 8)), [], return_stats=ALL)
    assert (out.shape, {x.shape for x in stats}) == ((2, 4, 8), {(2, 4)})
    assert [float(x[0, 0]) for x in stats] == [-np.inf, -np.inf, 0]
    k = jnp.ones((1, 4, 1, 8))
    level = jflex.CascadeLevel.dense(k, k, qo_indptr=jnp.array([0, 2]))
    _, stats = jflex.cascade_attention(jnp.ones((3, 1, 8)), [level, level], return_stats=ALL, implementation="xla")
    assert_close(stats.entropy[:, 0], [np.log(8), np.log(8), 0])
    assert stats.max[2, 0] == -np.inf


# --- split-KV decoding of dense calls


@pytest.fixture
def splits(request, monkeypatch):
    """So many splits of each row, where tiles suffice; caches of traces and plans do not know of it."""
    jax.clear_caches()
    monkeypatch.setattr(planner, "even_splits", lambda rows: request.param)
    monkeypatch.setattr(planner, "num_splits", lambda heads: 3 * request.param)
    yield request.param
    jax.clear_caches()


@pytest.mark.full
@pytest.mark.parametrize(
    ("splits", "layout", "by_lengths"), [(1, "BTNH", True), (4, "BNTH", False), (16, "BTNH", True)],
    indirect=["splits"],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["triton-interpret", GPU])
def test_splits_of_decoding(splits, layout, by_lengths, backend):
    """Against float64, with dropout, sinks, grouped heads, a row that sees nothing, and lengths, one of which is 0."""
    rng = np.random.default_rng(splits)
    q, k, v = (rng.normal(size=(3, n, h, 16)).astype(np.float32) for n, h in ((2, 4), (600, 2), (600, 2)))
    sinks, lengths = np.array([0.3, -2.0, 5.0, -np.inf]), [600, 0, 77] if by_lengths else [600] * 3
    mask = lambda b, h, q_idx, kv_idx: ((kv_idx < 560 + q_idx) | (b == 0)) & ((q_idx != 1) | (b != 2))
    turn = (lambda x: x) if layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    config = jflex.Config(interpret="interpret" in backend, decode=jflex.Tiles(16, 16))
    attend = lambda q, k, v, lengths: jflex.flex_attention(
        turn(q), turn(k), turn(v), mask_mod=mask, kv_lengths=lengths if by_lengths else None, layout=layout,
        sinks=jnp.asarray(sinks, jnp.float32), return_stats=ALL, implementation="triton", config=config,
        dropout_rate=0.3, dropout_key=jax.random.key(dropout_bits.KEY[1]),
    )  # fmt: skip
    out, stats = jax.jit(attend)(q, k, v, jnp.array(lengths, jnp.int32))
    inside = np.arange(600) < np.array(lengths)[:, None, None, None]
    arrays, seen = (x.astype(np.float64) for x in (q, k, v)), lambda *at: mask(*at[:4]) & inside
    factors = functools.partial(dropout_bits.factors, 0.3, dropout_bits.KEY)
    exact = oracle.forward(*arrays, 0.25, None, seen, {}, sinks, factors)
    assert_close(turn(out), exact.out)
    assert_close(stats.lse, exact.lse)
    assert_close(stats.max, oracle.row_max(exact, None, {}))
    assert_close(stats.entropy, oracle.entropy(exact, sinks))


@pytest.mark.full
@pytest.mark.parametrize("splits", [4], indirect=True)
def test_large_scores_of_splits(splits):
    """The lse, near 80000, is rounded to 2 ** -7: the entropy is not a difference from it."""
    del splits
    q, k = jnp.full((1, 1, 1, 16), 40.0), jnp.full((1, 256, 1, 16), 500.0)
    config = jflex.Config(interpret=True, decode=jflex.Tiles(16, 16))
    _, stats = jflex.flex_attention(q, k, k, return_stats=("entropy", "max"), implementation="triton", config=config)
    assert_close(stats.entropy, np.full((1, 1, 1), np.log(256)), rtol=0, atol=1e-3)
    assert_close(stats.max, np.full((1, 1, 1), 80000.0))


# --- layers


@pytest.mark.full
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_layers_return_statistics(flavour):
    """Of uniform and of other rows, with leading axes, under jit; and a gradient through the entropy."""
    layer = FLAVOURS[flavour].make(32, num_kv_heads=2, mask_mod=causal, use_sinks=True, implementation="xla")
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 7, 32)), jnp.float32)
    with_all = jax.jit(lambda x: layer(x, return_stats=ALL))
    outputs, stats = with_all(inputs)
    assert_close(outputs, jax.jit(lambda x: layer(x))(inputs))
    assert {x.shape for x in stats} == {(2, 3, 4, 7)}
    alone = jax.jit(lambda x: layer(x, return_stats=("entropy",)))(inputs[1, 2])[1]
    assert alone.lse is None
    assert_close(alone.entropy, stats.entropy[1, 2])
    _, zero = with_all(jnp.zeros_like(inputs))  # of equal scores, and a sink of 0
    assert_close(zero.entropy, np.broadcast_to(np.log(np.arange(2, 9)), (2, 3, 4, 7)))
    assert_close(zero.max, np.zeros((2, 3, 4, 7)))
    gradient = jax.jit(jax.grad(lambda x: layer(x, return_stats=("entropy",))[1].entropy.sum()))(inputs)
    assert np.abs(gradient).max() > 1e-3
