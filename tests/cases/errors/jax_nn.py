"""Wrong calls of `dot_product_attention`, with the signature of `jax.nn`."""

import jax
import jax.numpy as jnp

import jflex
from tests.cases.errors.calls import array

I32 = jnp.int32
X = array(2, 8, 4, 16)


def call(query=X, key=X, value=X, **more):
    return jflex.dot_product_attention(query, key, value, **more)


# Name, how to provoke it, type, what the message holds.
ROWS = [
    ("two_axes", lambda: call(array(8, 16)), ValueError, r"`query` must have four axes.*three.*float32\[8,16\].*vmap"),
    ("batch", lambda: call(array(3, 8, 4, 16)), ValueError, r"`key` and `value` must have the batch size of `query`"),
    ("bias_complex", lambda: call(bias=array(8, 8, dtype=jnp.complex64)), TypeError, r"`bias` must be floating-point"),
    (
        "bias_shape",
        lambda: call(bias=array(2, 3, 8, 8)),
        ValueError,
        r"`bias` must be \[B, Hq, T, S\], each of them 1 or as in the call, \[2, 4, 8, 8\]. Got float32\[2,3,8,8\]: "
        r"Hq is 3, for 4 query heads",
    ),
    ("bias_axes", lambda: call(bias=array(1, 1, 1, 8, 8)), ValueError, r"`bias` must be.*with 5 axes.*vmap"),
    ("mask_batch", lambda: call(mask=array(2, 8, 8, dtype=bool)), ValueError,
     r"Hq is 2.*insert the heads, `x\[:, None\]`"),
    ("mask_keys", lambda: call(mask=array(9, dtype=bool)), ValueError, r"`mask` must be.*S is 9, for 8 keys"),
    ("mask_dtype", lambda: call(mask=array(8, 8)), TypeError, r"`mask` must be boolean.*astype\(bool\).*as `bias`"),
    ("scale_array", lambda: call(scale=array(4)), TypeError, r"`scale` must be one real number. Got float32\[4\]"),
    ("causal", lambda: call(is_causal=1), TypeError, r"`is_causal` must be True or False. Got int"),
    ("causal_traced", lambda: jax.jit(lambda x: call(is_causal=x))(True), TypeError,
     r"`is_causal` must be.*static_argnames='is_causal'"),
    ("residual", lambda: call(return_residual=None), TypeError, r"`return_residual` must be True or False"),
    ("query_lengths_shape", lambda: call(query_seq_lengths=array(3, dtype=I32)), ValueError,
     r"`query_seq_lengths` must be an int32 array \[B\], the number of queries of each of the 2 batch entries"),
    ("lengths_scalar", lambda: call(key_value_seq_lengths=3), ValueError, r"jnp\.full\(2, length, jnp\.int32\)"),
    ("lengths_dtype", lambda: call(key_value_seq_lengths=array(2)), TypeError, r"float32\[2\]; cast it with"),
    ("lengths_beyond", lambda: call(key_value_seq_lengths=[8, 9]), ValueError,
     r"`key_value_seq_lengths` must lie between 0 and S, the number of keys, 8. Batch entry 1 has 9. Clamp"),
    ("window_kind", lambda: call(local_window_size=1.5), TypeError,
     r"`local_window_size` must be a Python int, or a pair"),
    ("window_three", lambda: call(local_window_size=(1, 2, 3)), TypeError, r"pair \(left, right\).*Got \(1, 2, 3\)"),
    ("window_array", lambda: call(local_window_size=jnp.int32(3)), TypeError, r"jflex\.masks\.sliding_window"),
    ("window_empty", lambda: call(local_window_size=(-2, 0)), ValueError, r"hides every key.*Pass -1 for a side"),
    ("scale_bool", lambda: call(scale=False), TypeError, r"`scale` must be a Python number\. Got bool"),
    ("no_sequence", lambda: call(implementation=3), ValueError, r"`implementation` must be one of .* Got 3\."),
    ("cudnn", lambda: call(implementation="cudnn"), ValueError, r"`implementation` cannot be 'cudnn'.*'mosaic_gpu'"),
]  # fmt: skip
