"""Penzai: `pz.nn.Attention` whose scores are never materialized.

    model = pz.select(model).at_instances_of(pz.nn.Attention).apply(FlexAttention.from_attention)

That converts each attention of a model of `penzai.models.transformer`: parameters stay where they are, and soft cap and
mask become a mod and a BlockMask. `dataclasses.replace(layer, score_mod=mod)` adds another mod; as a pytree, such as a
`pz.nn.Layer` or a `jax.tree_util.Partial` of arrays, it is a part of the model that selectors find.

`pz.nn.KVCachingAttention` is not converted: convert after decoding, or keep both models.

A query that attends to no key gives zeros before the output projection; in Penzai, the mean of all values.

Tested against `pz.nn.Attention` and a transformer of Penzai 0.2.5: `tests/integrations/`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

import jflex

Masker = pz.nn.ApplyExplicitAttentionMask | pz.nn.ApplyCausalAttentionMask | pz.nn.ApplyCausalSlidingWindowAttentionMask


@pz.pytree_dataclass
class FlexAttention(pz.nn.Layer):
    """Attention whose queries and keys are multiplied, masked and normalized in one kernel.

    Axes of the input that queries share with it are batch axes. Other axes that queries share with keys are key heads,
    and those of queries alone are query heads of one key head.

    Attributes:
      input_to_query: Maps the input to queries, already scaled.
      input_to_key: Maps the input to keys.
      input_to_value: Maps the input to values.
      output: Maps the attended values to the output.
      masker: The layer of Penzai that describes the mask; it is read, not called.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, a function or a callable pytree.
      seq_axis: Axis of the tokens in queries, keys and values.
      projection_axis: Axis of a head.
    """

    input_to_query: pz.nn.Layer
    input_to_key: pz.nn.Layer
    input_to_value: pz.nn.Layer
    output: pz.nn.Layer
    masker: Masker | None = None
    score_mod: Any = None
    seq_axis: str = dataclasses.field(default="seq", metadata={"pytree_node": False})
    projection_axis: str = dataclasses.field(default="projection", metadata={"pytree_node": False})

    @classmethod
    def from_attention(cls, attention: pz.nn.Attention) -> "FlexAttention":
        """Converts attention that computes einsum, perhaps soft cap, perhaps mask, softmax, einsum, output."""
        masker = score_mod = None
        for layer in attention.query_key_to_attn.sublayers[1:]:
            if isinstance(layer, pz.nn.TanhSoftCap):
                score_mod = jax.tree_util.Partial(_cap, layer.soft_cap)
            elif isinstance(layer, Masker):
                masker = layer
            elif not isinstance(layer, pz.nn.Softmax):
                raise ValueError(f"No mod is known for {type(layer).__name__}: pass a score_mod to FlexAttention.")
        return cls(
            attention.input_to_query,
            attention.input_to_key,
            attention.input_to_value,
            pz.nn.Sequential(attention.attn_value_to_output.sublayers[1:]),
            masker,
            score_mod,
        )

    def __call__(self, x: pz.nx.NamedArray, **side_inputs: Any) -> pz.nx.NamedArray:
        """Attends within `x`; `side_inputs` are those of the sublayers and of the mask."""
        query = self.input_to_query(x, **side_inputs)
        key = self.input_to_key(x, **side_inputs)
        value = self.input_to_value(x, **side_inputs)
        known = (self.seq_axis, self.projection_axis)
        names = [name for name in query.named_shape if name not in known]
        batch = {name: query.named_shape[name] for name in names if name in x.named_shape}
        shared = [name for name in names if name in key.named_shape and name not in batch]
        grouped = [name for name in names if name not in key.named_shape and name not in batch]

        def place(array, heads):  # [B, T, H, D]
            sizes = [array.named_shape[name] for name in (self.seq_axis, *heads, self.projection_axis)]
            array = array.unwrap(*batch, self.seq_axis, *heads, self.projection_axis)
            return array.reshape(math.prod(batch.values()), sizes[0], math.prod(sizes[1:-1]), sizes[-1])

        arrays = (place(query, shared + grouped), place(key, shared), place(value, shared))
        block_mask = None
        if self.masker is not None:
            block_mask = _block_mask(self.masker, side_inputs, batch, arrays[0].shape[1], arrays[1].shape[1])
        out = jflex.flex_attention(*arrays, self.score_mod, block_mask, scale=1.0)
        heads = [query.named_shape[name] for name in shared + grouped]
        out = out.reshape(*batch.values(), out.shape[1], *heads, out.shape[-1])
        out = pz.nx.wrap(out, *batch, self.seq_axis, *shared, *grouped, self.projection_axis)
        return self.output(out, **side_inputs)


def _cap(cap, score, b, h, q_idx, kv_idx):
    cap = jnp.asarray(cap, score.dtype)
    return jnp.tanh(score / cap) * cap


def _block_mask(masker: Masker, side_inputs: dict, batch: dict[str, int], T: int, S: int) -> jflex.BlockMask:
    """The mask that a layer of Penzai describes; all of the batch share it if the side inputs have no batch axis."""

    def rows(name: str, *axes: str):
        array = side_inputs[name]
        shape = {axis: size for axis, size in batch.items() if set(batch) & set(array.named_shape)}
        shape |= {axis: array.named_shape[axis] for axis in axes}
        sizes = [shape[axis] for axis in axes]
        return array.broadcast_to(named_shape=shape).unwrap(*shape).reshape(-1, *sizes)

    if isinstance(masker, pz.nn.ApplyExplicitAttentionMask):
        mask = rows(masker.mask_input_name, "seq", "kv_seq")
        mod = lambda b, h, q_idx, kv_idx: mask[b if len(mask) > 1 else 0, q_idx, kv_idx]
        return jflex.create_block_mask(mod, len(mask) if len(mask) > 1 else None, None, T, S)
    queries = rows(masker.query_positions_input_name, masker.seq_axis)
    keys = rows(masker.kv_positions_input_name, masker.seq_axis)
    window = getattr(masker, "sliding_window_size", None)

    def mod(b, h, q_idx, kv_idx):
        query = queries[b if len(queries) > 1 else 0, q_idx]
        key = keys[b if len(keys) > 1 else 0, kv_idx]
        near = True if window is None else query - key < window
        return (query >= key) & (key >= 0) & near

    B = max(len(queries), len(keys))
    return jflex.create_block_mask(mod, B if B > 1 else None, None, T, S)
