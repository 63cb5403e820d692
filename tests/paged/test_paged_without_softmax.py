"""`normalize="none"` over levels, which add up, with modified outputs, and wrong calls; `paged_cases` has pages."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import CascadeLevel, paged

INTERPRET = jflex.Config(interpret=True)
WEIGH = jflex.scores.sigmoid(-1.0)
N, S, Hq, Hkv, D = 6, 70, 4, 2, 16


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def drawn():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (N, Hq, D), (1, S, Hkv, D), (1, S, Hkv, D)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@jax.jit
def dense(q, key, value):
    """The definition: rows are the last positions."""
    weighed = jflex.flex_attention(
        q[None], key, value, lambda s, b, h, q, k: WEIGH(s, b, h, q + S - N, k),
        mask_mod=lambda b, h, q, k: q + S - N >= k, normalize="none", implementation="reference",
    )  # fmt: skip
    return weighed[0]


def level(key, value, start, end):
    return CascadeLevel.dense(key[:, start:end], value[:, start:end], qo_indptr=jnp.array([0, N]), start=start)


@pytest.mark.full
@pytest.mark.parametrize(
    ("implementation", "ends"), [("reference", (0, S)), ("xla", (0, 33, 33, S)), ("triton", (0, 10, 64, S))]
)
def test_levels_add_up(implementation, ends):
    q, key, value = drawn()
    levels = [level(key, value, *pair) for pair in itertools.pairwise(ends)]
    attend = jax.jit(lambda q, levels: jflex.cascade_attention(
        q, levels, positions=jnp.arange(S - N, S, dtype=jnp.int32), score_mod=WEIGH, mask_mod=causal,
        normalize="none", implementation=implementation, config=INTERPRET,
    ))  # fmt: skip
    np.testing.assert_allclose(attend(q, levels), dense(q, key, value), rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_no_levels_give_zeros():
    assert not jflex.cascade_attention(drawn()[0], [], normalize="none").any()


def of_pages(**options):
    q, key, value = drawn()
    cache = paged.PagedCache.create(8, 16, Hkv, D, dtype=jnp.float32)
    table = jnp.array([[3, 5, 1, 7, 2]])
    slots = paged.slots_of(table[0], jnp.arange(S, dtype=jnp.int32), 16)
    cache = paged.write(cache, key[0], value[0], slots)
    batch = paged.PagedBatch(jnp.array([0, N]), jnp.array([S]), table)
    return jflex.paged_attention(q, cache, batch, score_mod=WEIGH, mask_mod=causal, **options)


@pytest.mark.full
def test_an_output_mod_gets_no_lse():
    def halved(out, lse, b, h, q_idx):
        assert lse is None
        return out * 0.5

    options = {"normalize": "none", "implementation": "xla"}
    plain, modified = (
        jax.jit(lambda more=more: of_pages(**options, **more))() for more in ({}, {"output_mod": halved})
    )
    np.testing.assert_allclose(modified, 0.5 * plain, rtol=1e-6)
    np.testing.assert_allclose(plain, dense(*drawn()), rtol=2e-5, atol=2e-5)


cascade = functools.partial(jflex.cascade_attention, drawn()[0], [])


@pytest.mark.parametrize("call", [of_pages, cascade])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "sum"}, r"`normalize` must be 'softmax' or 'none'. Got 'sum'"),
        ({"normalize": "none", "return_lse": True}, r"`return_lse` must be False with `normalize='none'`"),
        ({"normalize": "none", "sinks": jnp.zeros(Hq)}, r"`sinks` enter the denominator of a softmax"),
        (
            {"normalize": "none", "output_mod": lambda out, lse, b, h, q_idx: out * lse},
            r"(`output_mod` uses the lse|`positions` must be passed)",
        ),
    ],
)
def test_wrong_calls(call, options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)
