"""`attention_weights`: against the oracle and `reference`, transformed, and in little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import weights as module
from jflex.masks import causal, document
from tests.cases.table import CASES, LENGTHS, Case, in_tiers
from tests.support import evaluation, tolerance
from tests.support.rows import tiers

SOFTMAX = [case for case in [*CASES, *LENGTHS] if not case.dropout_rate and case.normalize == "softmax"]
BY_NAME = {case.name: case for case in SOFTMAX}
# A mod of each family, each form of a mask, grouped and shared keys, both layouts; NaN beyond the lengths.
DIFFERENTIATED = [
    BY_NAME[name]
    for name in (
        "grouped", "bias_hqk_by_head", "table_by_document", "log_where_seen_mask_mod", "own_lists_mixed", "squared",
        "bnth_shared_keys", "length_many_blocks", "length_many_shared_keys", "length_sees_nothing", "relative_causal",
        "slopes",
    )
]  # fmt: skip


# Of float32, with each form of a mask, layout and sizes; mods are evaluated by JAX.
AGAINST_THE_ORACLE = [
    "identity_highest", "softcap", "extreme_logits", "bias_bhqk", "slopes", "gate", "causal", "causal_more_keys",
    "rows_that_see_nothing_mask_mod", "window_by_head_grouped", "narrow_documents", "narrow_cut", "blocks_of_24",
    "decode", "decode_lists_by_head", "one_query_one_key", "head_size_300", "one_key_head", "bnth_shared_keys", "sinks",
    "sinks_see_nothing", "sinks_decode_bnth", "sorting", "length_many_sinks", "length_sees_nothing",
    "length_many_mask_mod",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of keys in each call, the last one cut short."""
    monkeypatch.setattr(module, "_ELEMENTS_PER_STEP", 1)
    monkeypatch.setattr(module, "_LEAST_KEYS", 48)


