"""`with_offset`: mods for queries that continue a sequence, against the rows of attention over all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import with_offset
from jflex.mods.compose import AndMasks, NotMask, OrMasks
from jflex.mods.reindex import ReindexedMod
from jflex.mods.trace import trace_mask_mod, trace_score_mod
from tests.cases.features import BACKENDS
from tests.support import oracle
from tests.support.dense_masks import causal
from tests.support.rows import tiers

B, LENGTH, T, HQ, HKV, D = 2, 48, 4, 4, 2, 16
F32 = jnp.float32
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (B, LENGTH)), axis=1).astype(np.int32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


def alibi(slopes):
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).astype(F32)


def packed(ids):
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


def draw():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(B, LENGTH, heads, D)).astype(np.float32) for heads in (HQ, HKV, HKV))


@functools.cache
def exact():
    """Attention over the whole sequence, in float64."""
    score = oracle.Score(lambda s, b, h, q, k, c: s - c["slopes"][h] * (q - k))
    mask = lambda b, h, q, k, c: (c["document"][b, q] == c["document"][b, k]) & (q >= k)
    captures = {"slopes": SLOPES.astype(np.float64), "document": DOCUMENTS}
    found = oracle.forward(*(x.astype(np.float64) for x in draw()), D**-0.5, score, mask, captures)
    return found.out, found.lse


def continued(offset, options, query, key, value, with_block_mask):
    """Attention of the queries that stand at `offset`, with the mods of training."""
    mask_mod = with_offset(packed(jnp.asarray(DOCUMENTS)), offset)
    masked = {"mask_mod": mask_mod}
    if with_block_mask:
        masked = {"block_mask": jflex.create_block_mask(mask_mod, B, None, query.shape[1], LENGTH, block_size=16)}
    score_mod = with_offset(alibi(jnp.asarray(SLOPES)), offset)
    return jflex.flex_attention(query, key, value, score_mod, return_lse=True, **masked, **options)


@tiers(full={"backend": "xla"}, in_turns=True, rest="full")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_block_mask", [False, True])
def test_new_queries_get_the_rows_of_the_whole_sequence(backend, with_block_mask):
    """With an offset for each batch entry, or with one for all."""
    query, key, value = draw()
    call = jax.jit(functools.partial(continued, options=BACKENDS[backend], with_block_mask=with_block_mask))
    for starts in (np.int32([5, 31]), np.int32([44, 0]), np.int32(17)):
        rows = np.broadcast_to(starts, B)[:, None] + np.arange(T)
        new = np.take_along_axis(query, rows[..., None, None], axis=1)
        out, lse = call(starts, query=new, key=key, value=value)
        assert_close(out, np.take_along_axis(exact()[0], rows[..., None, None], axis=1))
        assert_close(lse, np.take_along_axis(exact()[1], rows[:, None], axis=2))


@pytest.mark.full
def test_captured_arrays_keep_their_gradients():
    query, key, value = draw()
    new, offset = query[:, 20:24], np.array([20, 20])

    def loss(slopes, mod):
        out = jflex.flex_attention(new, key, value, mod(slopes), implementation="xla")
        return jnp.sum(jnp.sin(out))

    by_hand = lambda slopes: lambda s, b, h, q, k: alibi(slopes)(s, b, h, q + 20, k)
    found = jax.grad(loss)(SLOPES, lambda slopes: with_offset(alibi(slopes), offset))
    assert_close(found, jax.grad(loss)(SLOPES, by_hand))
    assert np.abs(found).min() > 1e-3


@pytest.mark.parametrize("make", [lambda n: n, np.int64, np.array, lambda n: np.array([n, n]), jnp.uint8])
def test_offsets_are_operands_and_int32(make):
    traced, operands = trace_mask_mod(with_offset(causal, make(3)))
    again, others = trace_mask_mod(with_offset(causal, make(7)))
    assert traced == again
    assert [(x.dtype, x.ravel()[0]) for x in (*operands, *others)] == [(jnp.int32, 3), (jnp.int32, 7)]


def test_composites_stay_composites_and_share_one_offset():
    window = lambda b, h, q, k: q - k < 4
    mod = with_offset(jflex.and_masks(causal, jflex.or_masks(window, jflex.not_mask(causal))), np.array([3, 5]))
    assert isinstance(mod, AndMasks)
    assert isinstance(mod.parts[0], ReindexedMod)
    assert mod.parts[0].mod is causal
    assert isinstance(mod.parts[1], OrMasks)
    assert isinstance(mod.parts[1].parts[1], NotMask)
    assert len(trace_mask_mod(mod)[1]) == 1
    expected = lambda b, h, q, k: (q + 3 + 2 * b >= k) & ((q + 3 + 2 * b - k < 4) | (q + 3 + 2 * b < k))
    dense = functools.partial(jflex.create_mask, B=2, H=None, Q_LEN=3, KV_LEN=12)
    np.testing.assert_array_equal(dense(mod), dense(expected))


def test_offsets_add_up_and_may_be_negative():
    mod = with_offset(with_offset(causal, 5), np.array([-2, -6]))
    shown = jflex.create_mask(mod, 2, None, 2, 6)[:, 0].astype(int)
    assert shown.tolist() == [[[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]], [[0] * 6, [1, 0, 0, 0, 0, 0]]]


def test_block_masks_by_traced_offsets():
    make = jax.jit(lambda at: jflex.create_block_mask(with_offset(causal, at), None, None, 16, 64, block_size=16))
    assert [make(jnp.int32(at)).to_dense()[0, 0].tolist() for at in (0, 17)] == [[[1, 0, 0, 0]], [[1, 1, 1, 0]]]


class Method:
    def mod(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx


ROLES = [
    ("lambda", lambda s, b, h, q, k: s, trace_score_mod),
    ("a default that is no argument of a mod", lambda b, h, q, k, window=4: q - k < window, trace_mask_mod),
    ("a default of a score mod", lambda s, b, h, q, k, scale=2.0: s * scale, trace_score_mod),
    ("keywords", lambda b, h, q, k, *, window=4: q - k < window, trace_mask_mod),
    ("partial", functools.partial(lambda window, b, h, q, k: q - k < window, 4), trace_mask_mod),
    ("method", Method().mod, trace_mask_mod),
    ("traced", jflex.create_block_mask(causal, None, None, 8, 8).mask_mod, trace_mask_mod),
    ("ready", jflex.scores.softcap(5.0), trace_score_mod),
    ("jitted", jax.jit(causal), trace_mask_mod),
]


@pytest.mark.parametrize(("mod", "trace"), [row[1:] for row in ROLES], ids=[row[0] for row in ROLES])
def test_the_arguments_tell_the_role(mod, trace):
    made = with_offset(mod, 2)
    assert type(made) is ReindexedMod
    assert trace(made)[0].operands in ((((), "int32"),), ())
