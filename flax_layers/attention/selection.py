"""Attention layers whose queries select blocks of keys anew in each call."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

import jflex


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockSelection:
    """Causal attention to the best blocks of keys, after MoBA and the selected branch of NSA.

    Pass it as the `block_mask` of a `FlexAttention` or a `MultiHeadLatentAttention`. In each call, the queries of a
    block select `k` blocks of keys together: their own, and of those before it the ones with the largest scores
    (`jflex.block_scores`, `jflex.select_blocks`). A score is the product of the first query of the block, averaged over
    the heads that share a key head, and the mean of the keys; so no output depends on later inputs. Queries and keys
    are rotated if the layer rotates them. Vector mods of a call do not change the scores.

    A layer that is trained with it computes blocks of the selection alone, forward and backward, and is compiled once.
    The selection has no gradient: the projections learn through the attention to selected keys. Decoding does not
    select: `decode` and `decode_paged` want a mask_mod, and attend to all keys that it shows.

    Args:
        k: How many blocks each block of queries attends to, its own among them.
        block_size: Tokens of a block, of queries and of keys.
        local_blocks: How many blocks are always selected that end with the own one: 1 in MoBA, 2 in NSA.
        initial_blocks: How many blocks from the first one on are always selected: 0 in MoBA, 1 in NSA.

    References:
        Lu et al. 2025, MoBA, arXiv:2502.13189; Yuan et al. 2025, Native Sparse Attention, arXiv:2502.11089.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_layers.nnx import FlexAttention
        >>> layer = FlexAttention(32, 4, num_kv_heads=2, block_mask=BlockSelection(2, block_size=16), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 64, 32))).shape
        (1, 64, 32)
    """

    k: int
    _: dataclasses.KW_ONLY
    block_size: int = 128
    local_blocks: int = 1
    initial_blocks: int = 0

    def block_mask(self, query: Float[Array, "B T Hq D"], key: Float[Array, "B T Hkv D"]) -> jflex.BlockMask:
        """The mask of a call with these queries and keys: a causal BlockMask of all query heads.

        Raises:
            TypeError: A number is not an integer.
            ValueError: A number is out of range, or `k` has no room for the blocks that are always selected.
        """
        scores = jflex.block_scores(query, key, block_size=self.block_size)
        indices = jflex.select_blocks(
            scores, self.k, block_size=self.block_size, local_blocks=self.local_blocks,
            initial_blocks=self.initial_blocks,
        )  # fmt: skip
        return jflex.block_mask_from_indices(
            indices, query.shape[1], key.shape[1], mask_mod=jflex.masks.causal(), H=query.shape[2],
            block_size=self.block_size,
        )  # fmt: skip
