"""The README's table "coming from jax.nn": each row gives what `jax.nn.dot_product_attention` gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores

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
