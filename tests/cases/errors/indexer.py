"""Wrong calls of `indexer_scores` and `select_keys`."""

import re

import jax.numpy as jnp

import jflex

INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}
ARRAYS = jnp.ones((2, 3, 16), jnp.bfloat16), jnp.ones((5, 16), jnp.bfloat16), jnp.ones((2, 3))
WIDE = jnp.ones((2, 3, 300), jnp.bfloat16), jnp.ones((5, 300), jnp.bfloat16), jnp.ones((2, 3))


def scored(*arrays, **options):
    return lambda: jflex.indexer_scores(*arrays, **options)


def selecting(scores, k=1, **options):
    return lambda: jflex.select_keys(scores, k, **options)


UNSUPPORTED = jflex.UnsupportedError
ROWS = [
    ("queries_of_a_batch", scored(jnp.ones((1, 2, 3, 4)), *ARRAYS[1:]), ValueError,
     "`query` must be [N, H, D]. Got float32[1,2,3,4]. For several sequences `jax.vmap`."),
    ("other_size", scored(ARRAYS[0], jnp.ones((5, 8)), ARRAYS[2]), ValueError, "`key` must be [S, 16], one vector"),
    ("other_heads", scored(*ARRAYS[:2], jnp.ones((2, 1))), ValueError,
     "`weights` must be [2, 3], one for each head of each query. Got float32[2,1]."),
    ("unknown", scored(*ARRAYS, implementation="mosaic_gpu"), ValueError,
     "`implementation` of `indexer_scores` must be 'triton', 'xla' or None. Got 'mosaic_gpu'."),
    ("config", scored(*ARRAYS, config=3), TypeError, "`config` must be a `jflex.Config`. Got int."),
    ("on_a_cpu", scored(*ARRAYS, implementation="triton"), UNSUPPORTED,
     "None of the requested implementations supports this call of `indexer_scores`. triton: it needs an NVIDIA GPU, "
     "and this call runs on cpu"),
    ("float32", scored(*(x.astype(jnp.float32) for x in ARRAYS), **INTERPRETED), UNSUPPORTED,
     "its kernel takes queries and keys in bfloat16, or both in float16, not queries in float32 and keys in float32"),
    ("wide", scored(*WIDE, **INTERPRETED), UNSUPPORTED, "its kernel takes head sizes up to 256, not 300. These do: "
     "'xla'; pass implementation=None to let jflex choose."),
    ("negative_k", selecting(jnp.zeros((1, 2)), -1), ValueError, "`k` must be 0 or more. Got -1."),
    ("scores_of_a_batch", selecting(jnp.zeros((1, 1, 2))), ValueError, "`scores` must be [N, S]. Got float32[1,1,2]."),
    ("many", selecting(jnp.zeros((1, 40_000)), 20_000, **INTERPRETED), UNSUPPORTED,
     "triton: its kernel selects up to 16384 of more than 32768 keys, not 20000 of 40000."),
    ("bfloat16", selecting(jnp.zeros((1, 2), jnp.bfloat16), **INTERPRETED), UNSUPPORTED,
     "its kernel takes scores in float32, not bfloat16"),
]  # fmt: skip
ROWS = [(name, attempt, kind, re.escape(words)) for name, attempt, kind, words in ROWS]
