"""Wrong calls of `mla_attention` and of the latent cache."""

import re

import jax
import jax.numpy as jnp

import jflex
from jflex.paged import LatentCache, PagedCache, write_latent
from tests.cases.errors.paged import BATCH, INT

CACHE = LatentCache.create(4, 16, 32, 16, dtype="float32")


def call(q=None, cache=CACHE, batch=BATCH, **options):
    q = jnp.zeros((3, 4, 48)) if q is None else q
    return lambda: jflex.mla_attention(q, cache, batch, **({"implementation": "xla", "qk_head_dim": 24} | options))


def written(latent=(2, 32), rope_key=(2, 16), slots=(16, 17), cache=CACHE, **options):
    arrays = (jnp.zeros(x) if isinstance(x, tuple) else x for x in (latent, rope_key))
    return lambda: write_latent(cache, *arrays, INT(slots) if isinstance(slots, tuple) else slots, **options)


def rows_of(shape, rope_size=16, dtype=jnp.float32):
    return LatentCache(jnp.zeros(shape, dtype), rope_size)


ROWS = [
    ("cache_of_keys", call(cache=PagedCache.create(4, 16, 1, 48, dtype="float32")), TypeError,
     "`cache` must be a `LatentCache`. Got PagedCache. Make one with `LatentCache.create`."),
    ("paged_attention_of_latents", lambda: jflex.paged_attention(jnp.zeros((3, 4, 48)), CACHE, BATCH), TypeError,
     "`cache` must be a `PagedCache`. Got LatentCache."),
    ("no_latent_columns", call(cache=rows_of((4, 16, 1, 48), 48)), ValueError, "a `rope_size` of 1 to W - 1"),
    ("rows_no_array", call(cache=LatentCache([1], 16)), TypeError, "`cache.rows` must be an array. Got list."),
    ("query_without_heads", call(q=jnp.zeros((3, 0, 48))), ValueError, "`q` must have three axes, [N, Hq, 48]"),
    ("query_not_absorbed", call(q=jnp.zeros((3, 4, 24))), ValueError,
     "`q` must have the columns of a row of the cache, 32 latent ones and 16 rotated ones."),
    ("query_of_another_dtype", call(q=jnp.zeros((3, 4, 48), jnp.bfloat16)), TypeError, "must have one dtype"),
    ("no_scale", call(qk_head_dim=None), ValueError, "`mla_attention` takes one of `qk_head_dim` and `scale`"),
    ("scale_of_zero", call(qk_head_dim=None, scale=0.0), ValueError, "`scale` must be finite and not 0."),
    ("no_batch", call(batch=None), TypeError, "`batch` must be a `PagedBatch`."),
    ("sinks_of_another_size", call(sinks=jnp.zeros(3)), ValueError, "`sinks`"),
    ("mask_of_another_size", call(mask_mod=jflex.masks.document(jnp.zeros(8, jnp.int32))), ValueError, "8"),
    ("gradient", lambda: jax.grad(lambda q: call(q)().sum())(jnp.zeros((3, 4, 48))), jflex.UnsupportedError,
     "`mla_attention` has no derivative on 'xla'"),
    ("mosaic_gpu", call(implementation="mosaic_gpu"), jflex.UnsupportedError, "mosaic_gpu"),
    ("cache_of_integers", lambda: LatentCache.create(4, 16, 32, 16, dtype="int8"), TypeError,
     "`dtype` must be floating-point"),
    ("write_keys_to_latents", lambda: jflex.paged.write(CACHE, jnp.zeros((1, 1, 48)), jnp.zeros((1, 1, 48)), INT([16])),
     TypeError, "`cache` must be a `PagedCache`. Got LatentCache."),
    ("latent_of_another_dtype", written(latent=jnp.zeros((2, 32), jnp.bfloat16)), TypeError, "Cast it with `.astype`."),
    ("rope_key_with_heads", written(rope_key=(2, 1, 16)), ValueError, "`rope_key` must be [N, 16]"),
    ("other_tokens", written(rope_key=(3, 16)), ValueError, "must be of the same tokens"),
    ("a_slot_twice", written(slots=(16, 16)), ValueError, "`slots` must not give a slot twice."),
]  # fmt: skip
ROWS = [(name, attempt, kind, re.escape(words)) for name, attempt, kind, words in ROWS]
