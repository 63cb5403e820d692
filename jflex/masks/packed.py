"""Masks of packed sequences: documents, and documents that share a prefix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int32

from jflex.mods.array_sizes import Axis, ReadyMod, Requirement, ready
from jflex.mods.arrays import at_compile_time, checked_array
from jflex.mods.compose import MaskMod


@ready
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
    kv_name = "`q_ids` of `document`" if kv_ids is None else "`kv_ids` of `document`"
    kv_ids = q_ids if kv_ids is None else checked_array(kv_ids, "`kv_ids` of `document`", "integers")
    if q_ids.ndim not in (1, 2) or kv_ids.ndim != q_ids.ndim or q_ids.shape[:-1] != kv_ids.shape[:-1]:
        raise ValueError(
            f"document ids must be [T] or [B, T], alike for queries and keys. Got {q_ids.shape} and {kv_ids.shape}."
        )
    required = (*for_ids("`q_ids` of `document`", q_ids, "q_idx"), *for_ids(kv_name, kv_ids, "kv_idx")[-1:])
    if q_ids.ndim == 1:
        return ReadyMod(lambda b, h, q_idx, kv_idx: q_ids[q_idx] == kv_ids[kv_idx], required)
    return ReadyMod(lambda b, h, q_idx, kv_idx: q_ids[b, q_idx] == kv_ids[b, kv_idx], required)


@ready
def causal_document(ids: Int[ArrayLike, "*B T"]) -> MaskMod:
    """Packed documents of a causal language model: the keys from the first token of the query's document to the query.

    The same as `causal` and `document` together where documents are consecutive; but a key is compared with two
    positions instead of a loaded id, by which paged and cascade attention skip tiles.

    Args:
      ids: The document of every token, integers [T] for one packing that all batch entries share, or [B, T]. They may
        be longer than a call. A document is a run of equal ids: an id that comes again is another document.

    Returns:
      A mask_mod; it uses ``b`` if the ids have a batch axis.

    Raises:
      TypeError: The ids are not integers.
      ValueError: The ids do not have one or two axes.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> print(create_block_mask(causal_document(jnp.array([0, 0, 0, 1, 1, 2])), None, None, 6, 6, block_size=1))
    BlockMask(shape=(1, 1, 6, 6), block_size=(1, 1), sparsity=72.22%)
    batch 0, head 0
    ██          |
    ████        |
    ██████      |
          ██    |
          ████  |
              ██|
    """
    ids = checked_array(ids, "`ids` of `causal_document`", "integers")
    if ids.ndim not in (1, 2):
        raise ValueError(f"`ids` of `causal_document` must be [T] or [B, T]. Got shape {ids.shape}.")
    begins = jnp.diff(ids, axis=-1, prepend=ids[..., :1]) != 0
    positions = jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    starts = jax.lax.cummax(jnp.where(begins, positions, 0), axis=ids.ndim - 1)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx >= (starts[q_idx] if ids.ndim == 1 else starts[b, q_idx])) & (q_idx >= kv_idx)

    return ReadyMod(mask, for_ids("`ids` of `causal_document`", ids, "q_idx"))


def for_ids(argument: str, ids: Int[Array, "*B T"], *axes: Axis) -> tuple[Requirement, ...]:
    """The requirements of document ids [T] or [B, T] that a mod indexes on these axes."""
    rule, remedy = f"{argument} must hold one id for each", "Pass {} ids; padding can be a document of its own."
    nouns = {"q_idx": "query", "kv_idx": "key"}
    positions = tuple(Requirement(axis, ids.shape[-1], f"{rule} {nouns[axis]}", remedy) for axis in axes)
    if ids.ndim == 1:
        return positions
    rule = f"{argument} must hold one row for each batch entry"
    remedy = "Pass ids [{}, T], or [T] for ids that all batch entries share."
    return (Requirement("b", ids.shape[0], rule, remedy), *positions)


@at_compile_time
def document_ids_from_lengths(lengths: Int[ArrayLike, " N"], total: int) -> Int32[Array, " {total}"]:
    """The document id of every token of a row of consecutive documents of these lengths.

    Args:
      lengths: Their lengths; may be traced.
      total: Length of the row. Tokens after the last document form one more, with the id ``N``; documents that do not
        fit are cut off.

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


@ready
def shared_prefix(ids: Int[ArrayLike, "*B T"], prefixes: Int[ArrayLike, "*B N"]) -> MaskMod:
    """Causal within each document; a document that continues another one attends to all of that too.

    Source: Prefix Grouper, https://arxiv.org/abs/2506.05433.

    So a prompt is packed once, followed by its responses, none of which attends to another.

    Args:
      ids: The document of every token, integers [T] for one packing that all batch entries share, or [B, T]. They may
        be longer than a call.
      prefixes: For each document the one that it continues; itself if there is none. [N], or [B, N]. Tokens whose
        document is N or more, as the padding of `document_ids_from_lengths`, continue nothing.

    Returns:
      A mask_mod; it uses ``b`` if the ids have a batch axis.

    Raises:
      TypeError: The arrays are not of integers.
      ValueError: They do not have one or two axes, or are for different batch sizes.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> ids = jnp.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 4])  # two prompts: 0 with two responses, 3 with one
    >>> mask_mod = shared_prefix(ids, jnp.array([0, 0, 0, 3, 3]))
    >>> print(create_block_mask(mask_mod, None, None, 10, 10, block_size=1))
    BlockMask(shape=(1, 1, 10, 10), block_size=(1, 1), sparsity=70.00%)
    batch 0, head 0
    ██                  |
    ████                |
    ██████              |
    ████████            |
    ██████████          |
    ██████    ██        |
    ██████    ████      |
                  ██    |
                  ████  |
                  ██████|
    """
    ids = checked_array(ids, "`ids` of `shared_prefix`", "integers").astype(jnp.int32)
    prefixes = checked_array(prefixes, "`prefixes` of `shared_prefix`", "integers").astype(jnp.int32)
    if ids.ndim not in (1, 2) or prefixes.ndim != ids.ndim or ids.shape[:-1] != prefixes.shape[:-1]:
        raise ValueError(
            "`ids` and `prefixes` of `shared_prefix` must be [T] and [N], or [B, T] and [B, N]. "
            f"Got {ids.shape} and {prefixes.shape}."
        )
    documents = prefixes.shape[-1]
    prefix = jnp.take_along_axis(prefixes, jnp.clip(ids, 0, max(documents - 1, 0)), axis=-1) if documents else ids
    before = jnp.where((ids >= 0) & (ids < documents), prefix, ids)

    def mask(b, h, q_idx, kv_idx):
        at = (lambda x, index: x[index]) if ids.ndim == 1 else (lambda x, index: x[b, index])
        document = at(ids, kv_idx)
        same_document = at(ids, q_idx) == document
        return (same_document & (q_idx >= kv_idx)) | (~same_document & (at(before, q_idx) == document))

    return ReadyMod(mask, for_ids("`ids` of `shared_prefix`", ids, "q_idx", "kv_idx"))
