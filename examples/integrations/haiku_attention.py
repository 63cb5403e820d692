"""Haiku: `hk.MultiHeadAttention` whose scores are never materialized.

    attention = FlexMultiHeadAttention(8, 64, w_init=init, name="multi_head_attention")
    out = attention(x, x, x, score_mod=mod, block_mask=block_mask)  # in a function that `hk.transform` transforms

Arguments of the constructor and names of parameters are those of the module in Haiku, so its checkpoints load under the
same module name. Two arguments of the call are new: `score_mod` and `block_mask`. A mod may capture what
`hk.get_parameter` returns, and gives it gradients; call `hk.get_parameter` outside of the mod.

A query that attends to no key gives zeros before the last projection; in Haiku, the mean of all values.

Tested against `hk.MultiHeadAttention` of dm-haiku 0.0.17, values and gradients: `tests/integrations/`.
"""

import math

import haiku as hk
import jax
import jax.numpy as jnp

import jflex


class FlexMultiHeadAttention(hk.MultiHeadAttention):
    """Multi-head attention with score mods and block masks."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        score_mod: jflex.ScoreMod | None = None,
        block_mask: jflex.BlockMask | None = None,
    ) -> jax.Array:
        """Attends over sequences of vectors with any leading axes, which mods see as one batch axis.

        Args:
          query: Embeddings [..., T', D_q].
          key: Embeddings [..., T, D_k].
          value: Embeddings [..., T, D_v].
          mask: True where a query attends, [..., H or 1, T', T]; it is read tile by tile.
          score_mod: ``(score, b, h, q_idx, kv_idx) -> score``.
          block_mask: A mask whose empty blocks are skipped, in place of `mask`.

        Returns:
          Embeddings [..., T', D'].
        """
        heads = (
            self._heads(query, self.key_size, "query"),
            self._heads(key, self.key_size, "key"),
            self._heads(value, self.value_size, "value"),
        )
        mask_mod = None if mask is None else _read(mask, query.shape[:-2])
        out = jflex.flex_attention(*heads, score_mod, block_mask, mask_mod=mask_mod)
        out = out.reshape(*query.shape[:-1], self.num_heads * self.value_size)
        return self._linear(self.model_size)(out)

    @hk.transparent
    def _heads(self, x: jax.Array, head_size: int, name: str) -> jax.Array:
        y = self._linear(self.num_heads * head_size, name)(x)
        return y.reshape(-1, x.shape[-2], self.num_heads, head_size)

    @hk.transparent
    def _linear(self, size: int, name: str | None = None) -> hk.Linear:
        return hk.Linear(size, with_bias=self.with_bias, w_init=self.w_init, b_init=self.b_init, name=name)


def _read(mask: jax.Array, leading: tuple[int, ...]) -> jflex.MaskMod:
    """Reads a mask [..., H, T', T] at the axes that are not 1."""
    if mask.ndim != len(leading) + 3:
        raise ValueError(f"Mask dimensionality {mask.ndim} must match logits dimensionality {len(leading) + 3}.")
    if math.prod(mask.shape[:-3]) > 1:
        mask = jnp.broadcast_to(mask, (*leading, *mask.shape[-3:]))
    mask = jnp.asarray(mask, bool).reshape(-1, *mask.shape[-3:])

    def mask_mod(b, h, q_idx, kv_idx):
        index = (b, h, q_idx, kv_idx)
        return mask[tuple(i if size > 1 else 0 for i, size in zip(index, mask.shape, strict=True))]

    return mask_mod
