"""The integration of Keras against `keras.layers.GroupQueryAttention`; functional models, training, files."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflex import scores
from tests.integrations.dense import HEADS, WIDTH, B, T, assert_close, causal_array, dense, draw, load, same, segments

pytestmark = pytest.mark.full


SIZES = {"head_dim": 8, "num_query_heads": HEADS, "num_key_value_heads": 2}
KERAS: dict[str, tuple[dict, dict]] = {
    "causal window, gate": ({"sliding_window": 5, "use_gate": True}, {"use_causal_mask": True}),
    "padding": ({}, {"value_mask": np.arange(T) < np.array([[20], [T]])}),
    "mask": ({}, {"attention_mask": np.arange(T) <= np.arange(T)[:, None] + np.array([0, 3])[:, None, None]}),
    "shared mask": ({"use_bias": False}, {"attention_mask": np.tri(T, dtype=bool)[None]}),
}


def keras_and_layer():
    module = load("keras", "keras")
    import keras

    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend")
    return keras, module.FlexAttention


@pytest.mark.parametrize("name", KERAS)
def test_keras(name: str):
    keras, layer = keras_and_layer()
    options, handed = KERAS[name]
    query, value = draw(B, T, WIDTH), draw(B, T, WIDTH, seed=1)
    ours, theirs = (kind(**SIZES, **options) for kind in (layer, keras.layers.GroupQueryAttention))
    for each in (ours, theirs):
        each.build(query.shape, value.shape)
    ours.set_weights(theirs.get_weights())

    def run(layer):
        attend = lambda weights, query: layer.stateless_call(weights, [], query, value, **handed)[0]
        weights = [weight.value for weight in layer.trainable_variables]
        return jax.value_and_grad(lambda *x: (attend(*x) ** 2).mean(), (0, 1))(weights, query)

    same(run(ours), run(theirs))


def test_keras_input_fit_and_file(tmp_path: pathlib.Path):
    keras, flex = keras_and_layer()

    @keras.saving.register_keras_serializable(package="tests")
    class Bias(keras.layers.Layer):
        """A learned bias of distances up to 3."""

        def __init__(self, heads, **kwargs):
            super().__init__(**kwargs)
            self.table = self.add_weight(shape=(heads, 7), initializer="random_normal")
            self.heads = heads

        def call(self, score, b, h, q_idx, kv_idx):
            return scores.relative_bias(self.table.value)(score, b, h, q_idx, kv_idx)

        def get_config(self):
            return super().get_config() | {"heads": self.heads}

    @keras.saving.register_keras_serializable(package="tests")
    def near(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < 9

    layer = flex(**SIZES, dropout=0.1, score_mod=Bias(HEADS), mask_mod=near)
    inputs = keras.Input((T, WIDTH))
    documents = keras.Input((T,), dtype="int32")
    outputs = layer(inputs, inputs, segment_ids=documents, use_causal_mask=True)
    assert outputs.shape == (None, T, WIDTH)
    model = keras.Model([inputs, documents], outputs)
    x = draw(4, T, WIDTH)
    ids = jnp.repeat(segments(), 2, axis=0)
    before = np.asarray(layer.score_mod.table.value)
    assert len(layer.trainable_weights) == 9
    model.compile("sgd", "mse")
    model.fit([x, ids], x, batch_size=2, epochs=1, verbose=0)
    assert np.abs(np.asarray(layer.score_mod.table.value) - before).max() > 0
    shown = model.predict([x, ids], verbose=0)
    heads = [dense_layer(x) for dense_layer in (layer._query_dense, layer._key_dense, layer._value_dense)]
    near_array = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) < 9
    visible = causal_array() & near_array & (ids[:, :, None] == ids[:, None])
    distance = jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None], -3, 3) + 3
    bias = layer.score_mod.table.value[:, distance]
    assert_close(shown, layer._output_dense(dense(*heads, visible[:, None], change=lambda s: s + bias)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict([x, ids], verbose=0), shown)
