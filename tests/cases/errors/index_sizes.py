"""Users' mods that index an array by ``b``, ``h``, ``q_idx`` or ``kv_idx``: too short an array is refused."""

import functools

import jax
import jax.numpy as jnp

import jflex
from tests.support.sized_calls import block_mask, call, cascade, draw, ids_of, int32, paged, varlen, with_table_of

TWO = draw(2)
IDS = ids_of(20)
LENGTHS = int32([3, 4])


def per_head(array):
    return lambda s, b, h, q, k: s * array[h]


def same_document(b, h, q_idx, kv_idx):
    return IDS[q_idx] == IDS[kv_idx]


def mla(**mods):
    cache = jflex.paged.LatentCache.create(4, 16, 16, 8, dtype=jnp.float32)
    batch = jflex.paged.PagedBatch(int32([0, 1]), int32([21]), int32([[1, 2]]))
    return jflex.mla_attention(jnp.zeros((1, 4, 24)), cache, batch, qk_head_dim=20, implementation="xla", **mods)


def over_devices(**mods):
    mesh = jax.make_mesh((2,), ("context",))
    return call(of=functools.partial(jflex.context_parallel_attention, mesh=mesh), **mods)


def weights(**mods):
    return call(of=lambda q, k, v, implementation, **more: jflex.attention_weights(q, k, **more), **mods)


WORDS = r"An array that a mod indexes by `{}` must hold an element for each {}\. "
HEADS = WORDS.format("h", "query head") + r".*indexes float32\[2\]\. Got 2 for a call with 4 heads\. "
QUERIES = WORDS.format("q_idx", "query") + r".*indexes int32\[20\]\. Got 20 .*queries up to position 31\. "
# Name, how to provoke it, what the message holds.
MESSAGES = [
    (
        "head",
        lambda: call(score_mod=per_head(TWO)),
        HEADS + r"Pass an array for 4\. To repeat the last element, index it by `jnp\.minimum\(h, 1\)`",
    ),
    ("source", lambda: call(mask_mod=same_document), r"same_document \(index_sizes\.py:\d+\) indexes int32\[20\]"),
    ("query", lambda: call(mask_mod=same_document), QUERIES),
    ("key", lambda: call(T=20, mask_mod=same_document, S=21), r"`kv_idx`.*each key.*keys up to position 20"),
    ("batch", lambda: call(B=3, mask_mod=lambda b, h, q, k: k < LENGTHS[b]), r"each batch entry\. .*with batch 3"),
    (
        "axis",
        lambda: call(score_mod=lambda s, b, h, q, k: s + draw(2, 2, 32, 32)[b, h, q, k]),
        r"indexes float32\[2,2,32,32\] on axis 1\. Got 2 for a call with 4 heads",
    ),
    ("column", lambda: call(score_mod=lambda s, b, h, q, k: s + draw(3, 2)[1, h]), r"float32\[3,2\] on axis 1"),
    ("slice", lambda: call(score_mod=lambda s, b, h, q, k: s + draw(3, 2, 5)[1:, h, 0].sum()), r"\[3,2,5\] on axis 1"),
    ("cast", lambda: call(score_mod=lambda s, b, h, q, k: s + TWO[h.astype(jnp.uint8)]), HEADS),
    ("lax", lambda: call(score_mod=lambda s, b, h, q, k: s + jax.lax.dynamic_index_in_dim(TWO, h, 0, False)), HEADS),
    ("made_inside", lambda: call(score_mod=lambda s, b, h, q, k: s * jnp.arange(2.0)[h]), HEADS),
    ("function", lambda: call(score_mod=lambda s, b, h, q, k: s * jax.jit(lambda x, i: x[i])(TWO, h)), HEADS),
    # --- ways to the call
    ("jit", lambda: jax.jit(lambda x: call(score_mod=per_head(x)))(TWO), HEADS),
    ("grad", lambda: jax.grad(lambda x: call(score_mod=per_head(x)).sum())(TWO), HEADS),
    ("vmap", lambda: jax.vmap(lambda x: call(score_mod=per_head(x)))(draw(3, 2)), HEADS),
    ("weights", lambda: weights(score_mod=per_head(TWO)), HEADS),
    ("over_devices", lambda: over_devices(score_mod=per_head(TWO)), HEADS),
    ("over_devices_mask", lambda: over_devices(mask_mod=same_document), QUERIES),
    ("block_mask", lambda: block_mask(same_document), r"for a BlockMask with queries up to position 31"),
    ("with_lengths", lambda: block_mask(same_document, T=20, S=20).with_lengths(20, 24), r"keys up to position 23"),
    (
        "from_indices",
        lambda: jflex.block_mask_from_indices(int32([[[[0]] * 4]]), 32, 32, block_size=8, mask_mod=same_document),
        r"for a BlockMask with queries up to position 31",
    ),
    ("paged_positions", lambda: paged((21, 5), mask_mod=same_document), r"queries up to position 20"),
    ("varlen_positions", lambda: varlen(mask_mod=same_document), r"queries up to position 21"),
    ("cascade_positions", lambda: cascade(mask_mod=same_document), r"queries up to position 40"),
    ("mla_heads", lambda: mla(score_mod=per_head(TWO)), HEADS),
    ("mla_positions", lambda: mla(mask_mod=same_document), r"queries up to position 20"),
    ("converted", lambda: with_table_of(same_document, kv_lengths=int32([21, 3])), r"a page table with .*position 20"),
    # --- vector mods
    ("query_mod", lambda: call(query_mod=lambda x, b, h, i: x * TWO[h]), HEADS),
    ("key_mod", lambda: call(H=8, key_mod=lambda x, b, h, i: x * TWO[h]), WORDS.format("h", "key head") + ".*4 heads"),
    ("value_mod", lambda: call(value_mod=lambda x, b, h, i: x * draw(20)[i]), r"`kv_idx`.*keys up to position 31"),
    ("output_mod", lambda: call(output_mod=lambda x, lse, b, h, i: x * TWO[h]), HEADS),
    ("paged_key_mod", lambda: paged(key_mod=lambda x, b, h, i: x * TWO[i]), r"each key\. .*position 19"),
    ("cascade_key_mod", lambda: cascade(key_mod=lambda x, b, h, i: x * TWO[i]), r"each key\. .*position 31"),
    (
        "apply_vector_mod",
        lambda: jflex.apply_vector_mod(lambda x, b, h, i: x * TWO[i], jnp.ones((2, 4, 8)), int32([0, 2])),
        r"`q_idx`.*queries up to position 2",
    ),
]
ROWS = [(name, provoke, ValueError, message) for name, provoke, message in MESSAGES]
