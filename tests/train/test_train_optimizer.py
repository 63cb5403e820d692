"""The optimizer: what its schedule and its weight decay do."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.nnx import AlibiBias, RelativeBias
from flax_layers.train import Recipe
from flax_layers.train.trainer import flat_parameters

EVERYTHING = ModelConfig(
    vocabulary=8, width=4, mlp_width=4, num_heads=2, num_kv_heads=1, head_dim=2, layers=(LayerConfig(),),
    max_positions=8, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, post_norms=True,
)  # fmt: skip


@pytest.mark.parametrize("bias", [AlibiBias, RelativeBias])
def test_only_kernels_and_embeddings_decay(bias):
    model = nnx.eval_shape(lambda: Decoder(EVERYTHING, score_mod=functools.partial(bias, 2), rngs=nnx.Rngs(0)))
    shapes = flat_parameters(nnx.state(model))
    ones = {path: np.ones(value.shape, np.float32) for path, value in shapes.items()}
    zeros = {path: np.zeros_like(value) for path, value in ones.items()}
    optimizer = Recipe(steps=10, learning_rate=0.5, warmup=0, weight_decay=0.1).optimizer()
    with jax.numpy_dtype_promotion("standard"):
        updates = jax.jit(lambda g, x: optimizer.update(g, optimizer.init(x), x)[0])(zeros, ones)
    decaying = {path for path in shapes if np.any(np.asarray(updates[path]))}
    assert decaying == {path for path in shapes if path.endswith((".kernel", ".embedding"))}
    assert len(decaying) == 2 + 7
    assert {"norm.scale", "blocks.0.attention.query.bias", "blocks.0.mlp.up.bias"} <= set(shapes) - decaying


@pytest.mark.parametrize(
    ("warmup", "rates"), [(0, [1.0, 1.0]), (1, [1.0, 1.0]), (2, [0.5, 1.0]), (4, [0.25, 0.5, 0.75, 1.0, 1.0])]
)
def test_warm_up_begins_with_the_first_step(warmup, rates):
    """And ends with its last: no step has a learning rate of 0."""
    schedule = Recipe(steps=10, learning_rate=1.0, warmup=warmup, final_share=1.0).schedule()
    np.testing.assert_allclose([float(schedule(step)) for step in range(len(rates))], rates, rtol=1e-6)


def test_the_schedule_ends_where_it_says():
    schedule = Recipe(steps=20, learning_rate=2.0, warmup=5, final_share=0.1).schedule()
    found = [float(schedule(step)) for step in range(25)]
    assert np.all(np.diff(found[4:20]) < 0)
    np.testing.assert_allclose(found[20:], 0.2, rtol=1e-6)
