"""Vector mods in both `FlexAttention`: the same in a call and in decoding from either cache; their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jflex
from flax_layers.attention.core import SharedPrefix
from tests.support.dense_masks import causal
from tests.support.layer_flavours import FLAVOURS

IN_FEATURES, LENGTH, D = 32, 19, 8
INPUTS = np.random.default_rng(1).normal(size=(2, LENGTH, IN_FEATURES)).astype(np.float32)
TABLE = jnp.asarray(np.random.default_rng(2).uniform(0.5, 1.5, (2, LENGTH, D)).astype(np.float32))
MODS = {
    "query_mod": lambda x, b, h, i: x * TABLE[b, i],
    "key_mod": lambda x, b, h, i: x * TABLE[b, i] + 1.0,
    "value_mod": lambda x, b, h, i: x * TABLE[b, i],
    "output_mod": lambda x, lse, b, h, i: x * jax.nn.sigmoid(lse) * TABLE[b, i],
}


def layer_of(flavour: str, **options):
    return FLAVOURS[flavour].make(IN_FEATURES, num_kv_heads=2, mask_mod=causal, implementation="xla", **options)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_a_call_and_both_caches():
    layer = layer_of("linen", rotary_base=100.0)
    expected, plain = jax.jit(lambda x: (layer(x, **MODS), layer(x)))(INPUTS)
    assert np.abs(expected - plain).max() > 1e-2
    cache, found = layer.init_cache(2, LENGTH), []
    decode = jax.jit(lambda *args: layer.decode(*args, **MODS))
    for at in (slice(0, 11), slice(11, LENGTH)):
        out, cache = decode(INPUTS[:, at], cache)
        found.append(out)
    assert_close(jnp.concatenate(found, axis=1), expected)
    pages, table = layer.init_paged_cache(5, 16), jnp.array([[1, 2], [3, 4]])
    prompt = jflex.paged.PagedBatch(jnp.array([0, 11, 28]), jnp.array([11, 17]), table)
    decode_paged = jax.jit(lambda *args: layer.decode_paged(*args, **MODS))
    first, pages = decode_paged(np.concatenate([INPUTS[0, :11], INPUTS[1, :17]]), pages, prompt)
    assert_close(first, jnp.concatenate([expected[0, :11], expected[1, :17]]))
    rest = jflex.paged.PagedBatch(jnp.array([0, 8, 10]), jnp.array([LENGTH, LENGTH]), table)
    second, pages = decode_paged(np.concatenate([INPUTS[0, 11:], INPUTS[1, 17:]]), pages, rest)
    assert_close(second, jnp.concatenate([expected[0, 11:], expected[1, 17:]]))


@pytest.mark.full
def test_a_shared_prefix():
    layer = layer_of("nnx")
    mods = {name: mod for name, mod in MODS.items() if name in ("query_mod", "output_mod")}
    pages, table = layer.init_paged_cache(6, 8), jnp.array([[1, 2, 3], [1, 4, 5]])
    prompt = jflex.paged.PagedBatch(jnp.array([0, 8]), jnp.array([8]), table[:1])
    _, pages = layer.decode_paged(INPUTS[0, :8], pages, prompt)
    batch = jflex.paged.PagedBatch(jnp.array([0, 3, 8]), jnp.array([11, 13]), table)
    tokens, shared = np.concatenate([INPUTS[0, 8:11], INPUTS[1, 8:13]]), SharedPrefix(jnp.int32(2), jnp.int32(8))
    attend = lambda **prefix: nnx.jit(lambda layer: layer.decode_paged(tokens, pages, batch, **prefix, **mods)[0])(
        layer
    )
    assert_close(attend(shared_prefix=shared), attend())


@pytest.mark.full
def test_a_rope_is_the_rotary_embedding_of_the_layer():
    rope, plain = jflex.rope(100.0), layer_of("nnx")
    by_mods = nnx.jit(lambda layer: layer(INPUTS, query_mod=rope, key_mod=rope))(plain)
    assert_close(by_mods, nnx.jit(lambda layer: layer(INPUTS))(layer_of("nnx", rotary_base=100.0)))
