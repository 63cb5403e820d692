"""Wrong calls of `flex_attention_varlen` and of `cascade_attention`."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

import jflex
from jflex import CascadeLevel
from jflex.varlen import varlen_block_mask
from tests.cases.errors.calls import mask as causal


def boundaries(*lengths: int):
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


ENDS = boundaries(20, 40)
Q, K, V = (jnp.zeros((60, heads, 16)) for heads in (4, 2, 2))


def call(q=Q, k=K, v=V, **changed):
    return jflex.flex_attention_varlen(q, k, v, **({"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS} | changed))


def mask_of(N=60, M=60, ends=ENDS, **more):
    return varlen_block_mask(ends, ends, N, M, **more)


def by_head(b, h, q_idx, kv_idx):
    return h >= b


KEYS, INDPTR = jnp.ones((2, 6, 2, 8)), jnp.array([0, 1, 3])
LEVEL = CascadeLevel.dense(KEYS, KEYS, qo_indptr=INDPTR)
dense = functools.partial(CascadeLevel.dense, qo_indptr=INDPTR)


def cascade(levels, query=(3, 4, 8), **options):
    return jflex.cascade_attention(jnp.ones(query), levels, **options)


# Name, how to provoke it, type, what the message holds.
ROWS = [
    ("rank", lambda: call(q=Q[None]), ValueError,
     r"`q` must have three axes, \[N, Hq, D\].*float32\[1,60,4,16\].*one length goes to `flex_attention`"),
    ("list", lambda: call(k=[1.0]), TypeError, r"`k` must be an array\. Got list"),
    ("no_array", lambda: call(cu_seqlens_q=[0, 60]), TypeError,
     r"`cu_seqlens_q` must be an int32 array \[R \+ 1\].*Got list; pass `jnp\.asarray\(cu_seqlens_q, jnp\.int32\)`"),
    ("int64", lambda: call(cu_seqlens_k=np.array([0, 20, 60])), TypeError,
     r"`cu_seqlens_k` must be.*the keys of each.*Got int64\[3\]; cast it with `\.astype\(jnp\.int32\)`"),
    ("scalar", lambda: call(cu_seqlens_k=jnp.int32(3)), ValueError, r"Got int32\[\]\. For no sequences, pass \[0\]"),
    ("empty", lambda: call(cu_seqlens_q=ENDS[:0]), ValueError, r"Got int32\[0\]\. For no sequences, pass \[0\]"),
    ("sequences", lambda: call(cu_seqlens_k=boundaries(60)), ValueError,
     r"for the same sequences\. They are for 2 and 1"),
    ("first", lambda: call(cu_seqlens_q=ENDS + 1), ValueError,
     r"`cu_seqlens_q` must begin with 0.*begins with 1\. Prepend a 0"),
    ("descends", lambda: call(cu_seqlens_k=boundaries(20, -3)), ValueError,
     r"`cu_seqlens_k` must ascend\. Sequence 1 has its keys from 20 to 17\. Take the cumulative sum"),
    ("beyond", lambda: call(cu_seqlens_q=np.array([0, 20, 61], np.int32)), ValueError,
     r"`cu_seqlens_q` must end at the number of packed queries, or before\. It ends at 61, and there are 60 queries"),
    ("score_mod", lambda: call(score_mod=3), TypeError, r"`score_mod` must be a function \(score, b, h.*Got int\."),
    ("mask_as_mod", lambda: call(mask_mod=mask_of()), TypeError, r"Got VarlenBlockMask\. Pass it as `block_mask`"),
    ("mask_mod_of_mask", lambda: mask_of(mask_mod=3), TypeError, r"`mask_mod` must be a function"),
    ("plain_mask", lambda: call(block_mask=jflex.create_block_mask(causal, None, None, 60, 60)), TypeError,
     r"`block_mask` must be a `VarlenBlockMask`.*Got BlockMask\. Make it with `varlen_block_mask\(.*60, 60"),
    ("both", lambda: call(block_mask=mask_of(), mask_mod=causal), ValueError,
     r"cannot both be given.*varlen_block_mask\(\.\.\., mask_mod=and_masks"),
    ("other_lengths", lambda: call(block_mask=mask_of(64, 60)), ValueError,
     r"for 64 packed queries and 60 keys, the call has 60 and 60\. Make it"),
    ("other_boundaries", lambda: call(block_mask=mask_of(ends=boundaries(20, 30))), ValueError,
     r"made for other boundaries: its `cu_seqlens_q` is \[0, 20, 50\], that of the call \[0, 20, 60\]"),
    ("heads", lambda: mask_of(mask_mod=by_head), ValueError, r"`H` is None.*packed.*uses `h`\. Pass `H=`"),
    ("heads_of_call", lambda: call(block_mask=mask_of(mask_mod=by_head, H=3)), ValueError, r"`block_mask` has heads 3"),
    ("size", lambda: mask_of(N=-1), ValueError, r"`num_queries` must not be negative"),
    ("traced_size", lambda: mask_of(M=jnp.float32(3)), TypeError, r"`num_keys` must be a Python int"),
    ("block", lambda: mask_of(block_size=0), ValueError, r"`block_size` must be positive"),
    ("stats_and_lse", lambda: call(return_stats=("max",), return_lse=True), ValueError,
     r"`return_lse` and `return_stats` cannot both be given"),
    # --- cascades
    ("cascade_four_axes", lambda: dense(KEYS[0], KEYS), ValueError,
     r"`key` and `value` must be arrays \[G, S, Hkv, D\]"),
    ("cascade_start_dtype", lambda: dense(KEYS, KEYS, start=jnp.ones(2)), TypeError,
     "`start` must be an int32 array of positions"),
    ("cascade_start_shape", lambda: dense(KEYS, KEYS, start=jnp.arange(3)), ValueError, "one for each of the 2 groups"),
    ("cascade_lengths_beyond", lambda: dense(KEYS, KEYS, lengths=jnp.array([6, 7])), ValueError,
     r"`lengths` must lie between 0 and S.*Batch entry 1 has 7.*`jnp.clip\(lengths, 0, 6\)`"),
    ("cascade_groups", lambda: CascadeLevel.paged(LEVEL.cache, INDPTR), TypeError, "`groups` must be a `PagedBatch`"),
    ("cascade_trees",
     lambda: CascadeLevel.paged(LEVEL.cache, dataclasses.replace(LEVEL.groups, ancestors=jnp.ones((2, 1)))),
     ValueError, "`groups` must have no `ancestors`: levels have no trees"),
    ("cascade_one_level", lambda: cascade(LEVEL), TypeError, "`levels` must be a sequence of `CascadeLevel`"),
    ("cascade_no_level", lambda: cascade([LEVEL, KEYS]), TypeError, "Element 1 is of type ArrayImpl"),
    ("cascade_head_sizes", lambda: cascade([LEVEL, dense(KEYS, KEYS[..., :4])]), ValueError,
     r"values of one head size.*\[4, 8\]"),
    ("cascade_positions", lambda: cascade([LEVEL], mask_mod=causal), ValueError, "`positions` must be passed"),
    ("cascade_positions_shape", lambda: cascade([LEVEL], positions=jnp.arange(2)), ValueError, "each of the 3 queries"),
    ("cascade_requests_dtype", lambda: cascade([LEVEL], requests=jnp.ones(3)), TypeError,
     "`requests` must be an int32 array"),
    ("cascade_queries", lambda: cascade([LEVEL], (2, 4, 8)), ValueError, "`qo_indptr` must end at N"),
    ("cascade_statistics", lambda: cascade([LEVEL], return_stats=("max",), return_lse=True), ValueError,
     "`return_lse` and `return_stats` cannot both"),
    ("cascade_weights", lambda: cascade([LEVEL], normalize="sum"), ValueError, "`normalize` must be 'softmax'"),
    ("cascade_query_heads", lambda: cascade([LEVEL], (3, 3, 8)), ValueError, "multiple of the cache's 2 heads"),
]  # fmt: skip
