"""Small calls of every kind, for what ready masks and scores require of them."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jflex
from flax_layers.nnx import FlexAttention
from jflex import masks, scores
from jflex.paged import PagedBatch, PagedCache

RNG = np.random.default_rng(0)
int32 = functools.partial(jnp.asarray, dtype=jnp.int32)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def ids_of(*shape):
    return int32(np.sort(RNG.integers(0, 4, shape), axis=-1))


def call(B=2, T=32, S=None, H=4, of=jflex.flex_attention, **options):
    x = lambda length, heads: jnp.zeros((B, length, heads, 8))
    keys = x(T if S is None else S, H // 2)
    return of(x(T, H), keys, keys, implementation="xla", **options)


def block_mask(mod, B=None, H=None, T=32, S=32):
    return jflex.create_block_mask(mod, B, H, T, S, block_size=8)


def paged(lengths=(20, 5), requests=2, **options):
    table = int32(np.arange(1, 2 * requests + 1).reshape(requests, 2))
    batch = PagedBatch(int32(np.arange(requests + 1)), int32(lengths), table)
    cache = PagedCache.create(2 * requests + 1, 16, 2, 8, dtype=jnp.float32)
    return jflex.paged_attention(jnp.zeros((requests, 4, 8)), cache, batch, implementation="xla", **options)


def cascade(positions=(40, 3), requests=(0, 2), **options):
    keys = jnp.zeros((2, 8, 2, 8))
    level = jflex.CascadeLevel.dense(
        keys, keys, qo_indptr=int32([0, 1, 2]), lengths=int32([8, 2]), start=int32([0, 30])
    )
    requests = None if requests is None else int32(requests)
    return jflex.cascade_attention(
        jnp.zeros((2, 4, 8)), [level], positions=int32(positions), requests=requests, implementation="xla", **options
    )


def varlen(ends=(0, 10, 32), of_mask=False, **options):
    ends = int32(ends)
    if of_mask:
        return jflex.varlen_block_mask(ends, ends, 32, 32, **options)
    x = jnp.zeros((32, 4, 8))
    return jflex.flex_attention_varlen(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, implementation="xla", **options)


def with_table_of(mask_mod, kv_lengths=None):
    table = int32([[1, 2], [3, 4]])
    return jflex.paged.convert_mask_mod(mask_mod, table, page_size=16, num_pages=8, kv_lengths=kv_lengths)


def layer(**options):
    return FlexAttention(32, 4, num_kv_heads=2, implementation="xla", rngs=nnx.Rngs(0), **options)


IDS = ids_of(20)
DOCUMENT = masks.document(IDS)
ALIBI = scores.alibi(scores.alibi_slopes(8))
PADDING = masks.padding(int32([3, 4, 5]))
