"""Masks of drafted tokens: blocks and trees."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, Int32

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array, known_count
from jflex.mods.compose import MaskMod


@ready
def draft_blocks(prefix_length: int | Int[ArrayLike, ""], block: int) -> MaskMod:
    """Shows to each token of a drafted block the prefix, and its own block up to itself.

    Source: JetSpec, https://arxiv.org/abs/2606.18394.

    Queries are the tokens of the blocks, one block after the other; keys are the prefix and then the same tokens. With
    trees in place of chains, see `tree`.

    Args:
      prefix_length: Keys before the first block.
      block: Tokens of a block.

    Returns:
      A mask_mod, for any number of blocks.

    Raises:
      TypeError: `prefix_length` is not an integer.
      ValueError: `block` is not positive, or `prefix_length` is negative.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> print(create_block_mask(draft_blocks(3, 2), None, None, 6, 9, block_size=1))
    BlockMask(shape=(1, 1, 6, 9), block_size=(1, 1), sparsity=50.00%)
    batch 0, head 0
    ████████          |
    ██████████        |
    ██████    ██      |
    ██████    ████    |
    ██████        ██  |
    ██████        ████|
    """
    known = known_count(prefix_length)
    argument = "`prefix_length` of `draft_blocks`"
    prefix = known if known is not None else checked_array(prefix_length, argument, "integers").astype(jnp.int32)
    if block < 1:
        raise ValueError(f"`block` of `draft_blocks` must be positive. Got {block}.")
    if known is not None and known < 0:
        raise ValueError(f"{argument} must not be negative. Got {known}.")

    def mask(b, h, q_idx, kv_idx):
        token = kv_idx - prefix
        same_block = (q_idx // block == token // block) & (q_idx >= token)
        return (kv_idx < prefix) | same_block

    return mask


MAX_NODES = 32
"""Nodes of a tree whose ancestors are the bits of a word."""


@ready
def tree(prefix_length: int | Int[ArrayLike, ""], ancestors: Bool[ArrayLike, "N N"]) -> MaskMod:
    """Shows to every node of a tree of drafted tokens the prefix, its ancestors and itself.

    Source: SpecInfer, https://arxiv.org/abs/2305.09781.

    Queries are the nodes; keys are the prefix and then the nodes.

    Args:
      prefix_length: Keys before the first node. If it is a Python number, no keys may follow the last node.
      ancestors: Whether node ``j`` is node ``i`` or an ancestor of it, at ``[i, j]``; from `tree_ancestors`.

    Raises:
      TypeError: `ancestors` is not boolean.
      ValueError: `ancestors` is not square.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(tree(1, tree_ancestors([-1, 0, 0])), None, None, 3, 4)[0, 0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    argument = "`ancestors` of `tree`"
    ancestors = checked_array(ancestors, argument, "booleans", "[N, N]")
    nodes = ancestors.shape[0]
    if ancestors.shape != (nodes, nodes):
        raise ValueError(f"{argument} must be [N, N], as `tree_ancestors` makes it. Got shape {ancestors.shape}.")

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < prefix_length) | ancestors[q_idx, jnp.maximum(kv_idx - prefix_length, 0)]

    rule = f"{argument} must hold one row for each query"
    required = [Requirement("q_idx", nodes, rule, "Pass the ancestors of {} nodes.")]
    prefix = known_count(prefix_length)
    if prefix is not None:
        rule = "`prefix_length` and `ancestors` of `tree` must make up all keys, the prefix and then the nodes"
        remedy = "Pass `kv_lengths` to the call if the keys after the nodes are unused."
        required.append(Requirement("kv_idx", prefix + nodes, rule, remedy))
    return ReadyMod(mask, tuple(required))


@ready
def trees(prefix_lengths: Int[ArrayLike, " B"], ancestor_bits: Int[ArrayLike, "B N"]) -> MaskMod:
    """`tree` with a different tree, and a different prefix, in each batch entry: one word for each node.

    Queries are the nodes; keys are the prefix and then the nodes. `jflex.paged.PagedBatch` takes the same words.

    Args:
      prefix_lengths: Keys before the first node of each batch entry.
      ancestor_bits: For node ``i`` a word whose bit ``j`` tells whether node ``j`` is node ``i`` or an ancestor of it;
        from `tree_bits`, padded with 0. A node of padding attends to the prefix alone.

    Returns:
      A mask_mod; it uses ``b``.

    Raises:
      TypeError: The arrays are not of integers.
      ValueError: Their shapes do not match, or a tree has more than 32 nodes.

    >>> from jflex.block_mask.dense import create_mask
    >>> bits = jnp.array([tree_bits([-1, 0, 0]), tree_bits([-1, 0, 1])])
    >>> create_mask(trees(jnp.array([1, 0]), bits), 2, None, 3, 4)[:, 0].astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]]
    """
    prefix = checked_array(prefix_lengths, "`prefix_lengths` of `trees`", "integers", "[B]")
    argument = "`ancestor_bits` of `trees`"
    words = checked_array(ancestor_bits, argument, "integers", "[B, N]").astype(jnp.int32)
    if words.shape[0] != prefix.shape[0] or words.shape[1] > MAX_NODES:
        raise ValueError(
            f"{argument} must be [B, N], a word for each of at most {MAX_NODES} nodes, and `prefix_lengths` [B]. Got "
            f"shapes {words.shape} and {prefix.shape}. Pad the words of `tree_bits` with 0."
        )

    def mask(b, h, q_idx, kv_idx):
        node = jnp.clip(kv_idx - prefix[b], 0, MAX_NODES - 1)
        return (kv_idx < prefix[b]) | (((words[b, q_idx] >> node) & 1) > 0)

    of_batch = f"{argument} must hold the words of one tree for each batch entry"
    of_queries = f"{argument} must hold one word for each query"
    required = (
        Requirement("b", words.shape[0], of_batch, "Pass words [{}, N]."),
        Requirement("q_idx", words.shape[1], of_queries, "Pass the words of {} nodes."),
    )
    return ReadyMod(mask, required)


def tree_bits(parents: Sequence[int]) -> Int32[np.ndarray, " N"]:
    """The rows of `tree_ancestors` as words: bit ``j`` of word ``i`` tells whether ``j`` is ``i`` or an ancestor of it.

    Args:
      parents: The parent of each of at most 32 nodes, which must come before it; -1 for a root.

    Returns:
      The words; bit 31 is the sign.

    Raises:
      ValueError: There are more nodes, or a parent does not come before its child.

    >>> tree_bits([-1, 0, 1, 0]).tolist()
    [1, 3, 7, 9]
    """
    if len(parents) > MAX_NODES:
        raise ValueError(
            f"`parents` must be of at most {MAX_NODES} nodes, the bits of a word. Got {len(parents)}. Draft fewer, or "
            "use `tree_ancestors`."
        )
    weights = np.left_shift(np.uint32(1), np.arange(len(parents), dtype=np.uint32))
    return (tree_ancestors(parents) * weights).sum(axis=1, dtype=np.uint32).view(np.int32)


def tree_ancestors(parents: Sequence[int]) -> Bool[np.ndarray, "N N"]:
    """The ancestors of every node of a tree, the node itself included.

    Args:
      parents: The parent of each node, which must come before it; -1 for a root.

    Returns:
      ``[i, j]``: whether ``j`` is ``i`` or an ancestor of it.

    Raises:
      ValueError: A parent does not come before its child.

    >>> tree_ancestors([-1, 0, 1, 0]).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """
    ancestors = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"`parents` must come before their children, or be -1. Node {node} has parent {parent}.")
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors
