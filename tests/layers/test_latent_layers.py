"""`MultiHeadLatentAttention` of nnx and linen: against `transformers`, both forms against each other, caches."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers.linen
import flax_layers.nnx
import jflex
from flax_layers.rotary_scaling import YarnScaling
from tests.support.layer_flavours import FLAVOURS, LinenLayer
from tests.support.rows import in_turns, tiers

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "latent_attention.npz"
SIZES = {"latent_dim": 32, "nope_head_dim": 12, "rope_head_dim": 8, "value_head_dim": 10}
OPTIONS = {
    "latent_queries": {"query_latent_dim": 20},
    "direct_queries": {"rotary_interleaved": False},
    "yarn": {
        "query_latent_dim": 20,
        "rotary_scaling": YarnScaling(4.0, 16, beta_fast=2.0, beta_slow=0.05, mscale=1.0, mscale_all_dim=1.0),
    },
}
NAMES = {"query_down": "q_a_proj", "query_norm": "q_a_layernorm", "query": "q_b_proj", "latent": "kv_a_proj_with_mqa",
         "latent_norm": "kv_a_layernorm", "up": "kv_b_proj", "out": "o_proj"}  # fmt: skip
INT = functools.partial(jnp.asarray, dtype=jnp.int32)
WIDTH, HEADS, LENGTH = 48, 4, 40
flavours = pytest.mark.parametrize("flavour", FLAVOURS)


@functools.cache
def goldens() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def params_of(name, dtype=jnp.float32):
    """The weights of the file, as parameters of a layer."""
    golden, params = goldens(), {}
    for ours, theirs in NAMES.items():
        theirs = "q_proj" if ours == "query" and name == "direct_queries" else theirs
        if f"{name}/{theirs}.weight" in golden:
            weight = jnp.asarray(golden[f"{name}/{theirs}.weight"], dtype)
            params[ours] = {"kernel": weight.T} if weight.ndim == 2 else {"scale": weight}
    return params


def made(flavour, name="latent_queries", *, param_dtype=jnp.float32, **options):
    """A layer with the weights of the file, causal."""
    options = {**SIZES, **OPTIONS[name], "mask_mod": jflex.masks.causal(), "param_dtype": param_dtype, **options}
    params = params_of(name, param_dtype)
    if flavour == "linen":
        return LinenLayer({"params": params}, flax_layers.linen.MultiHeadLatentAttention(WIDTH, HEADS, **options))
    layer = flax_layers.nnx.MultiHeadLatentAttention(WIDTH, HEADS, **options, rngs=nnx.Rngs(0))
    return flax_layers.linen.params_to_nnx(params, layer)


def called(layer, inputs, **options):
    """The call of a layer, compiled: step by step, each operation would be."""
    return jax.jit(lambda x: layer(x, **options))(inputs)


def decoded(layer, inputs, cache):
    return jax.jit(lambda x, cache: layer.decode(x, cache))(inputs, cache)


def inputs_of(name="latent_queries", dtype=jnp.float32):
    return jnp.asarray(goldens()[f"{name}/inputs"], dtype)


@tiers(default={"name": "latent_queries", "flavour": "linen"}, in_turns=True)
@flavours
@pytest.mark.parametrize("name", OPTIONS)
def test_against_transformers(flavour, name):
    with jax.enable_x64(True):
        layer, golden = made(flavour, name, param_dtype=jnp.float64), goldens()
        # Both compute the norms in float32, and `transformers` the angles of the rotary embedding.
        right = golden[f"{name}/outputs"]
        np.testing.assert_allclose(
            called(layer, inputs_of(name, jnp.float64)), right, rtol=0, atol=2e-5 * np.abs(right).max()
        )


@pytest.mark.full
@in_turns
@flavours
@pytest.mark.parametrize("tokens", [1, 30])  # absorbed, up-projected
def test_tokens_without_room_are_nan(flavour, tokens):
    layer = made(flavour, "latent_queries")
    cache = layer.init_cache(2, LENGTH).with_lengths([LENGTH - tokens + 1, 2])
    outputs, _ = decoded(layer, inputs_of()[:, :tokens], cache)
    expected = [[False] * (tokens - 1) + [True], [False] * tokens]
    assert np.isnan(outputs).all(axis=2).tolist() == np.isnan(outputs).any(axis=2).tolist() == expected


@pytest.mark.full
@in_turns
@flavours
@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_equals_the_call(flavour, name):
    layer, inputs = made(flavour, name), inputs_of(name)
    whole, cache = called(layer, inputs), layer.init_cache(2, LENGTH)
    parts = []
    for start, stop in ((0, 30), (30, 31), (31, 36), (36, 40)):
        out, cache = decoded(layer, inputs[:, start:stop], cache)
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=2e-5, atol=2e-4)
    assert cache.lengths.tolist() == [LENGTH, LENGTH]


@pytest.mark.full
def test_paged_decoding_equals_the_call():
    """Two prompts of different lengths in a stacked cache, then a token of one and a chunk of the other."""
    layer, inputs = made("nnx"), inputs_of()
    whole = called(layer, inputs)
    table, cache = INT([[5, 2, 6], [7, 1, 3]]), layer.init_paged_cache(8, 16, layers=2)
    batch = jflex.paged.PagedBatch(INT([0, 20, 23]), INT([20, 3]), table)
    packed = jnp.concatenate([inputs[0, :20], inputs[1, :3]])
    for new_prompts in (True, False):
        step = jax.jit(lambda *x, new=new_prompts: layer.decode_paged(*x, layer=1, new_prompts=new))
        out, filled = step(packed, cache, batch)
        np.testing.assert_allclose(out[:20], whole[0, :20], rtol=2e-5, atol=2e-4)
        np.testing.assert_allclose(out[20:], whole[1, :3], rtol=2e-5, atol=2e-4)
    batch = jflex.paged.PagedBatch(INT([0, 1, 8]), INT([21, 10]), table)
    out, filled = step(jnp.concatenate([inputs[0, 20:21], inputs[1, 3:10]]), filled, batch)
    np.testing.assert_allclose(out[:1], whole[0, 20:21], rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(out[1:], whole[1, 3:10], rtol=2e-5, atol=2e-4)
    assert not np.asarray(filled.rows[0]).any()


@pytest.mark.full
@flavours
def test_gradients_reach_every_parameter(flavour):
    inputs = inputs_of()
    gradients = FLAVOURS[flavour].gradients(lambda layer: (layer(inputs) ** 2).mean(), made(flavour))
    leaves = jax.tree.leaves(gradients)
    assert len(leaves) == 7
    assert all(float(jnp.abs(x).max()) > 0 and bool(jnp.isfinite(x).all()) for x in leaves)


@pytest.mark.full
def test_mods_and_block_masks():
    inputs = inputs_of()
    window, softcap = jflex.masks.sliding_window(7), jflex.scores.softcap(5.0)
    block_mask = jflex.create_block_mask(window, None, None, LENGTH, LENGTH, block_size=16)
    layer = made("linen", mask_mod=None, block_mask=block_mask, score_mod=softcap)
    whole = called(layer, inputs)
    plain = made("linen")
    found = called(plain, inputs, score_mod=softcap, mask_mod=window)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    assert np.abs(whole - called(plain, inputs)).max() > 0.1
    _, cache = decoded(layer, inputs[:, :30], layer.init_cache(2, LENGTH))
    out, _ = decoded(layer, inputs[:, 30:], cache)
    np.testing.assert_allclose(out, whole[:, 30:], rtol=2e-5, atol=2e-4)


@pytest.mark.full
@in_turns
@flavours
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(flavour, dtype):
    inputs = inputs_of()
    layer16 = made(flavour, dtype=dtype)
    out = called(layer16, inputs)
    assert out.dtype == dtype
    cast = jax.tree.map(lambda x: x.astype(dtype), made("nnx"))
    assert cast.init_cache(2, 8).pages.rows.dtype == layer16.init_cache(2, 8).pages.rows.dtype == dtype
    right = np.asarray(called(made(flavour), inputs))
    np.testing.assert_allclose(out.astype(jnp.float32), right, rtol=0, atol=0.03 * np.abs(right).max())
    _, cache = decoded(layer16, inputs[:, :39], layer16.init_cache(2, LENGTH))
    token, _ = decoded(layer16, inputs[:, 39:], cache)
    assert token.dtype == dtype
    np.testing.assert_allclose(token.astype(jnp.float32), right[:, 39:], rtol=0, atol=0.03 * np.abs(right).max())
