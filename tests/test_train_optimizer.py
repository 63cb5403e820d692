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
