"""Keras 3 on the backend `jax`: `keras.layers.GroupQueryAttention` whose scores are never materialized.

    layer = FlexAttention(head_dim=64, num_query_heads=8, num_key_value_heads=2, score_mod=mod)
    inputs = keras.Input((1024, 512))
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))

Weights and arguments are those of the layer in Keras, but for `return_attention_scores`, so its weights load. Keys and
values are not repeated for the query heads; causal masks, windows, padding and packed documents become blocks to skip
instead of a tensor [B, T, S]. Three arguments are new: `score_mod` and `mask_mod` of the constructor, and `segment_ids`
of the call.

A mod that is saved is a function or an object that Keras can serialize (`keras.saving.register_keras_serializable`). A
mod that is a `keras.layers.Layer` is a sublayer: its weights are learned and saved. It makes them in its constructor.
Under mixed precision, give it `dtype="float32"`, because scores are float32.

A query that attends to no key gives zeros before the output projection; in Keras, the mean of all values.

Tested against `keras.layers.GroupQueryAttention` of Keras 3.15.1: `tests/integrations/`.
"""

import keras

import jflex
from jflex import masks


@keras.saving.register_keras_serializable(package="jflex")
class FlexAttention(keras.layers.GroupQueryAttention):
    """Grouped-query attention; query heads that are as many as key heads make it multi-head attention.

    Args:
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, beside the masks of the call.
    """

    def __init__(self, head_dim, num_query_heads, num_key_value_heads, score_mod=None, mask_mod=None, **kwargs):
        super().__init__(head_dim, num_query_heads, num_key_value_heads, **kwargs)
        self.score_mod = score_mod
        self.mask_mod = mask_mod

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        segment_ids=None,
        training=None,
        use_causal_mask=False,
    ):
        """Attends from `query` [B, T, E] to `value` [B, S, E]; `segment_ids` [B, T] separates packed documents."""
        key = value if key is None else key
        of_examples = (query_mask, value_mask, key_mask, attention_mask, segment_ids)
        visible = [] if self.mask_mod is None else [self.mask_mod]
        if use_causal_mask:
            visible.append(masks.causal())
        if self.sliding_window is not None:
            visible.append(masks.sliding_window(self.sliding_window - 1, self.sliding_window - 1))
        if segment_ids is not None:
            visible.append(masks.document(segment_ids))
        visible += [_show_keys(mask) for mask in (value_mask, key_mask) if mask is not None]
        if query_mask is not None:
            visible.append(lambda b, h, q_idx, kv_idx: query_mask[b, q_idx])
        if attention_mask is not None:
            visible.append(_read(attention_mask))
        block_mask = None
        if visible:
            of_batch = None if all(x is None for x in of_examples) and self.mask_mod is None else query.shape[0]
            of_heads = None if attention_mask is None and self.mask_mod is None else self.num_query_heads
            mask_mod = jflex.and_masks(*visible)
            block_mask = jflex.create_block_mask(mask_mod, of_batch, of_heads, query.shape[1], key.shape[1])
        dropout_rate = self.dropout if training else 0.0
        out = jflex.flex_attention(
            self._query_dense(query),
            self._key_dense(key),
            self._value_dense(value),
            self.score_mod,
            block_mask,
            dropout_rate=dropout_rate,
            dropout_key=self._dropout_layer.seed_generator.next() if dropout_rate else None,
        )
        return self._output_dense(out * self._gate_dense(query) if self.use_gate else out)

    def compute_output_spec(self, query, value, key=None, **kwargs):
        """Shape and dtype of the output; no kernel is traced for `keras.Input`, whose batch size is unknown."""
        shape = self.compute_output_shape(query.shape, value.shape, None if key is None else key.shape)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self):
        """The arguments of the constructor, with mods as Keras serializes functions, objects and layers."""
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return super().get_config() | {name: keras.saving.serialize_keras_object(mod) for name, mod in mods.items()}

    @classmethod
    def from_config(cls, config):
        """Makes the layer of `get_config`."""
        mods = {name: keras.saving.deserialize_keras_object(config[name]) for name in ("score_mod", "mask_mod")}
        return cls(**config | mods)


def _show_keys(mask):
    return lambda b, h, q_idx, kv_idx: mask[b, kv_idx]


def _read(mask):
    """Reads a mask [B, T, S] or [B, H, T, S], whose axes may be 1."""
    mask = keras.ops.cast(mask, "bool")
    mask = mask[:, None] if mask.ndim == 3 else mask
    sizes = mask.shape
    return lambda *indices: mask[tuple(i if size > 1 else 0 for i, size in zip(indices, sizes, strict=True))]
