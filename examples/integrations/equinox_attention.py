"""Equinox: `eqx.nn.MultiheadAttention` whose scores are never materialized.

    attention = FlexMultiheadAttention(num_heads=8, query_size=512, score_mod=mod, key=key)
    out = jax.vmap(lambda x: attention(x, x, x, block_mask=block_mask))(batch)

Parameters, initial values and arguments are those of the layer in Equinox, so `eqx.tree_deserialise_leaves` reads its
files. Two arguments are new. `score_mod` is a field: an `eqx.Module` that is called as a mod has its arrays learned.
`block_mask` is an argument of the call: a BlockMask is a pytree of arrays, and arrays in a field would be parameters.

A query that attends to no key gives zeros before the output projection; in Equinox, the mean of all values.

Tested against `eqx.nn.MultiheadAttention` of Equinox 0.13.8, values and gradients: `tests/integrations/`.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

import jflex


class FlexMultiheadAttention(eqx.nn.MultiheadAttention):
    """Multi-head attention of one example; map it over a batch with `jax.vmap`."""

    score_mod: jflex.ScoreMod | None

    def __init__(self, *args, score_mod: jflex.ScoreMod | None = None, **kwargs):
        """Takes the arguments of `eqx.nn.MultiheadAttention`, and ``(score, b, h, q_idx, kv_idx) -> score``."""
        super().__init__(*args, **kwargs)
        self.score_mod = score_mod

    def __call__(
        self,
        query: Float[Array, "q_seq q_size"],
        key_: Float[Array, "kv_seq k_size"],
        value: Float[Array, "kv_seq v_size"],
        mask: Bool[Array, "q_seq kv_seq"] | Bool[Array, "num_heads q_seq kv_seq"] | None = None,
        *,
        block_mask: jflex.BlockMask | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        process_heads=None,
    ) -> Float[Array, "q_seq o_size"]:
        """Attends.

        Args:
          query: Query embedding.
          key_: Key embedding.
          value: Value embedding.
          mask: True where a query attends. It is read tile by tile, and no tile is skipped.
          block_mask: In place of `mask`: empty blocks are skipped.
          key: A random key, for dropout.
          inference: Turns dropout off or on, in place of the field of `dropout`.
          process_heads: ``(query, key, value) -> (query, key, value)`` on heads, such as a rotary embedding.
        """
        heads = [
            jax.vmap(projection)(x).reshape(len(x), self.num_heads, -1)
            for projection, x in ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        ]
        if process_heads is not None:
            heads = process_heads(*heads)
        mask_mod = None
        if mask is not None:
            mask_mod = lambda b, h, q_idx, kv_idx: (mask if mask.ndim == 2 else mask[h])[q_idx, kv_idx]
        if inference is None:
            inference = self.dropout.inference
        out = jflex.flex_attention(
            *(x[None] for x in heads),
            self.score_mod,
            block_mask,
            mask_mod=mask_mod,
            dropout_rate=0.0 if inference else self.dropout.p,
            dropout_key=None if inference else key,
        )
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))
