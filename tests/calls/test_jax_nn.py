"""Rows of the guide's table "coming from jax.nn", and JAX's own tests of attention with its residual."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores
from tests.support.rows import tiers

B, T, S, HEADS, D = 2, 48, 64, 4, 16
LENGTHS = jnp.array([20, 48], jnp.int32)
BIAS = jax.random.normal(jax.random.key(3), (1, HEADS, T, S))
SHOWN = jax.random.bernoulli(jax.random.key(4), 0.7, (B, 1, T, S)).at[..., 0].set(True)
blocks = lambda mod: {"block_mask": jflex.create_block_mask(mod, None, None, T, S, block_size=16)}

ROWS = {
    "is_causal": ({"is_causal": True}, lambda: blocks(masks.causal())),
    "bias": ({"bias": BIAS}, lambda: {"score_mod": scores.bias(BIAS)}),
    "mask": ({"mask": SHOWN}, lambda: {"mask_mod": lambda b, h, q_idx, kv_idx: SHOWN[b, h, q_idx, kv_idx]}),
    "key_value_seq_lengths": ({"key_value_seq_lengths": LENGTHS}, lambda: {"kv_lengths": LENGTHS}),
    "query_seq_lengths": (
        {"query_seq_lengths": LENGTHS},
        lambda: {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx < LENGTHS[b]},
    ),
    "local_window_size": ({"local_window_size": (5, 3)}, lambda: blocks(masks.sliding_window(5, 3))),
}


@tiers(default={"row": ["bias", "local_window_size"]})
@pytest.mark.parametrize("row", ROWS)
def test_row(row: str):
    theirs, ours = ROWS[row]
    q, k, v = (
        jax.random.normal(jax.random.key(i), (B, n, heads, D))
        for i, (n, heads) in enumerate(((T, HEADS), (S, 2), (S, 2)))
    )
    expected = np.asarray(jax.nn.dot_product_attention(q, k, v, **theirs))
    found = np.array(jflex.flex_attention(q, k, v, **ours()))
    if row == "query_seq_lengths":  # of padding, jax.nn returns what its mask makes of it; here it is zeros
        padding = np.arange(T) >= np.asarray(LENGTHS)[:, None]
        assert not found[padding].any()
        expected = np.where(padding[..., None, None], 0, expected)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(jflex.dot_product_attention(q, k, v, **theirs), found, rtol=2e-5, atol=2e-5)


def test_return_residual():
    q = jax.random.normal(jax.random.key(0), (B, T, HEADS, D))
    _, expected = jax.nn.dot_product_attention(q, q, q, return_residual=True)
    _, found = jflex.flex_attention(q, q, q, return_lse=True)
    np.testing.assert_allclose(found.swapaxes(1, 2), expected, rtol=2e-5, atol=2e-5)


def draw(seed, *shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.full
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_output_residual_and_gradients_as_jax_tests_them(dtype, groups, mapped):
    """Output, residual and gradients, also with a cotangent of the residual, in the dtype of the arrays: no cast."""
    query, key, value = (draw(i, 2, 128, 4 // g, 32, dtype=dtype) for i, g in enumerate((1, groups, groups)))
    cotangents = draw(3, 2, 128, 4, 32, dtype=dtype), draw(4, 2, 128, 4, dtype=dtype)

    def everything(attend, query, key, value):
        attend = jax.vmap(attend, in_axes=(0, 0, 0, None, None)) if mapped else attend
        results, pull = jax.vjp(attend, query, key, value, None, None)
        return results, pull(cotangents)[:3]

    run = lambda attend: functools.partial(everything, functools.partial(attend, return_residual=True))
    found = jax.jit(run(jflex.dot_product_attention))(query, key, value)
    with jax.numpy_dtype_promotion("standard"):  # not under `jit`, where a CPU refuses its products of float16
        expected = run(jax.nn.dot_product_attention)(query, key, value)
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (got.dtype, got.shape) == (right.dtype, right.shape)
        np.testing.assert_allclose(np.float32(got), np.float32(right), rtol=0.01, atol=0.02)


@pytest.mark.full
def test_float64_with_a_mask_has_no_infinities():
    with jax.enable_x64(), jax.debug_infs(True):
        query, key = jnp.zeros((5, 6, 11), jnp.float64), jnp.zeros((7, 3, 11), jnp.float64)
        out = jflex.dot_product_attention(query, key, key, mask=jnp.arange(7) <= 3)
        assert out.block_until_ready().dtype == jnp.float64


@pytest.mark.parametrize(
    "window", [(-1, 0), *(pytest.param(x, marks=pytest.mark.full) for x in ((0, -1), (-1, -1), -1))]
)
def test_a_window_that_would_hide_all_keys(window):
    """-1 is no bound, as in FlashAttention."""
    query = draw(0, 1, 9, 2, 8, dtype="float32")
    left, right = (9 if side == -1 else side for side in (window if isinstance(window, tuple) else (window,) * 2))
    found = jflex.dot_product_attention(query, query, query, local_window_size=window)
    expected = jax.nn.dot_product_attention(query, query, query, local_window_size=(left, right))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_a_window_of_jax_that_hides_some_keys_is_as_there():
    query = draw(0, 1, 9, 2, 8, dtype="float32")
    both = (attend(query, query, query, local_window_size=(-1, 3)) for attend in (
        jflex.dot_product_attention, jax.nn.dot_product_attention))  # fmt: skip
    found, expected = (np.asarray(x)[:, :-1] for x in both)  # the last query attends to no key
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
