"""Sinks: in every form of a call they enter once, at the end; the table of cases has them in `flex_attention`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.cases import paged_cases
from tests.cases.features import BACKENDS
from tests.support import paged_evaluation
from tests.support.dense_masks import causal
from tests.support.rows import tiers

backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def sinks_of(heads):
    return jnp.linspace(-6.0, 3.0, heads)


def with_column(out, lse, sinks):
    """The definition in float64: one more exponential in the denominator. out [..., Hq, Dv], lse [..., Hq]."""
    total = np.logaddexp(np.asarray(lse, np.float64), np.asarray(sinks, np.float64))
    return np.asarray(out, np.float64) * np.exp(lse - total)[..., None], total


def drawn(T=40, S=40, Hq=4, Hkv=2, D=16):
    sizes = (T, Hq), (S, Hkv), (S, Hkv)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, *size, D)) for key, size in zip(keys, sizes, strict=True)]


@tiers(default={"name": "mixed_with_padding_and_empty_requests", "backend": "xla"}, in_turns=True)
@backends
@pytest.mark.parametrize("name", ["mixed_with_padding_and_empty_requests", "divided"])
def test_pages(name, backend):
    case = next(case for case in paged_cases.CASES if case.name == name)
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    call = jax.jit(functools.partial(jflex.paged_attention, return_lse=True, **BACKENDS[backend], **mods(case, x)))
    batch, sinks = paged_evaluation.batch_of(case, table), sinks_of(case.Hq)
    right = paged_evaluation.exact(case)
    for found, expected in zip(
        call(jnp.asarray(x.query), cache, batch, sinks=sinks), with_column(right.out, right.lse, sinks), strict=True
    ):
        assert_close(found, expected)


def mods(case, x):
    return {
        "score_mod": case.score and case.score.jax(jax.tree.map(jnp.asarray, x.score)),
        "mask_mod": case.mask and case.mask.jax(jax.tree.map(jnp.asarray, x.mask)),
    }


@pytest.mark.full
@backends
def test_cascade_adds_them_after_the_levels_are_merged(backend):
    query = jax.random.normal(jax.random.key(0), (3, 4, 16))
    keys = jax.random.normal(jax.random.key(1), (4, 32, 2, 16))
    levels = [
        jflex.CascadeLevel.dense(keys[:1], keys[:1] * 0.5, qo_indptr=jnp.array([0, 3])),
        jflex.CascadeLevel.dense(keys[1:], keys[1:] * 2, qo_indptr=jnp.arange(4), start=32),
    ]
    attend = functools.partial(jflex.cascade_attention, query, return_lse=True, **BACKENDS[backend])
    sinks = sinks_of(4)
    for used in (levels, levels[:1], []):
        for found, expected in zip(attend(used, sinks=sinks), with_column(*attend(used), sinks), strict=True):
            assert_close(found, expected)


@pytest.mark.full
def test_packed_sequences():
    q, k, v = (x[0] for x in drawn(60, 60))
    ends, sinks = jnp.array([0, 23, 23, 50], jnp.int32), sinks_of(4)
    how = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "mask_mod": causal, "return_lse": True}
    attend = jax.jit(lambda sinks: jflex.flex_attention_varlen(q, k, v, **how, sinks=sinks, implementation="xla"))
    out, lse = (x[:50] for x in attend(None))
    for found, expected in zip(attend(sinks), with_column(out, lse, sinks), strict=True):
        assert_close(found[:50], expected)
    assert not attend(sinks)[0][50:].any()


@pytest.mark.full
@backends
def test_minus_infinity_changes_nothing(backend):
    arrays = drawn()
    nothing = jnp.full(4, -jnp.inf)

    def loss(sinks):
        out, lse = jflex.flex_attention(
            *arrays, mask_mod=lambda b, h, q, k: q > k, sinks=sinks, return_lse=True, **BACKENDS[backend]
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

    d_sinks, (out, lse) = jax.grad(loss, has_aux=True)(nothing)
    _, (plain_out, plain_lse) = loss(None)
    np.testing.assert_array_equal(d_sinks, np.zeros(4))
    assert_close(out, plain_out)
    assert_close(lse, plain_lse)


@tiers(default={"implementation": None})
@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_without_keys_the_sink_is_all_there_is(implementation):
    query, key, value = drawn(T=3, S=0)
    call = functools.partial(jflex.flex_attention, return_lse=True, implementation=implementation)
    out, lse = call(query, key, value, sinks=sinks_of(4))
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks_of(4)[:, None], lse.shape))
    gradient = jax.grad(lambda s: jnp.sum(call(query, key, value, sinks=s)[1]))(sinks_of(4))
    np.testing.assert_array_equal(gradient, np.full(4, 6.0))


def test_explain_takes_their_shape():
    x, sinks = jax.ShapeDtypeStruct((1, 64, 4, 16), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    assert jflex.explain(x, x, x, sinks=sinks, implementation="xla").backend == "xla"
