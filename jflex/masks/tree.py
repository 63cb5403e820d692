"""Tree attention: candidate continuations that share their beginnings (SpecInfer, https://arxiv.org/abs/2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from jflex.mods import MaskMod


def tree(prefix_length: int | Int[ArrayLike, ""], ancestors: Bool[ArrayLike, "N N"]) -> MaskMod:
    """Shows the prefix to every node of a tree of drafted tokens, and to each node its ancestors and itself.

    Queries are the nodes; keys are the prefix and then the nodes.

    Args:
      prefix_length: Keys before the first node.
      ancestors: Whether node ``j`` is node ``i`` or an ancestor of it, at ``[i, j]``; from `tree_ancestors`.

    Returns:
      A mask_mod.

    >>> from jflex.dense_mask import create_mask
    >>> create_mask(tree(1, tree_ancestors([-1, 0, 0])), None, None, 3, 4)[0, 0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    ancestors = jnp.asarray(ancestors, jnp.bool_)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < prefix_length) | ancestors[q_idx, jnp.maximum(kv_idx - prefix_length, 0)]

    return mask


def tree_ancestors(parents: Sequence[int]) -> Bool[np.ndarray, "N N"]:
    """The ancestors of every node of a tree, each node counting as one of its own.

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
