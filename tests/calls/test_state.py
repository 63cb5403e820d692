"""Merging attention states: against attention over all keys in float64, as algebra, at the edges, in gradients."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jflex
from jflex import AttentionState, merge, merge_all
from tests.cases import mask_pairs, score_pairs
from tests.support import oracle
from tests.support.rows import in_turns, tiers

B, T, S, HQ, HKV, D, DV = 2, 20, 24, 4, 2, 8, 12
F32 = jnp.float32
INF = np.inf
CAPTURED = {"slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)}
DOCUMENTS = {"document": np.sort(np.random.default_rng(1).integers(0, 4, (B, S)), axis=1).astype(np.int32)}
CUTS = {"two": (12,), "many, some of them empty": (0, 1, 5, 5, 19, 24)}
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)

alibi = score_pairs.ScorePair(
    lambda c: lambda s, b, h, q, k: s - c["slopes"][h] * (q - k).astype(F32),
    oracle.Score(
        lambda s, b, h, q, k, c: s - c["slopes"][h] * (q - k),
        d_captures=lambda s, b, h, q, k, c: {"slopes": [(k - q + 0.0 * s, (h,))]},
    ),
)
late = mask_pairs.same(lambda b, h, q, k, c: (q >= 5) & (q % 7 > 0) & (q >= k))  # some queries see nothing
VARIANTS = {
    "causal": (None, mask_pairs.causal),
    "alibi": (alibi, mask_pairs.causal),
    "softcap": (score_pairs.softcap, None),
    "documents": (None, mask_pairs.documents),
    "rows that see nothing": (alibi, late),
}


def draw(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return normal(B, T, HQ, D), normal(B, S, HKV, D), normal(B, S, HKV, DV)


def split_attention(variant, cuts, query, key, value, slopes):
    """Merges attention over consecutive parts of the keys, at absolute positions."""
    score, mask = VARIANTS[variant]
    states = []
    for first, last in zip((0, *cuts), (*cuts, S), strict=True):
        score_mod = mask_mod = None
        if score is not None:
            whole = score.jax({"slopes": slopes})
            score_mod = lambda s, b, h, q, k, mod=whole, first=first: mod(s, b, h, q, k + first)
        if mask is not None:
            shown = mask.jax(jax.tree.map(jnp.asarray, DOCUMENTS))
            mask_mod = lambda b, h, q, k, mod=shown, first=first: mod(b, h, q, k + first)
        k, v = key[:, first:last], value[:, first:last]
        part = jflex.flex_attention(
            query, k, v, score_mod, mask_mod=mask_mod, return_lse=True, implementation="reference"
        )
        states.append(AttentionState.from_attention(*part))
    return merge_all(states).to_attention()


def exact_attention(variant, query, key, value):
    score, mask = VARIANTS[variant]
    arrays = [x.astype(np.float64) for x in (query, key, value)]
    exact = (None if score is None else score.exact, None if mask is None else mask.exact)
    captures = {"slopes": CAPTURED["slopes"].astype(np.float64), **DOCUMENTS}
    return arrays, exact[0], captures, oracle.forward(*arrays, D**-0.5, *exact, captures)


@tiers(rest="full", in_turns=True, share=2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_parts_of_the_keys_merge_to_all_of_them(variant, cuts):
    drawn, rng = draw(), np.random.default_rng(2)
    arrays, score, captures, exact = exact_attention(variant, *drawn)
    d_out, d_lse = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, HQ, DV), (B, HQ, T)))
    cotangents = tuple(x.astype(np.float64) for x in (d_out, d_lse))
    expected = oracle.gradients(*arrays, D**-0.5, score, exact, captures, *cotangents)

    @jax.jit
    def forward_and_backward(*args):
        found, pullback = jax.vjp(functools.partial(split_attention, variant, cuts), *args)
        return found, pullback((d_out, d_lse))

    (out, lse), gradients = forward_and_backward(*drawn, CAPTURED["slopes"])
    assert_close(out, exact.out)
    assert_close(lse, exact.lse)
    assert np.isneginf(exact.lse).any() == (variant == "rows that see nothing")
    for found, wanted in zip(gradients, (expected.query, expected.key, expected.value), strict=False):
        assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if VARIANTS[variant][0] is alibi:
        assert_close(gradients[3], expected.captures["slopes"], rtol=1e-4, atol=1e-3)


def test_the_worked_example_of_flashinfer():
    """Four pages of one key; natural logarithms by hand: each of the scores is q . k with q = (1, 1)."""
    keys = np.array([[1, 0], [0, 1], [1, 1], [1, -1], [0, -1]], np.float32)
    values = np.array([[1, 1], [2, 0], [0, 1], [1, 0], [0, 1]], np.float32)
    pages = [AttentionState(value[None], key.sum()[None]) for key, value in zip(keys, values, strict=True)]
    rows = {
        (0,): ((1, 1), 1.0),
        (0, 1): ((1.5, 0.5), 1.693147),
        (0, 1, 2): ((0.635825, 0.788058), 2.551445),
        (0, 1, 3): ((1.422319, 0.422319), 1.861995),
        (0, 1, 3, 4): ((1.345422, 0.453551), 1.917576),
    }
    for seen, (out, lse) in rows.items():
        merged = merge_all([pages[page] for page in seen])
        np.testing.assert_allclose(merged.out[0], out, atol=1e-6)
        np.testing.assert_allclose(merged.lse[0], lse, atol=1e-6)


# --- algebra

ROWS, SIZE = 5, 3
finite = st.floats(-60, 60, width=32, allow_subnormal=False)  # XLA may round numbers below the normal ones to 0
an_lse = st.one_of(finite, st.sampled_from([-INF, -INF, 0.0]))
any_lse = st.one_of(an_lse, st.sampled_from([1e30, -1e30]))  # too large to be told from itself + log(2)


@st.composite
def states(draw, an_lse=an_lse):
    lse = np.array(draw(st.lists(an_lse, min_size=ROWS, max_size=ROWS)), np.float32)
    out = np.array(draw(st.lists(finite, min_size=ROWS * SIZE, max_size=ROWS * SIZE)), np.float32).reshape(ROWS, SIZE)
    return AttentionState(jnp.asarray(np.where(np.isneginf(lse)[:, None], 0, out)), jnp.asarray(lse))


together = jax.jit(merge)
several = jax.jit(lambda *given: merge_all(given))


def exact_merge(*given):
    """By the definition, in float64."""
    out, lse = (np.stack([np.asarray(getattr(x, name), np.float64) for x in given]) for name in ("out", "lse"))
    top = lse.max(axis=0)
    weights = np.exp(lse - np.where(np.isneginf(top), 0, top))
    total = weights.sum(axis=0)
    empty = total == 0
    merged = (weights[..., None] * out).sum(axis=0) / np.where(empty, 1, total)[..., None]
    return merged, np.where(empty, -INF, top + np.log(np.where(empty, 1, total)))


def states_close(found, expected):
    # A mean of numbers up to 60 loses some units in the last place of 60; and so do the exponentials of its weights.
    assert_close(found.out, expected[0], rtol=1e-5, atol=2e-4)
    assert_close(found.lse, expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.full
@settings(max_examples=40)
@given(states(any_lse), states(any_lse))
def test_merging_is_exact_and_commutative(a, b):
    states_close(together(a, b), exact_merge(a, b))
    states_close(together(b, a), exact_merge(a, b))


@settings(max_examples=40)
@given(states(), states(), states())
def test_merging_is_associative(a, b, c):
    expected = exact_merge(a, b, c)
    states_close(together(together(a, b), c), expected)
    states_close(together(a, together(b, c)), expected)
    states_close(several(c, a, b), expected)


@pytest.mark.full
@settings(max_examples=40)
@given(states(any_lse))
def test_the_empty_state_is_neutral(a):
    for merged in (together(a, AttentionState.empty(a.out.shape)), together(AttentionState.empty(a.out.shape), a)):
        np.testing.assert_array_equal(merged.out, a.out)
        np.testing.assert_array_equal(merged.lse, a.lse)


# --- edges


def state(out, lse, dtype=F32):
    return AttentionState(jnp.asarray(out, dtype), jnp.asarray(lse, F32))


@pytest.mark.full
def test_what_an_empty_state_holds_never_comes_out():
    full, poisoned = state([[1.0, 2.0]], [3.0]), state([[np.nan, INF]], [-INF])
    for merged in (merge(full, poisoned), merge(poisoned, full), merge_all([poisoned, full, poisoned])):
        assert merged.out.tolist() == [[1, 2]]
        assert merged.lse.tolist() == [3]
    both = merge(poisoned, poisoned)
    assert both.out.tolist() == [[0, 0]]
    assert both.lse.tolist() == [-INF]


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("lses", [(-INF, -INF), (0.0, -INF), (-INF, 0.0), (0.0, -1e30), (1e30, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("hidden", [0.0, np.nan])
def test_gradients_are_finite_at_every_edge(lses, hidden):
    outs = [[[hidden if lse == -INF else x, x]] for x, lse in zip((1.0, 3.0), lses, strict=True)]
    a, b = (state(out, [lse]) for out, lse in zip(outs, lses, strict=True))
    cotangents = state([[0.7, -0.3]], [0.2])
    _, pullback = jax.vjp(merge, a, b)
    found = pullback(cotangents)
    weights = np.exp(np.array(lses) - max(0, *lses))
    weights = weights / max(weights.sum(), 1e-9)
    merged_out = weights @ np.array([np.nan_to_num(out[0]) for out in outs])
    for gradient, out, weight in zip(found, outs, weights, strict=True):
        d_out = np.array([0.7, -0.3])
        assert_close(gradient.out[0], weight * d_out)
        assert_close(gradient.lse[0], weight * (d_out @ (np.nan_to_num(out[0]) - merged_out) + 0.2))


@pytest.mark.full
@pytest.mark.parametrize("lse", [INF, np.nan])
def test_an_infinite_or_undefined_score_is_not_passed_over(lse):
    merged = merge(state([[1.0]], [lse]), state([[2.0]], [0.0]))
    assert np.isnan(merged.out).all()
    assert np.isnan(merged.lse).all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_are_float32_and_out_is_rounded_once(dtype):
    rng = np.random.default_rng(4)
    given = [state(rng.normal(size=(40, 8)), 3 * rng.normal(size=40), dtype) for _ in range(9)]
    merged, (out, lse) = merge_all(given), exact_merge(*given)
    assert merged.out.dtype == dtype
    assert merged.lse.dtype == F32
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert np.all(np.abs(np.asarray(merged.out, np.float64) - out) <= eps / 2 * np.abs(out) + 2e-6)
    assert_close(merged.lse, lse, rtol=1e-6)


@pytest.mark.full
def test_float64_stays_float64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        given = [AttentionState(rng.normal(size=(4, 8)), rng.normal(size=4)) for _ in range(3)]
        merged, (out, lse) = merge_all(given), exact_merge(*given)
        assert merged.out.dtype == merged.lse.dtype == jnp.float64
        assert_close(merged.out, out, rtol=1e-14, atol=1e-14)
        assert_close(merged.lse, lse, rtol=1e-14, atol=1e-14)
        assert AttentionState.empty((4, 8), jnp.float64).lse.dtype == jnp.float64


@pytest.mark.full
def test_no_rows_and_no_states():
    assert merge(AttentionState.empty((0, 2, 8)), AttentionState.empty((0, 2, 8))).out.shape == (0, 2, 8)
    none = merge_all(AttentionState.empty((0, 3, 8)))
    assert none.out.tolist() == np.zeros((3, 8)).tolist()
    assert none.lse.tolist() == [-INF] * 3


# --- layouts, and states of other libraries


@pytest.mark.full
def test_layouts_go_there_and_back():
    rng = np.random.default_rng(7)
    out, lse = rng.normal(size=(2, 5, 3, 8)).astype(np.float32), rng.normal(size=(2, 3, 5)).astype(np.float32)
    one = AttentionState.from_attention(out, lse)
    other = AttentionState.from_attention(out.swapaxes(1, 2), lse, "BNTH")
    for found in (one, other):
        np.testing.assert_array_equal(found.out, out)
        np.testing.assert_array_equal(found.lse, lse.swapaxes(1, 2))
    for layout, expected in (("BTNH", out), ("BNTH", out.swapaxes(1, 2))):
        back = one.to_attention(layout)
        np.testing.assert_array_equal(back[0], expected)
        np.testing.assert_array_equal(back[1], lse)


@pytest.mark.full
def test_logarithms_of_other_libraries():
    lse = jnp.array([-INF, -3.0, 0.0, 1.5, 1e30])
    np.testing.assert_allclose(jflex.lse_to_base2(lse), np.asarray(lse, np.float64) / np.log(2), rtol=1e-6)
    np.testing.assert_allclose(jflex.lse_from_base2(jflex.lse_to_base2(lse)), lse, rtol=1e-6)
    assert jflex.lse_from_flash(jnp.array([INF, -INF, 2.0])).tolist() == [-INF, -INF, 2]
    assert jax.grad(lambda x: jflex.lse_from_flash(x).sum())(jnp.array([INF, 1.0])).tolist() == [0, 1]
    for convert in (jflex.lse_to_base2, jflex.lse_from_base2, jflex.lse_from_flash):
        assert convert(lse).dtype == F32


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 20])
def test_states_without_a_softmax_add_up(count):
    outs = np.random.default_rng(0).normal(size=(count, 4, 2, 8)).astype(np.float32)
    states = [AttentionState(jnp.asarray(out), jnp.zeros((4, 2)), "none") for out in outs]
    nothing = AttentionState.empty((4, 2, 8), normalize="none")
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    for merged in (merge_all([*states, nothing]), jax.jit(merge_all)(stacked), merge(merge_all(states), nothing)):
        np.testing.assert_allclose(merged.out, outs.sum(0), rtol=1e-5, atol=1e-5)
        assert (merged.normalize, merged.lse.tolist()) == ("none", nothing.lse.tolist())
