"""Wrong calls of `attention_weights`."""

import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases.errors.calls import F32, array
from tests.cases.errors.mods import branches


def weights(query=(2, 8, 4, 16), key=(2, 8, 2, 16), dtypes=(F32, F32), **options):
    arrays = (array(*shape, dtype=dtype) for shape, dtype in zip((query, key), dtypes, strict=True))
    return jflex.attention_weights(*arrays, **options)


ONE_ROW = jflex.create_block_mask(jflex.masks.causal(), None, None, 1, 8, block_size=32)
ROWS = [
    ("weights_dtypes", lambda: weights(dtypes=(F32, jnp.bfloat16)), TypeError,
     r"^`query` and `key` must have one dtype\. Cast them.*key: bfloat16\[2,8,2,16\]\.$"),
    ("weights_batch", lambda: weights(key=(3, 8, 2, 16)), ValueError,
     r"^`key` must have the batch size of `query`, or 1 \(shared by all\)\. The batch sizes are 2 .*3 \(key\)\. Got"),
    ("weights_branches", lambda: weights(score_mod=branches), ValueError, r"`score_mod` .*branches"),
    ("weights_block_mask", lambda: weights(block_mask=ONE_ROW, rows=[0]), ValueError,
     r"`block_mask` is for 1 queries and 8 keys, the call has 8 and 8"),
    ("rows_missing", lambda: weights((1, 4096, 4, 16), (1, 2048, 4, 16)), ValueError,
     r"`rows` must be given.*\[1, 4, 4096, 2048\], are more than 16777216.*33554432\. Pass the indices.*rows=jnp"),
    ("rows_outside", lambda: weights(rows=[0, 8]), ValueError,
     r"`rows` must lie between 0 and T - 1,.* for the 8 queries\. Got 8 at index 1\. .*jnp\.clip\(rows, 0, 8 - 1\)"),
    ("rows_of_none", lambda: weights((2, 0, 4, 16), rows=[0]), ValueError, r"`rows` must lie.*0 queries\. Got 0"),
    ("rows_number", lambda: weights(rows=3), TypeError,
     r"`rows` must be an integer array \[R\] or a sequence.*Got int; pass `jnp\.asarray"),
    ("rows_of_floats", lambda: weights(rows=[0.5]), TypeError, r"`rows` must be an integer array.*Got list of float"),
    ("rows_float", lambda: weights(rows=array(3)), TypeError, r"`rows` must.*float32\[3\]; cast it with `\.astype"),
    ("rows_chosen_by_booleans", lambda: weights(rows=np.ones(8, bool)), TypeError,
     r"`rows` must.*Got bool\[8\]; pass `np\.flatnonzero\(rows\)`"),
    ("rows_scalar", lambda: weights(rows=jnp.int32(3)), ValueError,
     r"`rows` must.*Got int32\[\]\. For one query, pass `rows\[None\]`"),
    ("rows_matrix", lambda: weights(rows=np.ones((2, 3), int)), ValueError,
     r"`rows` must.*\[2,3\]\. Pass `rows\.reshape"),
]  # fmt: skip
