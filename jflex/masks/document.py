"""Packed documents: several sequences in one row, none of which sees another."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32

from jflex.mods import MaskMod


def document(q_ids: Int[ArrayLike, "*B T"], kv_ids: Int[ArrayLike, "*B S"] | None = None) -> MaskMod:
    """Shows the keys of the query's own document. Join it with `causal` for a packed language model.

    Args:
      q_ids: The document of every query, [T] for one packing that all batch entries share, or [B, T].
      kv_ids: The document of every key; None: that of the queries.

    Returns:
      A mask_mod; it uses ``b`` if the ids have a batch axis.

    Raises:
      ValueError: The ids do not have one or two axes.

    >>> from jflex.dense_mask import create_mask
    >>> create_mask(document(jnp.array([0, 0, 1])), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    q_ids = jnp.asarray(q_ids)
    kv_ids = q_ids if kv_ids is None else jnp.asarray(kv_ids)
    if q_ids.ndim not in (1, 2) or kv_ids.ndim != q_ids.ndim:
        raise ValueError(
            f"document ids must be [T] or [B, T], alike for queries and keys. Got {q_ids.shape} and {kv_ids.shape}."
        )
    if q_ids.ndim == 1:
        return lambda b, h, q_idx, kv_idx: q_ids[q_idx] == kv_ids[kv_idx]
    return lambda b, h, q_idx, kv_idx: q_ids[b, q_idx] == kv_ids[b, kv_idx]


def document_ids_from_lengths(lengths: Int[ArrayLike, " N"], total: int) -> Int32[Array, " {total}"]:
    """The document of every place of a row in which documents of these lengths follow one another.

    Args:
      lengths: Their lengths; traced ones too.
      total: Length of the row. Places after the last document form one more, number ``N``.

    Returns:
      Numbers from 0, ascending.

    >>> document_ids_from_lengths(jnp.array([2, 3]), 6).tolist()
    [0, 0, 1, 1, 1, 2]
    """
    ends = jnp.cumsum(jnp.asarray(lengths, jnp.int32), dtype=jnp.int32)
    return jnp.searchsorted(ends, jnp.arange(total, dtype=jnp.int32), side="right").astype(jnp.int32)
