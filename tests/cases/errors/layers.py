"""Wrong layers, and wrong calls of layers and of `attention_fn`."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import jflex
from flax_layers import attention_fn, functional
from flax_layers.attention.selection import BlockSelection
from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel
from flax_layers.nnx import DenseCache, EightBitCache, MultiHeadLatentAttention
from flax_layers.rotary_scaling import LongRopeScaling
from jflex.paged import PagedBatch, PagedCache
from tests.cases.errors.calls import mask as causal
from tests.support.layer_flavours import FLAVOURS, HEADS, LinenAlibi

FEATURES, LENGTH, ROOM = 24, 21, 32
FLOAT, INT8 = {"dtype": jnp.float32}, {"dtype": jnp.int8}
BATCH = PagedBatch(jnp.array([0, 2]), jnp.array([2]), jnp.array([[1, 2]]))
COUNTS, NUMBERS = jnp.ones((1, 1, 2), jnp.int32), jnp.arange(2).reshape(1, 1, 2, 1)
# Of lists that hide more than its mask_mod.
LISTED = jflex.BlockMask.from_kv_blocks(COUNTS, NUMBERS, block_size=16, mask_mod=causal, seq_lengths=(32, 32))
LATENT = {"latent_dim": 32, "nope_head_dim": 12, "rope_head_dim": 8, "value_head_dim": 10}
ABSENT = NotImplementedError


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def layer(flavour: str = "nnx", **options):
    sizes = {"num_kv_heads": 2, "head_dim": 8, "mask_mod": causal}
    return FLAVOURS[flavour].make(FEATURES, **(sizes | options))


def decode(batch: int = 2, cache=None, lengths=None, of=None, **options):
    """Decodes 21 tokens of each sequence with a cache for two sequences of 32."""
    of = of or layer()
    cache = of.init_cache(2, ROOM) if cache is None else cache
    cache = cache if lengths is None else cache.with_lengths(lengths)
    return of.decode(ones(batch, LENGTH, FEATURES), cache, **options)


def decode_paged(inputs=None, cache=None, batch=BATCH, of=None, **options):
    of = of or layer()
    cache = of.init_paged_cache(8, 4) if cache is None else cache
    return of.decode_paged(ones(2, FEATURES) if inputs is None else inputs, cache, batch, **options)


def crossed(batch: int = 3, memory: int = 3, **options):
    of = FLAVOURS["nnx"].make(16, in_kv_features=FEATURES)
    return of(ones(batch, 5, 16), inputs_kv=ones(memory, 40, FEATURES) if memory else None, **options)


def latent(**options) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(48, HEADS, **(LATENT | options), rngs=nnx.Rngs(0))


def decode_latent(tokens: int = 2, batch: int = 2, cache=None, **options):
    cache = latent().init_cache(2, 8) if cache is None else cache
    return latent().decode(ones(batch, tokens, 48), cache, **options)


def decode_latent_paged(inputs=None, cache=None, lengths=(20,), **options):
    batch = PagedBatch(jnp.array([0, 2]), jnp.array(lengths), jnp.array([[1, 2]]))
    cache = latent().init_paged_cache(4, 16) if cache is None else cache
    return latent().decode_paged(ones(2, 48) if inputs is None else inputs, cache, batch, **options)


def in_flax(key_batch: int = 2, function=None, **handed):
    """A call as Flax's own layers make it."""
    query, key = ones(2, 9, HEADS, 8), ones(key_batch, 9, HEADS, 8)
    return (function or attention_fn())(query, key, query, **handed)


def selecting(*args, **options):
    selection = BlockSelection(*args, **options)
    return layer(block_mask=selection, mask_mod=None)(ones(2, 48, FEATURES))


SELECTION = BlockSelection(3, block_size=16)
HALF = {"short_factors": (1.0,) * 4, "long_factors": (1.0,) * 4, "original_max_positions": 16, "max_positions": 32}
CAP = nnx.Param(jnp.array(2.0))
VECTORS = {"query_mod": lambda x, b, h, i: x, "output_mod": lambda x, lse, b, h, i: x}

