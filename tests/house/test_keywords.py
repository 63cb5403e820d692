"""Keywords of PyTorch, `jax.nn`, Flax and FlashAttention: each call answers with the way to write it here."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import flax_layers
import jflex
from jflex._check.keywords import _ANSWERS

X = jnp.zeros((1, 8, 2, 16))
PACKED = jnp.zeros((8, 2, 16))
dense = functools.partial(jflex.flex_attention, X, X, X)
drop_in = functools.partial(jflex.dot_product_attention, X, X, X)
varlen = functools.partial(jflex.flex_attention_varlen, PACKED, PACKED, PACKED)
make_mask = functools.partial(jflex.create_block_mask, jflex.masks.causal(), None, None, 8, 8)
paged = functools.partial(jflex.paged_attention, PACKED, None, None)

# The call, a keyword, what the message says after "has no argument".
ROWS = [
    (make_mask, {"BLOCK_SIZE": 128}, "Pass `block_size`"),
    (make_mask, {"device": "cuda"}, r"Leave it out.*`jax\.default_device`"),
    (make_mask, {"_compile": True}, "Leave it out"),
    (functools.partial(jflex.BlockMask.from_kv_blocks, None, None), {"BLOCK_SIZE": 128}, "Pass `block_size`"),
    (functools.partial(jflex.BlockMask.from_kv_blocks, None, None), {"compute_q_blocks": False}, "Leave it out"),
    (functools.partial(jflex.create_mask, None, None, None, 8, 8), {"device": "cuda"}, "Leave it out"),
    (functools.partial(jflex.create_mask, B=1, H=1, Q_LEN=8, KV_LEN=8), {"mod_fn": None}, "Pass `mask_mod`"),
    (dense, {"BLOCK_SIZE": 128}, r"`create_block_mask\(\.\.\., block_size=128\)`"),
    (dense, {"enable_gqa": True}, "Leave it out: `key` and `value` may have fewer heads"),
    (dense, {"kernel_options": {"BLOCK_M": 64}}, r"`config=jflex\.Config\(\.\.\.\)`"),
    (dense, {"return_aux": None}, r"`return_lse=True`, or `return_stats="),
    (dense, {"is_causal": True}, r"BlockMask of `jflex\.masks\.causal\(\)`"),
    (dense, {"causal": True}, r"BlockMask of `jflex\.masks\.causal\(\)`"),
    (dense, {"attn_mask": None}, r"`jflex\.dot_product_attention` takes a dense one, as `mask`"),
    (dense, {"mask": None}, r"Write its rule as a `mask_mod`"),
    (dense, {"bias": X}, r"`score_mod=jflex\.scores\.bias\(bias\)`"),
    (dense, {"dropout_p": 0.1}, "`dropout_rate` and `dropout_key`"),
    (dense, {"local_window_size": 3}, r"`jflex\.masks\.sliding_window\(left, right\)`"),
    (dense, {"key_value_seq_lengths": None}, "Pass `kv_lengths`"),
    (dense, {"query_seq_lengths": None}, r"`q_idx < lengths\[b\]`"),
    (dense, {"return_residual": True}, "Pass `return_lse=True`"),
    (dense, {"softmax_scale": 1.0}, "Pass `scale`"),
    (dense, {"window_size": (3, 0)}, "sliding_window"),
    (dense, {"softcap": 30.0}, r"`score_mod=jflex\.scores\.softcap\(cap\)`"),
    (dense, {"alibi_slopes": None}, r"`score_mod=jflex\.scores\.alibi\(slopes\)`"),
    (dense, {"cu_seqlens_q": None}, r"`jflex\.flex_attention_varlen`"),
    (dense, {"cache_seqlens": None}, "Pass `kv_lengths`"),
    (dense, {"block_table": None}, r"`jflex\.paged_attention`"),
    (dense, {"s_aux": None}, "Pass `sinks`"),
    (functools.partial(jflex.flex_attention), {"q": X}, "Pass `query`"),
    (drop_in, {"attn_mask": X}, "Pass booleans as `mask`"),
    (drop_in, {"enable_gqa": True}, "Leave it out"),
    (drop_in, {"dropout_p": 0.1}, r"`jflex\.flex_attention` has `dropout_rate`"),
    (drop_in, {"score_mod": None}, r"`jflex\.flex_attention` takes it"),
    (drop_in, {"return_lse": True}, "Pass `return_residual=True`"),
    (drop_in, {"kv_lengths": None}, "Pass `key_value_seq_lengths`"),
    (drop_in, {"causal": True}, "Pass `is_causal`"),
    (varlen, {"max_seqlen_q": 8}, "Leave it out"),
    (varlen, {"is_causal": True}, r"BlockMask of `jflex\.masks\.causal\(\)`"),
    (varlen, {"query": PACKED}, "Pass `q`"),
    (varlen, {"kv_lengths": None}, "`cu_seqlens_q` and `cu_seqlens_k`"),
    (paged, {"block_table": None}, "`page_table` of the `PagedBatch`"),
    (paged, {"cache_seqlens": None}, "`kv_lengths` of the `PagedBatch`"),
    (paged, {"causal": True}, r"Pass `mask_mod=jflex\.masks\.causal\(\)`"),
    (functools.partial(jflex.cascade_attention, PACKED, []), {"softmax_scale": 1.0}, "Pass `scale`"),
    (functools.partial(jflex.mla_attention, PACKED, None, None), {"softmax_scale": 1.0}, "Pass `scale`"),
    (functools.partial(jflex.sparse_mla_attention, PACKED, None, None), {"causal": True}, "causal"),
    (functools.partial(jflex.context_parallel_attention, X, X, X), {"bias": X}, "scores.bias"),
    (functools.partial(jflex.attention_weights, X, X), {"is_causal": True}, "causal"),
    (functools.partial(jflex.explain, X, X, X), {"enable_gqa": True}, "Leave it out"),
    (functools.partial(jflex.explain, jflex.paged_attention, PACKED), {"block_table": X}, "`page_table`"),
]


@pytest.mark.parametrize(("call", "keyword", "remedy"), ROWS)
def test_a_foreign_keyword_is_answered(call, keyword, remedy):
    (name,) = keyword
    with pytest.raises(TypeError, match=rf"has no argument `{name}`\. .*{remedy}"):
        call(**keyword)


def test_a_name_of_nobody_is_answered_by_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        dense(scales=1.0)


def test_every_answer_fits_a_call():
    """An answer that no function can give is dead."""
    calls = [x for x in vars(jflex).values() if inspect.isfunction(x) and hasattr(x, "__wrapped__")]
    calls += [jflex.BlockMask.from_kv_blocks, flax_layers.attention_fn]
    parameters = [inspect.signature(call).parameters.keys() for call in calls]
    for name, answers in _ANSWERS.items():
        without = [names for names in parameters if name not in names]
        shown = {next((n for n, _ in answers if not n or n in names), None) for names in without}
        assert {needed for needed, _ in answers if needed != name} <= shown, name


def layer_of(flavour: str, function):
    if flavour == "nnx":
        return nnx.MultiHeadAttention(2, 8, attention_fn=function, decode=False, rngs=nnx.Rngs(0))
    layer = linen.MultiHeadDotProductAttention(2, attention_fn=function)
    return lambda x: layer.init_with_output(jax.random.key(0), x)[0]


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
@pytest.mark.parametrize(
    "function", [flax_layers.attention_fn, jflex.dot_product_attention, functools.partial(jflex.flex_attention)]
)
def test_another_function_in_a_layer_of_flax(flavour, function):
    """Linen would leave out the keywords that a function does not have: `flex_attention` would run without the mask."""
    rule = r"`attention_fn` of a layer of Flax must be what `flax_layers\.attention_fn\(\)` returns\. Got `\w+_\w+`"
    with pytest.raises(TypeError, match=rule):
        layer_of(flavour, function)(jnp.zeros((1, 4, 8)))
