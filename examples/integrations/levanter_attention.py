"""Levanter: a backend of `levanter.models.attention.dot_product_attention`, on named arrays of Haliax.

The branch, in `dot_product_attention` before the branch of `use_flash`:

    if use_flex:
        return flex_attention(
            QPos, KPos, Key, query, key, value, mask, bias, dropout=dropout, inference=inference, key=prng,
            dtype=attention_dtype, precision=precision, score_mod=score_mod,
        )

Arguments are those of `levanter.models.flash_attention.flash_attention` in release 1.1, and `score_mod`. Scores are
never materialized, a causal mask skips blocks, and a mask array or a bias may lack any axis and is not broadcast. The
last axis that query and key share counts the key heads, the others are the batch; axes of the query alone count the
query heads of one key head. Mods get `b` and `h` in this order.

A query that attends to no key gives zeros; in Levanter, the mean of all values.

Levanter 1.1 does not install on Python 3.12: pip finds no versions that fit its pins. Tested on Haliax 1.4 with the
signature and the fields of `AttentionMask` of release 1.1, against dense attention: `tests/integrations/`.
"""

import math

import haliax as hax
import jax
import jax.numpy as jnp

import jflex
from jflex import masks


def flex_attention(
    QPos: hax.AxisSelector,
    KPos: hax.AxisSelector,
    Key: hax.AxisSelector,
    q: hax.NamedArray,
    k: hax.NamedArray,
    v: hax.NamedArray,
    mask=None,
    bias: hax.NamedArray | None = None,
    *,
    dropout: float = 0.0,
    inference: bool,
    key: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    precision=None,
    score_mod: jflex.ScoreMod | None = None,
) -> hax.NamedArray:
    """Attends, over one axis of queries and one of keys.

    Args:
      QPos: Axis of the queries.
      KPos: Axis of the keys, another one.
      Key: Axis of a head in `q` and `k`.
      q: Queries.
      k: Keys.
      v: Values; one axis beside those of `k` without `Key`.
      mask: A `levanter.models.attention.AttentionMask`, or an array that is True where a query attends.
      bias: Added to the scores; it gets gradients.
      dropout: Probability that a weight is dropped, unless `inference`.
      inference: Turns dropout off.
      key: A random key, for dropout.
      dtype: Of the arrays in the kernel; scores are float32 in any case.
      precision: Of the GEMMs, as of `jax.lax.dot_general`.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, after the bias.

    Returns:
      The attended values, with the axes of `q` but the last one of `v` for `Key`.
    """
    QPos, KPos, Key = q.resolve_axis(QPos), k.resolve_axis(KPos), k.resolve_axis(Key)
    shared = [axis for axis in q.axes if axis in k.axes and axis != Key]
    batch, heads = shared[:-1], shared[-1:]
    groups = [axis for axis in q.axes if axis not in (*shared, QPos, Key)]
    (Value,) = (axis for axis in v.axes if axis not in (*shared, KPos))
    place = lambda x, *axes: _merge(x if dtype is None else x.astype(dtype), *axes)
    arrays = (
        place(q, batch, [QPos], heads + groups, [Key]),
        place(k, batch, [KPos], heads, [Key]),
        place(v, batch, [KPos], heads, [Value]),
    )
    axes = (batch, heads + groups, [QPos], [KPos])
    with jax.default_matmul_precision(precision):
        out = jflex.flex_attention(
            *arrays,
            _score_mod(None if bias is None else _spread(bias, *axes), score_mod),
            _block_mask(mask, axes),
            dropout_rate=0.0 if inference else dropout,
            dropout_key=None if inference else key,
        )
    out_axes = [*batch, QPos, *heads, *groups, Value]
    out = hax.named(out.reshape([axis.size for axis in out_axes]), out_axes)
    return out.rearrange([Value if axis == Key else axis for axis in q.axes]).astype(v.dtype)


def _merge(x: hax.NamedArray, *groups: list[hax.Axis]) -> jax.Array:
    """One axis for each group, of size 1 for an empty one."""
    array = x.rearrange([axis for group in groups for axis in group]).array
    return array.reshape([math.prod(axis.size for axis in group) for group in groups])


def _spread(x: hax.NamedArray, *groups: list[hax.Axis]):
    """Reads an array at ``(b, h, q_idx, kv_idx)``; a group of which it has no axis is not broadcast."""
    kept = [group if any(axis in x.axes for axis in group) else [] for group in groups]
    array = _merge(x.broadcast_axis([axis for group in kept for axis in group]), *kept)
    return lambda *indices: array[tuple(i if group else 0 for i, group in zip(indices, kept, strict=True))]


def _score_mod(bias, score_mod: jflex.ScoreMod | None) -> jflex.ScoreMod | None:
    if bias is None:
        return score_mod

    def mod(score, b, h, q_idx, kv_idx):
        score = score + bias(b, h, q_idx, kv_idx).astype(score.dtype)
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

    return mod


def _block_mask(mask, axes) -> jflex.BlockMask | None:
    """The mask of an `AttentionMask` or of an array."""
    explicit = getattr(mask, "explicit_mask", None if hasattr(mask, "is_causal") else mask)
    visible = [masks.causal()] if getattr(mask, "is_causal", False) else []
    if explicit is not None:
        visible.append(_spread(explicit, *axes))
    if not visible:
        return None
    has = lambda group: explicit is not None and any(axis in explicit.axes for axis in group)
    B, H, T, S = (math.prod(axis.size for axis in group) for group in axes)
    return jflex.create_block_mask(
        jflex.and_masks(*visible), B if has(axes[0]) else None, H if has(axes[1]) else None, T, S
    )
