"""Wrong calls of `sparse_mla_attention`."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases.errors.latent import CACHE
from tests.cases.errors.paged import BATCH, INT, wrong

TREES = wrong(ancestors=INT([[1, 3], [1, 0]]))


def call(indices, cache=CACHE, batch=BATCH, **options):
    q = jnp.zeros((3, 4, 48))
    return lambda: jflex.sparse_mla_attention(q, cache, batch, indices, **({"qk_head_dim": 24} | options))


ROWS = [
    ("floats", call(jnp.zeros((3, 2))), TypeError, "`indices` must be an int32 array of positions."),
    ("other_queries", call(INT([[0, 1]])), ValueError, "`indices` must be [N, K], a row for each of the 3 queries."),
    ("no_scale", call(INT(np.zeros((3, 2))), qk_head_dim=None), ValueError, "`sparse_mla_attention` takes one of"),
    ("trees", call(INT(np.zeros((3, 2))), batch=TREES), ValueError, "`batch.ancestors` must be None"),
    ("cache_of_keys", call(INT(np.zeros((3, 2))), cache=jflex.paged.PagedCache.create(4, 16, 1, 48, dtype="float32")),
     TypeError, "`cache` must be a `LatentCache`."),
    ("gradient", lambda: jax.grad(lambda x: jflex.sparse_mla_attention(
        x, CACHE, BATCH, INT(np.zeros((3, 2))), qk_head_dim=24, implementation="xla").sum())(jnp.zeros((3, 4, 48))),
     jflex.UnsupportedError, "`sparse_mla_attention` has no derivative on 'xla'"),
]  # fmt: skip
ROWS = [(name, attempt, kind, re.escape(words)) for name, attempt, kind, words in ROWS]
