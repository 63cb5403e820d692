"""Cross-attention of both `FlexAttention`, against Flax's own layer, and with keys and values projected once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers.linen
import jflex
from jflex import masks
from tests.support.layer_flavours import FLAVOURS, HEADS, LinenLayer
from tests.support.rows import tiers

FEATURES, KV_FEATURES, T, S = 16, 24, 5, 40
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def layer_of(flavour: str, **options):
    if flavour == "nnx":
        return FLAVOURS["nnx"].make(FEATURES, in_kv_features=KV_FEATURES, **options)
    module = flax_layers.linen.FlexAttention(FEATURES, HEADS, in_kv_features=KV_FEATURES, **options)
    everything = lambda b, h, q_idx, kv_idx: kv_idx >= 0
    variables = module.init(
        jax.random.key(0), normal(1, 1, FEATURES), inputs_kv=normal(1, 1, KV_FEATURES), mask_mod=everything
    )
    return LinenLayer(variables, module)


def projected(layer, inputs_kv):
    if isinstance(layer, LinenLayer):
        return layer.module.apply(layer.variables, inputs_kv, method="project_kv")
    return layer.project_kv(inputs_kv)


@tiers(default={"flavour": "linen"})
@flavours
def test_cross_attention_is_that_of_flax(flavour):
    layer, inputs, memory = layer_of(flavour), normal(2, T, FEATURES), normal(2, S, KV_FEATURES)
    flaxs = nnx.MultiHeadAttention(
        HEADS, FEATURES, in_kv_features=KV_FEATURES, use_bias=False, decode=False, rngs=nnx.Rngs(0)
    )
    params = FLAVOURS[flavour].params(layer)
    for name in ("query", "key", "value", "out"):
        kernel = getattr(flaxs, name).kernel
        kernel[...] = jnp.reshape(params[name]["kernel"], kernel.shape)
    lengths = jnp.array([S, 7])
    mask = (jnp.arange(S)[None] < lengths[:, None])[:, None, None, :]
    outputs = layer(inputs, inputs_kv=memory, mask_mod=masks.padding(lengths))
    assert_close(outputs, flaxs(inputs, memory, mask=mask))


@pytest.mark.full
@flavours
def test_projected_keys_serve_each_token(flavour):
    options = {"num_kv_heads": 2, "qk_norm": True, "rotary_base": 50.0}
    mask = jflex.create_block_mask(masks.prefix_lm(S // 2), None, None, T, S, block_size=16)
    layer = layer_of(flavour, **options, block_mask=mask)
    inputs, memory = normal(3, T, FEATURES), normal(3, S, KV_FEATURES)
    call = nnx.jit(lambda layer, inputs, memory: layer(inputs, inputs_kv=memory))
    whole, keys = call(layer, inputs, memory), nnx.jit(projected)(layer, memory)
    assert_close(call(layer, inputs, keys), whole)

    @nnx.jit
    def token(layer, t, keys):
        mask_mod = jflex.with_offset(masks.prefix_lm(S // 2), t)
        one = jax.lax.dynamic_slice_in_dim(inputs, t, 1, axis=1)
        return layer(one, inputs_kv=keys, mask_mod=mask_mod, positions=t[None])

    for t in range(T):
        assert_close(token(layer, jnp.int32(t), keys), whole[:, t : t + 1])
    shared = call(layer, inputs, jax.tree.map(lambda x: x[:1], keys))
    assert_close(shared, call(layer, inputs, jnp.broadcast_to(memory[:1], memory.shape)))
