"""Packed documents: several sequences in one row, none of which attends to another."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32

from jflex.mods.array_sizes import Axis, ReadyMod, Requirement
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


def document(q_ids: Int[ArrayLike, "*B T"], kv_ids: Int[ArrayLike, "*B S"] | None = None) -> MaskMod:
    """Shows the keys of the query's own document. Combine it with `causal` for a packed language model.

    Args:
      q_ids: The document of every query, integers [T] for one packing that all batch entries share, or [B, T]. They
        may be longer than a call.
      kv_ids: The document of every key; None for `q_ids`.

    Returns:
      A mask_mod; it uses ``b`` if the ids have a batch axis.

    Raises:
      TypeError: The ids are not integers.
      ValueError: The ids do not have one or two axes, or are for different batch sizes.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(document(jnp.array([0, 0, 1])), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    q_ids = checked_array(q_ids, "`q_ids` of `document`", "integers")
    kv_name = "q_ids" if kv_ids is None else "kv_ids"
    kv_ids = q_ids if kv_ids is None else checked_array(kv_ids, "`kv_ids` of `document`", "integers")
    if q_ids.ndim not in (1, 2) or kv_ids.ndim != q_ids.ndim or q_ids.shape[:-1] != kv_ids.shape[:-1]:
        raise ValueError(
            f"document ids must be [T] or [B, T], alike for queries and keys. Got {q_ids.shape} and {kv_ids.shape}."
        )
    required = (
        _positions("q_idx", q_ids.shape[-1], "q_ids", "query"),
        _positions("kv_idx", kv_ids.shape[-1], kv_name, "key"),
    )
    if q_ids.ndim == 1:
        return ReadyMod(lambda b, h, q_idx, kv_idx: q_ids[q_idx] == kv_ids[kv_idx], required)
    rows = Requirement(
        "b",
        q_ids.shape[0],
        "`q_ids` of `document` must hold one row for each batch entry",
        "Pass ids [{}, T], or [T] for ids that all batch entries share.",
    )
    return ReadyMod(lambda b, h, q_idx, kv_idx: q_ids[b, q_idx] == kv_ids[b, kv_idx], (rows, *required))


def _positions(axis: Axis, size: int, argument: str, of: str) -> Requirement:
    rule = f"`{argument}` of `document` must hold one id for each {of}"
    return Requirement(axis, size, rule, "Pass {} ids; padding can be a document of its own.")


def document_ids_from_lengths(lengths: Int[ArrayLike, " N"], total: int) -> Int32[Array, " {total}"]:
    """The document id of every token of a row of consecutive documents of these lengths.

    Args:
      lengths: Their lengths; may be traced.
      total: Length of the row. Tokens after the last document form one more, with the id ``N``.

    Returns:
      Ids from 0, ascending.

    Raises:
      TypeError: The lengths are not integers.
      ValueError: The lengths do not have one axis.

    >>> document_ids_from_lengths(jnp.array([2, 3]), 6).tolist()
    [0, 0, 1, 1, 1, 2]
    """
    lengths = checked_array(lengths, "`lengths` of `document_ids_from_lengths`", "integers", "[N]")
    ends = jnp.cumsum(lengths.astype(jnp.int32), dtype=jnp.int32)
    return jnp.searchsorted(ends, jnp.arange(total, dtype=jnp.int32), side="right").astype(jnp.int32)
