"""The chunked cross entropy against the dense one, and what the schedule and the weight decay of the optimizer do."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.nnx import AlibiBias, RelativeBias
from flax_layers.train import Recipe, next_token_weights, summed_cross_entropy
from flax_layers.train.trainer import flat_parameters
from tests.support.rows import tiers

R, T, WIDTH, V = 3, 50, 8, 40


def dense(hidden, kernel, targets, weights, softcap):
    logits = jnp.einsum("rtw,wv->rtv", hidden, kernel, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(losses * weights)


def drawn(dtype=jnp.float32, rows=R, length=T, vocabulary=V):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, length, WIDTH)), dtype)
    kernel = jnp.asarray(rng.normal(size=(WIDTH, vocabulary)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocabulary, (rows, length)), jnp.int32)
    return hidden, kernel, targets, jnp.asarray(rng.random((rows, length)) < 0.8, jnp.float32)


@tiers(default={"chunk": 24, "softcap": None})
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 24, 1000])
def test_value_and_gradients_are_those_of_the_dense_loss(chunk: int, softcap: float | None):
    hidden, kernel, targets, weights = drawn()
    chunked = lambda h, k: 0.5 * jnp.asarray(summed_cross_entropy(h, k, targets, weights, chunk, softcap))
    right = lambda h, k: 0.5 * dense(h, k, targets, weights, softcap)
    found, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, kernel) for f in (chunked, right))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)
    np.testing.assert_allclose(jax.jit(chunked)(hidden, kernel), expected[0], rtol=2e-6)


def test_large_and_equal_logits():
    """They leave nothing of most exponentials, or add 40 equal ones."""
    hidden, kernel, targets, weights = drawn()
    for factor in (0.0, 300.0):
        arrays = factor * hidden, kernel, targets, weights
        np.testing.assert_allclose(summed_cross_entropy(*arrays, 24), dense(*arrays, None), rtol=2e-6)


@pytest.mark.full
def test_gradients_of_the_kernel_are_summed_in_float32():
    hidden, kernel, _, _ = drawn(jnp.bfloat16, rows=4, length=256)
    loss = lambda h, k: summed_cross_entropy(h, k, targets, jnp.ones((4, 256)), 16)
    targets = jnp.zeros((4, 256), jnp.int32)
    by_hidden, by_kernel = jax.grad(loss, argnums=(0, 1))(hidden, kernel)
    exact = jax.grad(lambda k: dense(hidden.astype(jnp.float32), k, targets, jnp.ones((4, 256)), None))(
        kernel.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert (by_hidden.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.float32)
    error = np.abs(by_kernel - exact).max() / np.abs(exact).max()
    assert error < 2**-9  # a sum of 64 chunks in bfloat16 errs by more


@pytest.mark.full
def test_no_array_of_all_places_and_the_vocabulary_exists():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn(rows=2, length=2048, vocabulary=4096)]

    def held(loss):
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        compiled: Any = run.lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunked = held(lambda h, k, targets, weights: summed_cross_entropy(h, k, targets, weights, 128))
    whole = held(functools.partial(dense, softcap=None))
    logits = 4 * 2 * 2048 * 4096
    assert whole > logits  # the measure sees it
    assert chunked < logits / 8


def test_weights_end_with_the_document():
    documents = jnp.array([[0, 0, 0, 1, 2, 2]])
    assert next_token_weights(documents).tolist() == [[1, 1, 0, 0, 1, 0]]


# --- the optimizer

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
