"""Tree attention: candidate continuations that share their beginnings (SpecInfer, https://arxiv.org/abs/2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from jflex.mods.array_sizes import ReadyMod, Requirement
from jflex.mods.arrays import checked_array, known_count
from jflex.mods.compose import MaskMod


def tree(prefix_length: int | Int[ArrayLike, ""], ancestors: Bool[ArrayLike, "N N"]) -> MaskMod:
    """Shows to every node of a tree of drafted tokens the prefix, its ancestors and itself.

    Queries are the nodes; keys are the prefix and then the nodes.

    Args:
      prefix_length: Keys before the first node. If it is a Python number, no keys may follow the last node.
      ancestors: Whether node ``j`` is node ``i`` or an ancestor of it, at ``[i, j]``; from `tree_ancestors`.

    Returns:
      A mask_mod.

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