# Name, how to provoke it, type, what the message holds.
ROWS = [
    # --- sizes
    *(
        (f"{flavour}_{name}", functools.partial(FLAVOURS[flavour].make, FEATURES, **sizes), ValueError, message)
        for flavour in FLAVOURS
        for name, sizes, message in (
            ("key_heads", {"num_heads": 4, "num_kv_heads": 3},
             r"`num_kv_heads` must divide `num_heads`.*num_heads=4, num_kv_heads=3"),
            ("heads", {"num_heads": 5},
             r"`num_heads` must divide `in_features` if `head_dim` is .*in_features=24, num_heads=5"),
            ("rate_below_0", {"dropout_rate": -0.1}, r"`dropout_rate` must be at least 0 and less than 1\. Got"),
            ("rate_of_1", {"dropout_rate": 1.0}, r"`dropout_rate` must be at least 0 and less than 1\. Got"),
        )
    ),
    ("rotary_dim", lambda: functional.rotate(ones(1, 2, 1, 8), jnp.arange(2), rotary_dim=10), ValueError,
     r"`rotary_dim` must be between 0 and the head size, 8\. Got 10"),
    *(
        (f"longrope_{name}",
         lambda name=name: functional.rotate(ones(1, 2, 1, 8), jnp.arange(2),
                                             scaling=LongRopeScaling(**(HALF | {name: (1.0,) * 3}))),
         ValueError,
         rf"`{name}` of a LongRopeScaling must hold one factor for each of the 4 pairs .* Got 3\. Change them, or")
        for name in ("short_factors", "long_factors")
    ),
    *(
        (f"positions_{'x'.join(map(str, shape)) or 'scalar'}",
         lambda shape=shape: layer(rotary_base=9.0)(ones(2, 3, FEATURES), positions=jnp.zeros(shape, jnp.int32)),
         ValueError,
         rf"`positions` must be one for each token, \[2, 3\], .* Got \[{', '.join(map(str, shape))}\]\. Add `jnp")
        for shape in ((), (2, 1), (4,), (1, 2, 3))
    ),
    *(
        (f"{flavour}_{name}",
         lambda flavour=flavour, name=name: layer(flavour)(ones(2, 3, FEATURES), **{name: None}), TypeError,
         rf"`{name}` is not an argument of this call. .* dense mask as `mask_mod=lambda b, h, q_idx, kv_i")
        for flavour, name in (("nnx", "mask"), ("linen", "mask"), ("nnx", "dropout_rng"), ("linen", "decode"))
    ),
    # --- dense caches
    ("no_dense_cache", lambda: decode(cache=layer().init_paged_cache(4, 4)), TypeError,
     "`cache` must be a DenseCache. Got PagedCache.*`layer.init_cache`.*`layer.decode_paged`"),
    ("batch", lambda: decode(3), ValueError,
     r"`inputs` must have as many sequences as the cache, 2. Got 3, the product of .* of \(3, 21, 24\)"),
    ("more_tokens_than_the_cache_holds", lambda: jax.jit(decode)(cache=layer().init_cache(2, 20)), ValueError,
     "room for 20 tokens per sequence. Its longest has 0, and 21 more do not fit. .*larger `max_length`"),
    ("heads_of_another_layer", lambda: decode(cache=layer(num_kv_heads=4).init_cache(2, ROOM)), ValueError,
     r"`k` must be \[2, T, 4, 8\], with batch, heads and head size of the cache. Got \[2, 21, 2, 8\]"),
    ("lists_that_hide_more", lambda: decode(of=layer(mask_mod=None, block_mask=LISTED)), ValueError,
     "`block_mask` of this layer's constructor masks more than its mask_mod.*Pass `mask_mod` to this call"),
    ("size_of_no_integer", lambda: layer().init_cache(2, 4.0), TypeError, "`max_length` must be an integer. Got f"),
    ("dtype", lambda: layer().init_cache(2, 4, dtype=jnp.int32), TypeError,
     "`dtype` must be floating-point, of 16 bits or more. Got int32. An `EightBitCache` holds"),
    ("sixteen_bits_with_scales", lambda: EightBitCache.create(2, 4, 2, 8, dtype=jnp.bfloat16), TypeError,
     "`dtype` must be `float8_e4m3fn`, `float8_e5m2` or `int8`. Got bfloat16. Make a `DenseCache`"),
    ("block_mask_over_eight_bits", lambda: decode(2, layer().init_cache(2, ROOM, **INT8), block_mask=LISTED),
     ValueError, "`block_mask` must be None with an EightBitCache. Got a BlockMask. Pass its `mask_mod`"),
    ("keys_of_another_batch", lambda: layer().init_cache(2, 4, **INT8).append(*[ones(3, 1, 2, 8)] * 2), ValueError,
     r"`k` and `v` must be \[2, T, Hkv, D\], with the batch of the cache. Got \[3, 1, 2, 8\] and .*init_cache"),
    ("lengths_beyond", lambda: layer().init_cache(2, 4).with_lengths(jnp.array([1, 5])), ValueError,
     r"`lengths` must lie within 0 and `max_length`, 4. Got \[1, 5\]"),
    # --- paged caches
    ("paged_axes", lambda: decode_paged(ones(1, LENGTH, FEATURES)), ValueError,
     r"`inputs` must be \[N, features\].*`qo_indptr`"),
    ("no_paged_cache", lambda: decode_paged(cache=layer().init_cache(1, 4)), TypeError,
     "`cache` must be a `PagedCache`. Got DenseCache"),
    # --- streaming
    ("no_window", lambda: Streaming(window=0), ValueError, r"`window` of `Streaming` must be at least 1. Got 0"),
    ("half_a_window", lambda: Streaming(window=2.5), TypeError, r"`window` must be an integer. Got float"),
    ("streaming_vector_mods", lambda: decode_paged(streaming=Streaming(2, 8), **VECTORS), ValueError,
     r"`streaming` moves queries.*Leave one of them out"),
    # --- cross-attention
    ("cross_features", lambda: crossed(memory=0), ValueError, "projected from `in_kv_features`, 24, in the la"),
    ("cross_batch", lambda: crossed(3, 2), ValueError,
     r"`inputs_kv` must be .* Got \[2, 40, 24\] and `inputs` \[3, 5, 16\]"),
    ("cross_selection", lambda: crossed(block_mask=SELECTION), ValueError,
     "`block_mask` must not be a BlockSelection in a call with `inputs_kv`"),
    ("cross_context", lambda: crossed(context=object()), ValueError,
     "`context` divides the tokens of self-attention"),
    # --- selected blocks
    ("selection_decode", lambda: decode(of=layer(mask_mod=None, block_mask=SELECTION)), ValueError,
     r"is a BlockSelection.*cannot be used for decoding\. Pass `mask_mod` to this call"),
    ("selection_k", lambda: selecting(2, block_size=16, local_blocks=2, initial_blocks=1), ValueError,
     r"`k` must be at least.*3 for query block 2.*Got 2"),
    ("selection_context",
     lambda: layer(mask_mod=None, block_mask=SELECTION)(
         ones(2, 32, FEATURES), context=ContextParallel(jax.make_mesh((1,), ("context",)))), ValueError,
     r"must not be a BlockSelection in a call with `context`"),
    # --- latent attention
    ("latent_dense_cache", lambda: decode_latent(cache=DenseCache.create(1, 8, 1, 4, **FLOAT)), TypeError,
     r"`cache` must be a DenseLatentCache\. Got DenseCache\."),
    ("latent_rows", lambda: latent().init_cache(2, 8).append(ones(2, 1, 31), ones(2, 1, 8)), ValueError,
     r"`latent` must be \[2, T, 32\]"),
    ("latent_paged_cache", lambda: decode_latent_paged(cache=PagedCache.create(4, 16, 1, 40, **FLOAT)), TypeError,
     r"`cache` must be a `LatentCache`\. Got PagedCache\."),
    ("latent_not_new", lambda: decode_latent_paged(new_prompts=True), ValueError,
     r"Request 0 has 2 tokens and 20 keys\."),
    ("latent_slopes", lambda: latent(score_mod=jflex.scores.alibi(ones(3))), ValueError, "3"),
    # --- in Flax's own layers
    ("fn_dropout", lambda: in_flax(dropout_rate=0.1, broadcast_dropout=False), ValueError, "`dropout_rng` is missing"),
    ("fn_sowing", lambda: in_flax(module=nnx.Module()), ABSENT, "`module` is set to sow the attention weights"),
    ("fn_positions", lambda: in_flax(input_positions=jnp.arange(9)), ABSENT, "`input_positions` are for a rotary"),
    ("fn_score_einsum", lambda: in_flax(qk_attn_weights_einsum=jnp.einsum), ABSENT,
     "`qk_attn_weights_einsum` would replace"),
    ("fn_two_precisions", lambda: in_flax(precision=("high", "highest")), ValueError,
     "`precision` must be the same for both"),
    ("fn_mask", lambda: in_flax(mask=ones(2, 3, 9, 9)), ValueError,
     r"`mask` must .*\[2, 4, 9, 9\]. Got shape \[2, 3, 9, 9\]"),
    ("fn_bias", lambda: in_flax(bias=ones(1, 2, 1, 9, 9)), ValueError, "`bias` must broadcast to"),
    ("fn_batches", lambda: in_flax(3), ValueError,
     r"with the same batch axes. Got `query` \[2, 9, 4, 8\], `key` \[3, 9, 4, 8\]"),
    ("fn_two_masks", lambda: attention_fn(None, causal, LISTED), ValueError,
     "`mask_mod` and `block_mask` are two forms of one mask"),
    ("fn_hidden", lambda: attention_fn(functools.partial(lambda cap, s, *place: s * cap[...], CAP)), ValueError,
     r"`score_mod` holds a Param.*Make it a callable nnx.Module"),
    ("fn_listed", lambda: attention_fn(block_mask=LISTED, decode=True), ValueError,
     r"`block_mask` masks more than its mask_mod, .* `decode`"),
    ("fn_unbound", lambda: in_flax(function=attention_fn(LinenAlibi())), ValueError,
     r"`score_mod` is an unbound linen module, LinenAlibi: .* create it in the module"),
]  # fmt: skip
