"""Wrong latent caches of eight bits, and calls with them."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jflex
from flax_layers.nnx import MultiHeadLatentAttention
from jflex.paged import LatentCache, PagedBatch, write_latent

E4M3, PAGES, PAGE = "float8_e4m3fn", 4, 4
INT = lambda x: jnp.asarray(x, jnp.int32)
CACHE = LatentCache.create(PAGES, 16, 128, 16, dtype=E4M3)
BATCH = PagedBatch(INT([0, 1]), INT([3]), INT([[1]]))
QUERY = np.zeros((1, 4, 144), np.float32)


def attend(query=QUERY, rows=CACHE.rows, rope=CACHE.rope, scale=CACHE.scale, **options):
    cache = LatentCache(rows, 16, rope, scale)
    return lambda: jflex.mla_attention(jnp.asarray(query), cache, BATCH, qk_head_dim=24, **options)


def layer():
    sizes = {"latent_dim": 128, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 16}
    return MultiHeadLatentAttention(64, 4, **sizes, rngs=nnx.Rngs(0))


def written(latent=jnp.float32, rope_key=jnp.float32):
    return lambda: write_latent(CACHE, jnp.zeros((1, 128), latent), jnp.zeros((1, 16), rope_key), INT([16]))


ROWS = [
    ("width", lambda: LatentCache.create(PAGES, PAGE, 192, 16, dtype=E4M3), ValueError,
     r"`latent_size` must be a multiple of 128 with float8_e4m3fn: so many columns share a scale. Got 192. Take"),
    ("other eight bits", lambda: LatentCache.create(PAGES, PAGE, 128, 16, dtype="float8_e5m2"), TypeError,
     r"`dtype` must be floating-point .*, or float8_e4m3fn, with scales. Got float8_e5m2"),
    ("no scale", attend(scale=None), TypeError, r"`cache.scale` must be float32: .*Got NoneType. Make the cache"),
    ("scales of rows", attend(scale=jnp.ones((PAGES, 16))), ValueError,
     r"`cache.scale` must have the shape \[4, 16, 1\], by `cache.rows` and `rope_size`. Got float32\[4,16\]"),
    ("no rope", attend(rope=None), TypeError, r"`cache.rope` must be bfloat16: .*Got NoneType"),
    ("rope of another size", attend(rope=CACHE.rope[..., :8]), ValueError,
     r"`cache.rope` must have the shape \[4, 16, 1, 16\].*Got bfloat16\[4,16,1,8\]"),
    ("scales of floats", attend(rows=jnp.zeros((PAGES, 16, 1, 144))), TypeError,
     r"`cache.rope` must be None: rows of float32 hold the rotated columns.*Only latent vectors of float8_e4m3fn"),
    ("float16", attend(QUERY.astype(np.float16)), TypeError,
     r"`q` must be one of bfloat16, float32: the cache holds float8_e4m3fn with scales, and products.*Cast `q`"),
    ("query of latent columns", attend(QUERY[..., :128]), ValueError, r"128 latent ones and 16 rotated ones"),
    ("quantized latents", written(E4M3), TypeError,
     r"`latent` must be one of bfloat16, float16, float32: the cache holds float8_e4m3fn.*Pass what is not yet"),
    ("dense cache", lambda: layer().init_cache(1, 64, dtype=E4M3), TypeError,
     r"`dtype` must be floating-point, of 16 bits or more. Got float8_e4m3fn. A paged cache, which `init_paged"),
    ("hopper", attend(implementation="mosaic_gpu"), jflex.UnsupportedError,
     r"mosaic_gpu: its kernel for latent pages takes no eight bits"),
]  # fmt: skip
