"""Keywords of public calls: names that other attention libraries have, and a key for dropout without its rate.

A call with a keyword of PyTorch, `jax.nn`, Flax or FlashAttention is refused like any unknown keyword, but the message
names jflex's argument or another way to the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Answers of a name: the argument that a function must have for it, "" for every function, and the remedy.
_Answer = tuple[str, str]
_OF_FLAX = (("", "Flax's attention layers take `attention_fn=flax_layers.attention_fn()`."),)
_CAUSAL = (
    ("is_causal", "Pass `is_causal`."),
    ("block_mask", "Pass the BlockMask of `jflex.masks.causal()`, or `mask_mod=jflex.masks.causal()`."),
    ("mask_mod", "Pass `mask_mod=jflex.masks.causal()`."),
)
_MASK = (("mask_mod", "Write its rule as a `mask_mod`. `jflex.dot_product_attention` takes a dense one, as `mask`."),)
_BIAS = (("score_mod", "Pass `score_mod=jflex.scores.bias(bias)` for a bias [B or 1, H or 1, T, S]."),)
_SCALE = (("scale", "Pass `scale`."),)
_DROPOUT = (
    ("dropout_rate", "Pass `dropout_rate` and `dropout_key`."),
    ("", "`jflex.flex_attention` has `dropout_rate` and `dropout_key`."),
)
_WINDOW = (
    ("local_window_size", "Pass `local_window_size`."),
    ("mask_mod", "Pass `jflex.masks.sliding_window(left, right)` as `mask_mod`, or a BlockMask of it."),
)
_LENGTHS = (
    ("kv_lengths", "Pass `kv_lengths`, int32 [B]."),
    ("key_value_seq_lengths", "Pass `key_value_seq_lengths`, int32 [B]."),
    ("cu_seqlens_k", "Pass the boundaries of the sequences, `cu_seqlens_q` and `cu_seqlens_k`."),
    ("batch", "They are `kv_lengths` of the `PagedBatch`."),
)
_PACKED = (
    ("cu_seqlens_q", "Pass `cu_seqlens_q` and `cu_seqlens_k`."),
    ("", "Packed sequences go to `jflex.flex_attention_varlen`."),
)
_KNOWN = (("", "Leave it out: the boundaries tell it."),)
_LSE = (("return_lse", "Pass `return_lse=True`."), ("return_residual", "Pass `return_residual=True`."))
_SINKS = (("sinks", "Pass `sinks`."),)
_FLEX = (("query_seq_lengths", "`jflex.flex_attention` takes it."),)

_ANSWERS: dict[str, tuple[_Answer, ...]] = {
    # PyTorch: FlexAttention, BlockMask, scaled_dot_product_attention, varlen_attn
    "BLOCK_SIZE": (
        ("block_size", "Pass `block_size`."),
        ("", "Blocks are those of the mask, `create_block_mask(..., block_size=128)`, and tiles are in `config`."),
    ),
    "device": (("", "Leave it out: JAX computes where the arrays are, or on the device of `jax.default_device`."),),
    "_compile": (("", "Leave it out: it is compiled, and makes no Q_LEN x KV_LEN array."),),
    "compute_q_blocks": (("", "Leave it out: the lists of query blocks are always made."),),
    "mod_fn": (("mask_mod", "Pass `mask_mod`."),),
    "enable_gqa": (("", "Leave it out: `key` and `value` may have fewer heads, a divisor of those of `query`."),),
    "kernel_options": (("config", "Pass tile sizes as `config=jflex.Config(...)`, a backend as `implementation`."),),
    "return_aux": (("return_stats", "Pass `return_lse=True`, or `return_stats=('lse', 'max')`."), *_LSE),
    "attn_mask": (("mask", "Pass booleans as `mask`, numbers that are added to the scores as `bias`."), *_MASK),
    "dropout_p": _DROPOUT,
    "cu_seq_q": _PACKED,
    "cu_seq_k": _PACKED,
    "max_q": _KNOWN,
    "max_k": _KNOWN,
    # jax.nn.dot_product_attention, and arguments of flex_attention for its replacement
    "mask": _MASK,
    "bias": _BIAS,
    "is_causal": _CAUSAL,
    "local_window_size": _WINDOW,
    "key_value_seq_lengths": _LENGTHS,
    "query_seq_lengths": (
        ("kv_lengths", "Drop the outputs of padding, or hide its queries: `mask_mod` of `q_idx < lengths[b]`."),
        *_LENGTHS[2:],
    ),
    "return_residual": _LSE,
    "score_mod": _FLEX,
    "mask_mod": _FLEX,
    "block_mask": _FLEX,
    "kv_lengths": _LENGTHS[1:],
    "return_lse": _LSE[1:],
    "dropout_rate": _DROPOUT[1:],
    "dropout_key": _DROPOUT[1:],
    # Attention functions of Flax
    "dropout_rng": (("dropout_key", "Pass `dropout_key`."), *_OF_FLAX),
    "broadcast_dropout": _OF_FLAX,
    "deterministic": (("dropout_rate", "Dropout is off at `dropout_rate=0`."), *_OF_FLAX),
    "dtype": (("", "Cast the arrays: outputs have their dtype, and sums are in float32."),),
    "precision": (("", "Set it by `jax.default_matmul_precision`."),),
    "module": _OF_FLAX,
    "promote_dtype": _OF_FLAX,
    # FlashAttention
    "softmax_scale": _SCALE,
    "sm_scale": _SCALE,
    "causal": _CAUSAL,
    "window_size": _WINDOW,
    "softcap": (("score_mod", "Pass `score_mod=jflex.scores.softcap(cap)`."),),
    "alibi_slopes": (("score_mod", "Pass `score_mod=jflex.scores.alibi(slopes)`."),),
    "return_softmax_lse": _LSE,
    "return_attn_probs": (("", "`jflex.attention_weights` returns weights."),),
    "cu_seqlens_q": _PACKED[1:],
    "cu_seqlens_k": _PACKED[1:],
    "max_seqlen_q": _KNOWN,
    "max_seqlen_k": _KNOWN,
    "cache_seqlens": _LENGTHS,
    "seqused_k": _LENGTHS,
    "block_table": (("batch", "Pass it as `page_table` of the `PagedBatch`."), ("", "Use `jflex.paged_attention`.")),
    "num_splits": (("", "Leave it out: splits follow from the sizes. `Config(batch_invariant=True)` fixes them."),),
    "s_aux": _SINKS,
    "learnable_sink": _SINKS,
    "q": (("query", "Pass `query`."),),
    "k": (("key", "Pass `key`."),),
    "v": (("value", "Pass `value`."),),
    "query": (("q", "Pass `q`."),),
    "key": (("k", "Pass `k`."),),
    "value": (("v", "Pass `v`."),),
}


def check_keywords(caller: str, parameters: Collection[str], keywords: Mapping[str, object]) -> None:
    """Raises for keywords of a call that would be refused without an answer, or ignored."""
    if keywords.get("dropout_key") is not None and "dropout_rate" in parameters and "dropout_rate" not in keywords:
        raise ValueError(
            "`dropout_key` needs a `dropout_rate`, which is 0 by default. Pass the rate; `dropout_rate=0.0` for "
            "evaluation."
        )
    for name in keywords:
        answers = () if name in parameters else _ANSWERS.get(name, ())
        remedy = next((text for needed, text in answers if needed in parameters or not needed), None)
        if remedy is not None:
            raise TypeError(f"`{caller}` has no argument `{name}`. {remedy}")
