"""MaxText: an attention type `flex`, with packed documents, windows, soft caps and sinks on GPUs.

    from maxtext.layers.attention_op import AttentionOp

    AttentionOp.apply_attention = with_flex(AttentionOp.apply_attention)  # then attention=flex in the configuration

As a patch it is the branch ``elif self.attention_kernel == "flex"`` of `apply_attention` and the function
`flex_attention` below. In release 0.2.5, `cudnn_flash_jax` ignores segment ids when it trains
(AI-Hypercomputer/maxtext issue 4476), and `flash` on a GPU materializes them as [B, T, T] and ignores windows and soft
caps. Here all become a BlockMask and a mod: nothing of size T times T exists, and blocks between documents are skipped.

Queries come scaled, as MaxText has them. Attention weights are not dropped, as with `dot_product`. Decoding goes to
`dot_product`, as with `flash` on a GPU. Arguments that `flex` does not know raise NotImplementedError.

The constructor of `AttentionOp` refuses block diffusion on kernels that it does not know: a patch adds `flex` there.

Tested in `tests/integrations/` against `AttentionOp` of MaxText 0.2.5 with `dot_product`, on a CPU.
"""

import functools
import inspect

import jax.numpy as jnp

import jflex
from jflex import masks, scores

UNKNOWN = ("indexer_mask", "compressed_mask", "record_max_logits", "pad_kv_total", "compress_ratio")


def with_flex(apply_attention):
    """Adds the attention kernel `flex` to `AttentionOp.apply_attention`."""
    signature = inspect.signature(apply_attention)

    @functools.wraps(apply_attention)
    def apply(op, *args, **kwargs):
        if op.attention_kernel != "flex":
            return apply_attention(op, *args, **kwargs)
        call = signature.bind(op, *args, **kwargs)
        call.apply_defaults()
        given = dict(call.arguments)
        if given["model_mode"] == "autoregressive":
            known = inspect.signature(op.apply_attention_dot).parameters
            return op.apply_attention_dot(**{name: value for name, value in given.items() if name in known})
        unknown = [name for name in UNKNOWN if given[name] is not None and given[name]]
        if unknown or op.config.moba or op._load_balanced_context_parallel():
            unknown = unknown or ["moba or load-balanced context parallelism"]
            raise NotImplementedError(f"attention=flex does not know {', '.join(unknown)}: use dot_product.")
        names = ("query", "key", "value", "decoder_segment_ids", "decoder_segment_ids_kv")
        names += ("previous_chunk", "bidirectional_mask", "sinks")
        return flex_attention(op, **{name: given[name] for name in names}), None, None

    return apply


def flex_attention(
    op,
    query,
    key,
    value,
    decoder_segment_ids=None,
    decoder_segment_ids_kv=None,
    previous_chunk=None,
    bidirectional_mask=None,
    sinks=None,
):
    """Attends in training and in prefill.

    Args:
      op: The `AttentionOp`.
      query: Scaled queries [B, T, Hq, D].
      key: Keys [B, S, Hkv, D], an array or a `KVTensor`.
      value: Values, as `key`.
      decoder_segment_ids: Documents of the queries [B, T], of all chunks if there is a previous one. A key whose id is
        negative is masked.
      decoder_segment_ids_kv: Documents of the keys [B, S], if they are others.
      previous_chunk: Keys before the first query, [B, P, ...], in chunked prefill.
      bidirectional_mask: True at tokens of images [B, S], which attend to all of their own image.
      sinks: A logit of each query head [Hq] in the denominator of its softmax.

    Returns:
      [B, T, Hq, Dv], normalized.
    """
    key, value = (x.dequant() if hasattr(x, "dequant") else x for x in (key, value))
    B, T, S = query.shape[0], query.shape[1], key.shape[1]
    start = 0 if previous_chunk is None else previous_chunk.shape[1]
    visible = jflex.with_offset(_pattern(op), start)
    batch = None
    if decoder_segment_ids is not None:
        queries = decoder_segment_ids[:, start : start + T]
        keys = decoder_segment_ids if decoder_segment_ids_kv is None else decoder_segment_ids_kv
        present = lambda b, h, q_idx, kv_idx: keys[b, kv_idx] >= 0
        visible, batch = jflex.and_masks(visible, masks.document(queries, keys), present), B
    if bidirectional_mask is not None:
        visible, batch = jflex.or_masks(visible, _same_image(bidirectional_mask, start)), B
    cap = op.attn_logits_soft_cap
    return jflex.flex_attention(
        query,
        key,
        value,
        scores.softcap(cap) if cap else None,
        jflex.create_block_mask(visible, batch, None, T, S),
        sinks=sinks,
        scale=1.0,
    )


def _pattern(op) -> jflex.MaskMod:
    """The mask of an attention type, on positions in the row."""
    kind = op.attention_type.value
    if kind in ("global", "mla"):
        return masks.causal()
    if kind == "local_sliding":
        return masks.sliding_window(op.sliding_window_size - 1)
    if kind == "chunk":
        return masks.batchify(masks.causal(), op.chunk_attn_window_size)
    if kind == "block_diffusion":
        size = op.causal_block_size
        return lambda b, h, q_idx, kv_idx: q_idx // size >= kv_idx // size
    if kind == "full":
        return jflex.noop_mask
    raise NotImplementedError(f"attention=flex does not know the attention type {kind!r}: use dot_product.")


def _same_image(bidirectional_mask, start: int) -> jflex.MaskMod:
    """Shows to each token of an image all of its image: a run of tokens that `bidirectional_mask` marks."""
    marked = bidirectional_mask.astype(jnp.int32)
    before = jnp.pad(marked, ((0, 0), (1, 0)))[:, :-1]
    images = marked * jnp.cumsum(marked > before, axis=1, dtype=jnp.int32)

    def mod(b, h, q_idx, kv_idx):
        return (images[b, start + q_idx] == images[b, kv_idx]) & (images[b, kv_idx] > 0)

    return mod