def weights_of(case: Case, query, key, score_captures, rows):
    """Calls `attention_weights` with arrays BTNH."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    blocks = evaluation.block_mask(case)
    mask_captures = jax.tree.map(jnp.asarray, evaluation.draw(case).mask)
    return jflex.attention_weights(
        turn(query),
        turn(key),
        None if case.score is None else case.score.jax(score_captures),
        blocks,
        mask_mod=None if case.mask is None or blocks is not None else case.mask.jax(mask_captures),
        kv_lengths=None if case.kv_lengths is None else jnp.asarray(case.kv_lengths, jnp.int32),
        sinks=score_captures.get("sinks"),
        scale=case.scale,
        layout=case.layout,
        rows=rows,
    )


def sums(case: Case, weights, value):
    """The sums over the keys of weights times values, [B, R, Hq, Dv]."""
    n, of = case.sizes, np if isinstance(weights, np.ndarray) else jnp
    value = of.repeat(of.broadcast_to(value, (n.B, *value.shape[1:])), n.Hq // n.Hkv, axis=2)
    return of.einsum("bhts,bshd->bthd", weights, value.astype(weights.dtype))


@pytest.mark.parametrize("case", in_tiers((BY_NAME[name] for name in AGAINST_THE_ORACLE), share=2))
def test_rows_against_the_oracle(case: Case):
    x, T = jax.tree.map(jnp.asarray, evaluation.poisoned(case)), case.sizes.T
    rows = np.array([T - 1, 0, T // 2, T // 2, T // 3])  # neither sorted nor different
    found = np.asarray(weights_of(case, x.query, x.key, x.score, rows))
    assert found.dtype == np.float32
    oracle = evaluation.exact(case).found
    moved = tolerance.score_rounding(evaluation.draw(case), oracle, case)[..., rows, None]
    right, plain = oracle.weights[:, :, rows], evaluation.plain_weights(case)[:, :, rows]
    rounding = (float(np.finfo(np.float32).eps) + 2 * np.where(np.isfinite(moved), moved, 0)) * right
    tolerance.check("weights", found, plain, right, rounding)
    assert (found[~oracle.visible[:, :, rows]] == 0).all()
    value = evaluation.draw(case).value.astype(np.float64)
    out = lambda weights: sums(case, weights.astype(np.float64), value).astype(np.float32)
    around = sums(case, rounding, np.abs(value))
    tolerance.check("out", out(found), out(plain), oracle.out[:, rows].astype(np.float64), around)


@tiers(rest="full", share=3)
@pytest.mark.parametrize("case", DIFFERENTIATED, ids=str)
def test_outputs_and_gradients_as_of_reference(case: Case):
    x = jax.tree.map(jnp.asarray, evaluation.poisoned(case))
    floats = {name: x.score[name] for name in x.floats()}
    value = jnp.nan_to_num(x.value)  # a weight of 0 times NaN is NaN: this product is no masked one
    mask_captures = jax.tree.map(jnp.asarray, evaluation.draw(case).mask)

    def by_weights(query, key, floats):
        return sums(case, weights_of(case, query, key, {**x.score, **floats}, None), value).astype(query.dtype)

    def by_reference(query, key, floats):
        captures, blocks = ({**x.score, **floats}, mask_captures), evaluation.block_mask(case)
        return evaluation.call(case, "reference", query, key, value, *captures, blocks)[0]

    def run(attend):
        out, pull = jax.vjp(attend, x.query, x.key, floats)
        return out, pull(x.d_out)

    found, right = (jax.jit(functools.partial(run, attend))() for attend in (by_weights, by_reference))
    eps = float(jnp.finfo(case.dtype).eps)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        a, b = (np.asarray(y, np.float64) for y in (a, b))
        largest = np.abs(b).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=max(4 * eps, 1e-5), atol=max(eps, 1e-5) * largest + 1e-30)


def arrays(B=2, T=20, S=100, Hq=4, Hkv=2, D=8):
    query, key = jax.random.split(jax.random.key(0))
    return jax.random.normal(query, (B, T, Hq, D)), jax.random.normal(key, (B, S, Hkv, D))


@pytest.mark.full
@pytest.mark.parametrize("block", [None, 16])
def test_masked_nan_reaches_nothing(block):
    """Of keys, of queries that are not chosen, and of the mod; gradients too."""
    query, key = arrays(T=100)
    ids = jnp.arange(100) // 25
    masked = (ids == 2)[None, :, None, None]
    mask = jflex.and_masks(document(ids), lambda b, h, q, k: q > k)
    bias = jnp.where(ids == 2, jnp.nan, 1.0)
    rows = jnp.array([99, 0, 30])  # row 0 attends to nothing
    options = {"mask_mod": mask}
    if block is not None:
        options = {"block_mask": jflex.create_block_mask(mask, None, None, 100, 100, block_size=block)}

    def total(query, key, bias, weight):
        mod = lambda s, b, h, q, k: s * weight + bias[k] + jnp.log((q - k).astype(jnp.float32))
        weights = jflex.attention_weights(query, key, mod, **options, rows=rows)
        return (weights @ jnp.arange(100.0)).sum(), weights

    pull = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
    clean, right = pull(query, key, jnp.nan_to_num(bias), jnp.float32(2))
    poisoned = (jnp.where(masked, jnp.nan, x) for x in (query, key))
    found, weights = pull(*poisoned, bias, jnp.float32(2))
    np.testing.assert_array_equal(weights, right)
    assert (np.asarray(weights)[:, :, 1] == 0).all()
    for a, b in zip(found, clean, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert np.abs(b).max() > 0


@pytest.mark.full
def test_a_visible_nan_reaches_its_row_alone():
    query, key = arrays(T=100)
    weights = jflex.attention_weights(query, key.at[:, 40].set(jnp.nan), mask_mod=causal(), rows=[39, 40])
    assert np.isfinite(weights[:, :, 0]).all()
    assert np.isnan(weights[:, :, 1, :41]).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        ([3, -1], [3, 19]),
        ((0,), [0]),
        (range(0, 20, 7), [0, 7, 14]),
        (np.array([5, 2]), [5, 2]),
        (np.array([255 - 250], np.uint8), [5]),
        (jnp.array([-20, 19], jnp.int8), [0, 19]),
        ([np.int64(4)], [4]),
        ([], []),
        (None, range(20)),
    ],
    ids=str,
)
def test_forms_of_rows(rows, numbers):
    attend = functools.partial(jflex.attention_weights, *arrays(), mask_mod=causal())
    everything = attend(rows=jnp.arange(20))
    assert attend(rows=rows).shape == (2, 4, len(numbers), 100)
    np.testing.assert_allclose(attend(rows=rows), everything[:, :, np.array(numbers, int)], rtol=1e-6)


@pytest.mark.full
def test_nothing_to_attend():
    query, key = arrays()
    for rows, q, k in ((None, query[:, :0], key), ([1], query, key[:, :0]), ([], query[:, :0], key)):
        weights = jflex.attention_weights(q, k, rows=rows)
        assert weights.shape == (2, 4, 0 if rows is None else len(rows), k.shape[1])
        assert not weights.any()


@pytest.mark.full
def test_traced_rows_and_captures_compile_once():
    query, key = arrays()
    compiled = []

    @jax.jit
    def attend(rows, slope):
        compiled.append(1)
        return jflex.attention_weights(query, key, lambda s, b, h, q, k: s * slope[h], mask_mod=causal(), rows=rows)

    slopes = jnp.arange(4.0)
    everything = attend(jnp.arange(20), slopes)
    for rows, numbers in (([3, 5], [3, 5]), ([-1, 40], [19, 19]), ([-21, -2], [0, 18])):  # out of range is clamped
        found = attend(jnp.array(rows), slopes)
        np.testing.assert_allclose(found, everything[:, :, np.array(numbers)], rtol=1e-6)
    assert len(compiled) == 2  # once for each length of rows
    before = module._weights._cache_size()
    for number in (2, 3):
        mod = functools.partial(lambda factor, s, b, h, q, k: s * factor, jnp.float32(number))
        jflex.attention_weights(query, key, mod, rows=jnp.array([number]))
    assert module._weights._cache_size() == before + 1


@pytest.mark.full
def test_second_derivatives_as_of_reference():
    query, key = arrays(B=1, T=4, S=6, Hq=2, Hkv=1, D=2)
    options = {"score_mod": lambda s, b, h, q, k: jnp.tanh(s), "mask_mod": causal()}
    one_hot = jnp.eye(6)[None, :, None]  # the output is the weights
    by_weights = lambda query: jflex.attention_weights(query, key, **options)
    by_reference = lambda query: jflex.flex_attention(
        query, key, one_hot, **options, implementation="reference"
    ).swapaxes(1, 2)  # fmt: skip
    total = lambda f: lambda q: (f(q) ** 2 @ jnp.arange(6.0)).sum()
    found, right = (jax.jit(jax.hessian(total(f)))(query) for f in (by_weights, by_reference))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_memory_grows_with_rows_and_not_with_queries(monkeypatch):
    """Compiled, not run: 4 rows of 65536 queries and keys, forward and backward. All scores would take 64 GiB."""
    monkeypatch.undo()
    query, key = (jax.ShapeDtypeStruct((1, 1 << 16, heads, 16), jnp.float32) for heads in (4, 2))

    def total(query, key):
        mod = lambda s, b, h, q, k: jnp.tanh(s)
        return (jflex.attention_weights(query, key, mod, mask_mod=causal(), rows=jnp.arange(4)) ** 2).sum()

    memory = jax.jit(jax.grad(total, (0, 1))).lower(query, key).compile().memory_analysis()
    result, keys = 4 * 4 * 4 << 16, 4 * 2 * 16 << 16
    assert memory.temp_size_in_bytes < 16 * (result + keys)
