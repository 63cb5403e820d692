"""Packed documents that continue others: one prompt, many responses (Prefix Grouper, https://arxiv.org/abs/2506.05433)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.masks.document import for_ids
from jflex.mods.array_sizes import ReadyMod, ready
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


@ready
def shared_prefix(ids: Int[ArrayLike, "*B T"], prefixes: Int[ArrayLike, "*B N"]) -> MaskMod:
    """Causal within each document; a document that continues another one attends to all of that too.

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
    found = jnp.take_along_axis(prefixes, jnp.clip(ids, 0, max(documents - 1, 0)), axis=-1) if documents else ids
    before = jnp.where((ids >= 0) & (ids < documents), found, ids)

    def mask(b, h, q_idx, kv_idx):
        at = (lambda x, index: x[index]) if ids.ndim == 1 else (lambda x, index: x[b, index])
        document = at(ids, kv_idx)
        own = at(ids, q_idx) == document
        return (own & (q_idx >= kv_idx)) | (~own & (at(before, q_idx) == document))

    return ReadyMod(mask, for_ids("`ids` of `shared_prefix`", ids, "q_idx", "kv_idx"))
