"""Both `FlexAttention` and `flax_layers.functional` against plain numpy and `jflex.flex_attention`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_layers.linen
import jflex
from flax_layers import functional
from flax_layers.nnx import RMSNorm
from flax_layers.rotary_scaling import LinearScaling, LongRopeScaling
from tests.support.dense_masks import causal
from tests.support.layer_flavours import FLAVOURS, HEADS, SLOPES, LinenLayer, NNXAlibi
from tests.support.rows import in_turns, tiers

IN_FEATURES, KV_HEADS, HEAD_DIM, LENGTH = 24, 2, 8, 19
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def layer_of(flavour: str = "nnx", seed: int = 0, **options):
    return FLAVOURS[flavour].make(
        IN_FEATURES, seed=seed, **({"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM} | options)
    )


def inputs_of(*batch: int, length: int = LENGTH) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*batch, length, IN_FEATURES))


class Owner(nnx.Module):
    """A module that owns the layer, and the mod as one of its methods."""

    def __init__(self):
        self.attention = layer_of(mask_mod=causal)
        self.slopes = nnx.Param(SLOPES)

    def alibi(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * jnp.abs(q_idx - kv_idx).astype(score.dtype)

    def __call__(self, inputs):
        return self.attention(inputs, score_mod=self.alibi)


class LinenOwner(linen.Module):
    """The same in linen."""

    implementation: str

    def setup(self):
        sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "implementation": self.implementation}
        self.attention = flax_layers.linen.FlexAttention(IN_FEATURES, HEADS, mask_mod=causal, **sizes)
        self.slopes = self.param("slopes", lambda key: SLOPES)

    def alibi(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * jnp.abs(q_idx - kv_idx).astype(score.dtype)

    def __call__(self, inputs):
        return self.attention(inputs, score_mod=self.alibi)


def dense_layer(params: dict, inputs: np.ndarray, slopes: np.ndarray | None = None) -> np.ndarray:
    """The layer on one sequence [T, features], causal, in numpy float64, without rotary embedding and norms."""
    inputs = np.asarray(inputs, np.float64)
    project = lambda name: inputs @ np.asarray(params[name]["kernel"], np.float64)
    query = project("query").reshape(-1, HEADS, HEAD_DIM)
    key, value = (
        np.repeat(project(name).reshape(-1, KV_HEADS, HEAD_DIM), HEADS // KV_HEADS, axis=1) for name in ("key", "value")
    )
    distance = np.arange(len(inputs))[:, None] - np.arange(len(inputs))[None, :]
    scores = np.einsum("thd,shd->hts", query, key) * HEAD_DIM**-0.5
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    scores = np.where(distance >= 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hts,shd->thd", weights, value).reshape(len(inputs), -1)
    return attended @ np.asarray(params["out"]["kernel"], np.float64)


@tiers(default={"implementation": "xla", "flavour": "nnx"}, in_turns=True)
@flavours
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
def test_layer_is_attention_between_projections(flavour, implementation, batch):
    layer = layer_of(flavour, mask_mod=causal, implementation=implementation)
    inputs = inputs_of(*batch)
    output = layer(inputs)
    assert output.shape == inputs.shape
    expected = [
        dense_layer(FLAVOURS[flavour].params(layer), row) for row in np.asarray(inputs).reshape(-1, LENGTH, IN_FEATURES)
    ]
    assert_close(output, np.reshape(expected, inputs.shape))


@pytest.mark.full
@in_turns
@flavours
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_forms_of_a_mask_in_the_constructor_and_in_the_call(flavour, implementation):
    """A BlockMask gives what its mask_mod gives; a mask of the call replaces that of the constructor in either form."""
    block_mask = jflex.create_block_mask(causal, None, None, LENGTH, LENGTH, block_size=8)
    first_key = lambda b, h, q_idx, kv_idx: kv_idx == 0
    call = nnx.jit(lambda layer, x, **options: layer(x, **options), static_argnames="mask_mod")
    make, inputs = functools.partial(layer_of, flavour, implementation=implementation), inputs_of(2)
    of_blocks, expected = make(block_mask=block_mask), call(make(mask_mod=causal), inputs)
    assert_close(call(of_blocks, inputs), expected)
    assert_close(call(make(), inputs, block_mask=block_mask), expected)
    assert_close(call(make(mask_mod=first_key), inputs, block_mask=block_mask), expected)
    assert_close(call(of_blocks, inputs, mask_mod=first_key), call(make(mask_mod=first_key), inputs))


@pytest.mark.full
def test_folded_batch_index_counts_the_last_leading_axis_fastest():
    shown = jnp.arange(6)  # row b sees keys up to its own number

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx <= shown[b]

    layer, inputs = layer_of(), inputs_of(2, 3)
    output = layer(inputs, mask_mod=mask_mod)
    inputs, output = (rows.reshape(6, LENGTH, IN_FEATURES) for rows in (inputs, output))
    for row in range(6):
        assert_close(
            output[row], layer(inputs[row], mask_mod=lambda b, h, q_idx, kv_idx, row=row: kv_idx <= shown[row])
        )


def owning(flavour: str, form: str, implementation: str, inputs: jax.Array):
    """A module with slopes, and what finds the parameters of its layer and the slopes among its parameters."""
    if form == "module":
        alibi = FLAVOURS[flavour].alibi()
        module = layer_of(flavour, score_mod=alibi, mask_mod=causal, implementation=implementation)
        return module, lambda params: params | params["score_mod"]
    if flavour == "nnx":
        module = Owner()
        module.attention.implementation = implementation
    else:
        owner = LinenOwner(implementation)
        module = LinenLayer(owner.init(jax.random.key(0), inputs), owner)
    return module, lambda params: params["attention"] | {"slopes": params["slopes"]}


@tiers(full={"implementation": "xla", "flavour": "nnx"}, in_turns=True, rest="full")
@flavours
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("form", ["module", "method"])
def test_captured_parameters_get_gradients(flavour, form, implementation):
    inputs = inputs_of(length=7)
    module, params_of = owning(flavour, form, implementation, inputs)
    params = params_of(FLAVOURS[flavour].params(module))
    assert_close(module(inputs), dense_layer(params, inputs, params["slopes"]))

    weights = np.random.default_rng(0).normal(size=inputs.shape)
    loss = lambda module: jnp.sum(module(inputs) * weights.astype(np.float32))
    found = np.asarray(params_of(FLAVOURS[flavour].gradients(loss, module))["slopes"])

    slopes, step = np.asarray(params["slopes"], np.float64), 1e-6
    dense_loss = lambda slopes: np.sum(dense_layer(params, inputs, slopes) * weights)
    expected = [(dense_loss(slopes + e) - dense_loss(slopes - e)) / (2 * step) for e in step * np.eye(HEADS)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected).min() > 1e-3


def hidden_states():
    alibi = NNXAlibi()
    owner = Owner()
    closure = lambda score, b, h, q_idx, kv_idx: score * alibi.slopes[h]
    wrapper = lambda score, *place: closure(score, *place)
    partial = functools.partial(lambda scales, score, *place: score * scales[0], alibi.slopes)
    return {"method": owner.alibi, "closure": closure, "closure in closure": wrapper, "partial": partial}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["method", "closure", "closure in closure", "partial"])
def test_constructor_refuses_mods_that_hide_parameters(kind):
    with pytest.raises(ValueError, match=r"`score_mod` holds a \w+, which a layer cannot keep .* make it a callable"):
        layer_of(score_mod=hidden_states()[kind])


@pytest.mark.full
@flavours
@jax.numpy_dtype_promotion("standard")  # Flax's RMSNorm promotes bfloat16 to float32 inside, which "strict" refuses
def test_dtype_policy(flavour):
    layer = layer_of(flavour, dtype=jnp.bfloat16, qk_norm=True, rotary_base=10000.0, use_bias=True, mask_mod=causal)
    assert {leaf.dtype for leaf in jax.tree.leaves(FLAVOURS[flavour].params(layer))} == {jnp.dtype(jnp.float32)}
    output = layer(inputs_of(2).astype(jnp.bfloat16))
    assert output.dtype == jnp.bfloat16
    exact = layer_of(flavour, qk_norm=True, rotary_base=10000.0, use_bias=True, mask_mod=causal)
    np.testing.assert_allclose(np.asarray(output, np.float32), exact(inputs_of(2)), rtol=0.1, atol=0.1)
    half = layer_of(flavour, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(FLAVOURS[flavour].params(half))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.full
def test_learned_sinks():
    """A sink of 0 takes its part of the weight, one of minus infinity none; they are learned."""
    layer = layer_of(mask_mod=causal, use_sinks=True, implementation="xla")
    inputs, plain = inputs_of(2), layer_of(mask_mod=causal, implementation="xla")
    with_value = lambda x: jax.tree.map_with_path(
        lambda path, leaf: jnp.full_like(leaf, x) if "sinks" in jax.tree_util.keystr(path) else leaf, layer
    )
    assert_close(with_value(-jnp.inf)(inputs), plain(inputs))
    first = jnp.linalg.norm(layer(inputs)[:, 0]) / jnp.linalg.norm(plain(inputs)[:, 0])
    assert 0.05 < first < 0.95
    gradient = jax.grad(lambda layer: jnp.sum(layer(inputs) ** 2))(layer)
    [found] = [x for path, x in jax.tree.leaves_with_path(gradient) if "sinks" in jax.tree_util.keystr(path)]
    assert np.all(np.asarray(found) < 0)  # a larger sink makes outputs smaller


ROWS = np.random.default_rng(0).normal(size=(1, 6, 2, 8)).astype(np.float32)
PLACES = jnp.arange(6)


def test_longrope_has_a_factor_for_each_pair_and_a_magnitude():
    """Of the long ones beyond 5 positions, by the length that is passed, or else by the largest position."""
    scaling = LongRopeScaling((1.0,) * 4, (2.0,) * 4, 5, max_positions=32, magnitude=1.5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    scaled = functools.partial(functional.rotate, ROWS, scaling=scaling)
    short = 1.5 * functional.rotate(ROWS, PLACES)
    long = 1.5 * functional.rotate(ROWS, PLACES, scaling=LinearScaling(2.0))
    close(scaled(PLACES), long)
    close(scaled(PLACES, length=5), short)
    close(scaled(PLACES, length=6), long)
    close(jax.jit(scaled)(PLACES - 1), 1.5 * functional.rotate(ROWS, PLACES - 1))
    limited = dataclasses.replace(scaling, max_positions=5)
    close(scaled(PLACES, scaling=limited), short)


def test_norms():
    """As Flax's own; and Gemma's, whose scales begin at 0."""
    for options in ({}, {"epsilon": 0.1}):
        own, flax = RMSNorm(8, rngs=nnx.Rngs(0), **options), nnx.RMSNorm(8, rngs=nnx.Rngs(0), **options)
        np.testing.assert_allclose(own(ROWS), flax(ROWS), rtol=1e-6)
    gemma = RMSNorm(8, offset=1.0, rngs=nnx.Rngs(0))
    assert not np.any(gemma.scale[...])
    np.testing.assert_array_equal(gemma(ROWS), RMSNorm(8, rngs=nnx.Rngs(0))(ROWS))
    assert gemma(jnp.asarray(ROWS, jnp.bfloat16)).dtype == jnp.bfloat16
