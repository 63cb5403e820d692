"""Wrong calls of `flex_attention` and of functions beside it."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex import Config, Tiles, UnsupportedError

F32, BF16, E4M3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
EIGHT = (E4M3, E4M3, BF16)


def array(*shape, dtype=F32):
    return jnp.zeros(shape, dtype)


def call(query=(2, 8, 4, 16), key=(2, 8, 2, 16), value=(2, 8, 2, 16), dtypes=(F32,) * 3, **options):
    arrays = (array(*shape, dtype=dtype) for shape, dtype in zip((query, key, value), dtypes, strict=True))
    return jflex.flex_attention(*arrays, **({"implementation": "xla"} | options))


def within(*lengths):
    return jnp.array(lengths, jnp.int32)


def score(score, b, h, q_idx, kv_idx):
    return score


def mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def block_mask(B=None, H=None, T=8, S=8, mod=mask):
    return jflex.create_block_mask(mod, B, H, T, S, block_size=32)


def causal_mask(**options):
    return jflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, block_size=32, **options)


def symbolic_batch(attention):
    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 8, 2, 16), F32)
    return jax.export.export(jax.jit(attention))(shape, shape, shape)


# Name, how to provoke it, type, what the message holds.
ROWS = [
    # --- arrays
    ("rank", lambda: call((8, 4, 16)), ValueError,
     r"`query` must have four axes, \[B, T, Hq, D\].*'BTNH'; it has 3.*jax\.vmap"),
    ("symbolic", lambda: symbolic_batch(jflex.flex_attention), ValueError,
     r"`query` must have sizes that are known while tracing.*`jax\.vmap`.*float32\[b,8,2,16\]"),
    (
        "integers",
        lambda: call(dtypes=(jnp.int32,) * 3),
        TypeError,
        r"`query` must be floating-point \(bfloat16, float16, float32, float64\), or have eight bits, as `key` "
        r"\(float8_e4m3fn, float8_e5m2\); it is int32\. Cast it",
    ),
    ("mixed_dtypes", lambda: call(dtypes=(F32, jnp.bfloat16, F32)), TypeError,
     r"`query`, `key` and `value` must have one dtype.*query: float32\[2,8,4,16\], key: bfloat16"),
    ("no_array", lambda: jflex.flex_attention([1.0], array(1), array(1)), TypeError,
     r"`query` must be an array\. Got list"),
    ("head_ratio", lambda: call((2, 8, 3, 16)), ValueError,
     r"`key` has 2 heads, which do not divide the 3 heads of `query`"),
    ("heads_of_value", lambda: call(value=(2, 8, 4, 16)), ValueError,
     r"`key` and `value` must have as many heads.*2 and 4"),
    ("head_sizes", lambda: call(key=(2, 8, 2, 32)), ValueError,
     r"`query` and `key` must have one head size.*16 and 32"),
    ("lengths", lambda: call(value=(2, 9, 2, 16)), ValueError, r"`key` and `value` must have one length.*8 and 9"),
    ("batch", lambda: call(key=(3, 8, 2, 16), value=(3, 8, 2, 16)), ValueError,
     r"`key` and `value` must have the batch size of `query`, or both 1.*2 \(query\), 3 \(key\), 3 \(value\)"),
    ("bnth_taken_for_btnh", lambda: call((2, 8, 64, 16), (2, 2, 96, 16), (2, 2, 96, 16)), ValueError,
     r"which do not divide.*pass layout='BNTH'"),
    ("layout", lambda: call(layout="BHTD"), ValueError, r"`layout` must be one of 'BTNH', 'BNTH'\. Got 'BHTD'"),
    # --- scale
    ("sinks_kind", lambda: call(sinks=1.0), TypeError, r"`sinks` must be a floating.*Got float.*jnp\.full"),
    ("normalize", lambda: call(normalize="l1"), ValueError, r"`normalize` must be 'softmax' or 'none'\. Got 'l1'"),
    ("normalize_lse", lambda: call(normalize="none", return_lse=True), ValueError,
     r"`return_lse` must be False with `normalize='none'`"),
    ("stats_unknown", lambda: call(return_stats=("lse", "min")), ValueError,
     r"`return_stats` must be a tuple of different names of 'lse', 'max', 'entropy'\. Got 'min'\. Leave it out"),
    ("stats_list", lambda: call(return_stats=["max"]), TypeError, r"`return_stats` must be a tuple.*Got \['max'\]"),
    ("stats_twice", lambda: call(return_stats=("max", "max")), ValueError,
     r"`return_stats` must be.*different.*Got \('max', 'max'\)\. Pass each name once"),
    ("stats_and_lse", lambda: call(return_stats=("lse",), return_lse=True), ValueError,
     r"`return_lse` and `return_stats` cannot both be given.*Got return_lse=True.*Put 'lse' into"),
    ("stats_normalize", lambda: call(return_stats=("max",), normalize="none"), ValueError,
     r"`return_stats` must be \(\) with `normalize='none'`.*Got \('max',\)\. Leave one"),
    ("normalize_sinks", lambda: call(normalize="none", sinks=array(4)), ValueError, r"`sinks` enter the denominator"),
    ("sinks_dtype", lambda: call(sinks=jnp.zeros(4, int)), TypeError, r"`sinks` must.*Got int32\[4\]\. Cast"),
    ("sinks_shape", lambda: call(sinks=array(2)), ValueError, r"`sinks` must.*one logit.*\[4\]\. Got float32\[2\]"),
    ("scale_0", lambda: call(scale=0), ValueError, r"`scale` must be finite and not 0\. Got 0"),
    ("scale_bool", lambda: call(scale=True), TypeError, r"`scale` must be a Python number\. Got bool"),
    ("scale_array", lambda: call(scale=jnp.float32(2)), TypeError, r"`scale` must be a Python number.*score_mod"),
    # --- masks
    ("mask_as_block_mask", lambda: call(block_mask=mask), TypeError, r"`block_mask` must be a `BlockMask`.*`mask_mod`"),
    ("array_as_block_mask", lambda: call(block_mask=array(8, 8)), TypeError,
     r"`block_mask` must be a `BlockMask`\. Got an array\. Pass a mask.*`mask` of `jflex.dot_product_attention`"),
    (
        "pickled",
        lambda: pickle.dumps(block_mask(mod=lambda b, h, q, k: jax.nn.relu(q.astype(F32)) > 1)),
        TypeError,
        r"A BlockMask of .*<lambda> \(calls.py:\d+\) cannot be pickled: its primitive `custom_jvp_call` holds a "
        r"Python function.*`create_block_mask` in the process that uses it",
    ),
    ("both_masks", lambda: call(block_mask=block_mask(), mask_mod=mask), ValueError,
     r"cannot both be given.*and_masks"),
    ("mask_of_other_batch", lambda: call(block_mask=block_mask(B=3)), ValueError,
     r"`block_mask` has batch 3, the query 2.*B=2"),
    ("mask_of_key_heads", lambda: call(block_mask=block_mask(H=2)), ValueError,
     r"`block_mask` has heads 2, the query 4.*H=4"),
    ("longer_mask", lambda: call(block_mask=block_mask(T=16, S=16)), ValueError,
     r"is for 16 queries and 16 keys, the call has 8 and 8\. Crop it with `block_mask.with_lengths\(8, 8\)`"),
    ("mapped_mask", lambda: call(block_mask=jax.tree.map(lambda x: x[None], block_mask())), ValueError, r"jax\.vmap"),
    # --- lengths
    ("lengths_list", lambda: call(kv_lengths=[1, 2]), TypeError,
     r"`kv_lengths` must be an int32 array \[B\].*Got list; pass `jnp.asarray"),
    ("lengths_int64", lambda: call(kv_lengths=np.array([1, 2])), TypeError,
     r"Got int64\[2\]; cast it with `\.astype\(jnp\.int32\)`"),
    ("lengths_shape", lambda: call(kv_lengths=within(1, 2, 3)), ValueError,
     r"each of the 2 batch entries\. Got int32\[3\]\."),
    ("lengths_scalar", lambda: call(kv_lengths=jnp.int32(4)), ValueError,
     r"Got int32\[\]\. For one length for all, pass `jnp\.full\(2, length"),
    ("lengths_beyond", lambda: call(kv_lengths=within(8, 9)), ValueError,
     r"S, the number of keys, 8\..* 1 has 9\. Make"),
    # --- eight bits
    ("eight_wide_key", lambda: call(dtypes=(E4M3, BF16, BF16)), TypeError,
     r"^`query` and `key` must have one dtype where one of them has eight bits \(float8_e4m3fn, float8_e5m2\)\. "
     r"Quantize both, .*Got query: float8_e4m3fn\[2,8,4,16\], key: bfloat16"),
    ("eight_narrow_value", lambda: call(dtypes=(E4M3,) * 3), TypeError,
     r"^`value` must be bfloat16 or float16 where `query` and `key` have eight bits: weights and output have"),
    ("eight_query_mod", lambda: call(dtypes=EIGHT, query_mod=lambda x, b, h, i: -x), TypeError,
     r"^`query_mod` must be None where `query` and `key` have eight bits: its result would be rounded to "
     r"float8_e4m3fn\. Apply it before they are quantized\."),
    ("eight_integer_query", lambda: call(dtypes=(jnp.int8, BF16, BF16)), TypeError,
     r"^`query` must be floating-point \(.*\), or have eight bits, as `key` \(float8_e4m3fn, float8_e5m2\); it is "
     r"int8\. Cast it\."),
    ("eight_weights", lambda: jflex.attention_weights(*(array(1, 8, 2, 16, dtype=E4M3),) * 2), TypeError,
     r"^`query` must be floating-point .*; it is float8_e4m3fn\. Cast it\."),
    # --- dropout
    ("rate_without_key", lambda: call(dropout_rate=0.1), ValueError,
     r"`dropout_rate` is 0\.1, and there is no `dropout_key`\. Pass one, as `jax\.random\.key\(0\)`"),
    ("rate_of_1", lambda: call(dropout_rate=1), ValueError,
     r"`dropout_rate` must be at least 0 and less than 1\. Got 1"),
    ("rate_traced", lambda: jax.jit(lambda x: call(dropout_rate=x))(0.1), TypeError,
     r"`dropout_rate` must be a Python"),
    ("key_as_seed", lambda: call(dropout_rate=0.1, dropout_key=0), TypeError,
     r"`dropout_key` must be one random key, as `jax\.random\.key\(0\)`, or uint32\[2\].*Got int"),
    ("several_keys", lambda: call(dropout_rate=0.1, dropout_key=jax.random.split(jax.random.key(0), 3)), ValueError,
     r"`dropout_key` must be one random key.*Got key<fry>\[3\]\. Index it, or `jax\.vmap`"),
    ("keys_of_two_heads", lambda: call(dropout_rate=0.1, dropout_key=jax.random.split(jax.random.key(0), (1, 2))),
     ValueError, r"`dropout_key` must be one key, or keys \[B, Hq\] .*Got keys \[1, 2\] for batch 2 and 4 heads"),
    ("key_without_rate", lambda: call(dropout_key=jax.random.key(0)), ValueError,
     r"`dropout_key` needs a `dropout_rate`.*`dropout_rate=0\.0` for evaluation"),
    # --- implementation
    ("unknown", lambda: call(implementation="cuda"), ValueError,
     r"'mosaic_gpu', 'triton', 'official_triton', 'xla', 'reference', a sequence of them, or None\. Got 'cuda'"),
    ("no_sequence", lambda: call(implementation=3), ValueError, r"`implementation` must be one of .* Got 3\."),
    ("empty_sequence", lambda: call(implementation=()), ValueError, r"at least one backend; the sequence is empty"),
    ("not_here", lambda: call(implementation="triton"), UnsupportedError,
     r"triton: it needs an NVIDIA GPU, and this call runs on cpu.*These do: 'xla', 'reference'"),
    ("none_of_them", lambda: call(implementation=("mosaic_gpu", "triton")), UnsupportedError,
     r"mosaic_gpu: it needs a Hopper GPU.*; triton: it needs an NVIDIA GPU.*implementation=None"),
    # --- config
    ("no_config", lambda: call(config={}), TypeError, r"`config` must be a `jflex.Config`\. Got dict"),
    ("tile_not_dividing", lambda: call(block_mask=block_mask(), config=Config(dq=Tiles(64, 32))), ValueError,
     r"`config.dq.block_q` must divide the block size of the mask, 32\. Got 64"),
    ("tile_zero", lambda: Tiles(0, 64), ValueError, r"`block_q` of a `Tiles` must be a positive integer\. Got 0"),
    ("tile_of_96", lambda: Tiles(96, 64), ValueError, r"power of two\. Got 96; the nearest are 64 and 128"),
    ("tiles_of_config", lambda: Config(forward=(64, 64)), TypeError,
     r"`forward` of a `Config` must be a `Tiles`, as `Tiles\(64, 64\)`\. Got \(64, 64\)"),
    # --- jflex.explain of a function
    ("explain_other", lambda: jflex.explain(jnp.sin, array(1)), TypeError,
     r"`explain` takes one of `jflex.flex_attention`, .*`jflex.cascade_attention` before the arguments.*Got sin"),
    ("explain_missing", lambda: jflex.explain(jflex.paged_attention, array(1, 2, 16)), TypeError,
     r"paged_attention\(\) missing a required argument: 'cache'"),
    # --- jflex.create_block_mask with a mask for this call
    ("mask_width", lambda: causal_mask(max_blocks=2.0), TypeError, r"`max_blocks` must be a Python int.*Got 2.0"),
    (
        "mask_too_narrow",
        lambda: jflex.create_block_mask(
            lambda b, h, q, k: q // 32 % 2 == k // 32 % 2, None, None, 256, 256, block_size=32, max_blocks=3
        ),
        ValueError,
        r"`max_blocks` is 3, but a query block.*needs 4 entries for its full key blocks.*Pass `max_blocks=4` or more",
    ),
]  # fmt: skip
