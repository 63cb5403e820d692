"""Both `FlexAttention` and `flax_layers.functional` against plain numpy and `jflex.flex_attention`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_layers.linen
import jflex
from flax_layers import functional
from flax_layers.attention import core as attention_core
from tests.support.layer_flavours import FLAVOURS, HEADS, SLOPES, LinenLayer, NNXAlibi
from tests.support.rows import in_turns, tiers

IN_FEATURES, KV_HEADS, HEAD_DIM, LENGTH = 24, 2, 8, 19
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


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
def test_a_block_mask_gives_what_its_mask_mod_gives(flavour, implementation):
    block_mask = jflex.create_block_mask(causal, None, None, LENGTH, LENGTH, block_size=8)
    layer = layer_of(flavour, implementation=implementation)
    inputs = inputs_of(2)
    expected = layer(inputs, mask_mod=causal)
    assert_close(layer(inputs, block_mask=block_mask), expected)
    constructed = layer_of(flavour, implementation=implementation, block_mask=block_mask)
    assert_close(nnx.jit(lambda layer, x: layer(x))(constructed, inputs), expected)


@pytest.mark.full
@flavours
def test_folded_batch_index_counts_the_last_leading_axis_fastest(flavour):
    shown = jnp.arange(6)  # row b sees keys up to its own number

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx <= shown[b]

    layer, inputs = layer_of(flavour), inputs_of(2, 3)
    output = layer(inputs, mask_mod=mask_mod)
    inputs, output = (rows.reshape(6, LENGTH, IN_FEATURES) for rows in (inputs, output))
    for row in range(6):
        alone = layer(inputs[row], mask_mod=lambda b, h, q_idx, kv_idx, row=row: kv_idx <= row)
        assert_close(output[row], alone)


@pytest.mark.full
@flavours
def test_the_call_replaces_the_mask_of_the_constructor_in_either_form(flavour):
    block_mask = jflex.create_block_mask(causal, None, None, LENGTH, LENGTH, block_size=8)
    first_key = lambda b, h, q_idx, kv_idx: kv_idx == 0
    layer, inputs = layer_of(flavour, block_mask=block_mask), inputs_of(1)
    assert_close(layer(inputs, mask_mod=first_key), layer_of(flavour, mask_mod=first_key)(inputs))
    layer = layer_of(flavour, mask_mod=first_key)
    assert_close(layer(inputs, block_mask=block_mask), layer_of(flavour, mask_mod=causal)(inputs))


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


@tiers(default={"implementation": "xla", "flavour": "nnx"}, in_turns=True)
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


@pytest.mark.full
def test_new_parameters_of_a_mod_are_read_under_jit():
    module, inputs = Owner(), inputs_of(1)
    call = nnx.jit(lambda module, inputs: module(inputs))
    before = call(module, inputs)
    module.slopes[...] = module.slopes[...] + 1.0
    after = call(module, inputs)
    assert np.abs(np.asarray(after - before)).max() > 1e-3
    assert_close(after, module(inputs))


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
def test_constructor_refuses_joined_masks_that_hide_parameters():
    width = nnx.Param(jnp.array(3))
    window = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width[...]
    with pytest.raises(ValueError, match="`mask_mod` holds a Param"):
        layer_of(mask_mod=jflex.and_masks(causal, window))


@pytest.mark.full
@flavours
def test_constructor_takes_mods_that_capture_plain_values(flavour):
    slopes, factor = jnp.ones(HEADS), 2.0
    layer_of(flavour, score_mod=lambda score, b, h, q_idx, kv_idx: score * slopes[h] * factor)
    layer_of(flavour, score_mod=functools.partial(lambda factor, score, *place: score * factor, 2.0))


@flavours
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, r"`num_kv_heads` must divide `num_heads`.*num_heads=4, num_kv_heads=3"),
        ({"num_heads": 4, "num_kv_heads": 0}, r"num_heads=4, num_kv_heads=0"),
        (
            {"num_heads": 5},
            r"`num_heads` must divide `in_features` if `head_dim` is .*in_features=24, num_heads=5",
        ),
    ],
)
def test_wrong_sizes(flavour, sizes, message):
    with pytest.raises(ValueError, match=message):
        FLAVOURS[flavour].make(IN_FEATURES, **sizes)


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
@pytest.mark.parametrize("method", ["__call__", "decode"])
def test_linen_knows_the_shared_methods(method):
    """It records what they return, as of methods that the class defines itself."""
    layer = layer_of("linen")
    arguments = (inputs_of(1), *([layer.init_cache(1, LENGTH)] if method == "decode" else []))
    filter_of = lambda module, name: isinstance(module, flax_layers.linen.FlexAttention) and name == method
    options = {"method": method, "capture_intermediates": filter_of}
    output, seen = layer.module.apply(layer.variables, *arguments, **options)
    assert set(seen["intermediates"]) == {method}
    assert seen["intermediates"][method][0] is output


@pytest.mark.full
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_learned_sinks(flavour):
    """A sink of 0 takes its part of the weight, one of minus infinity none; they are learned."""
    layer = layer_of(flavour, mask_mod=causal, use_sinks=True, implementation="xla")
    inputs, plain = inputs_of(2), layer_of(flavour, mask_mod=causal, implementation="xla")
    with_value = lambda x: jax.tree.map_with_path(
        lambda path, leaf: jnp.full_like(leaf, x) if "sinks" in jax.tree_util.keystr(path) else leaf, layer
    )
    assert_close(with_value(-jnp.inf)(inputs), plain(inputs))
    first = jnp.linalg.norm(layer(inputs)[:, 0]) / jnp.linalg.norm(plain(inputs)[:, 0])
    assert 0.05 < first < 0.95
    gradient = jax.grad(lambda layer: jnp.sum(layer(inputs) ** 2))(layer)
    [found] = [x for path, x in jax.tree.leaves_with_path(gradient) if "sinks" in jax.tree_util.keystr(path)]
    assert np.all(np.asarray(found) < 0)  # a larger sink makes outputs smaller


@pytest.mark.full
def test_qk_norm_bounds_the_scores():
    seen = layer_of(qk_norm=True)
    inputs = 100.0 * inputs_of(1)
    for heads in (attention_core.query_heads(seen, inputs), attention_core.key_value_heads(seen, inputs).key):
        np.testing.assert_allclose(np.mean(np.square(heads), axis=-1), 1.0, rtol=1e-3)


@tiers(default={"flavour": "nnx"})
@flavours
def test_rotary_scores_depend_on_the_difference_of_positions(flavour):
    layer, inputs = layer_of(flavour, rotary_base=100.0, mask_mod=causal), inputs_of(2)
    output = layer(inputs)
    np.testing.assert_allclose(layer(inputs, positions=jnp.arange(LENGTH) + 1000), output, rtol=1e-3, atol=1e-3)
    assert np.abs(np.asarray(layer(inputs, positions=2 * jnp.arange(LENGTH)) - output)).max() > 1e-2


def test_rotate_turns_pairs_as_complex_numbers():
    heads = np.random.default_rng(0).normal(size=(2, 5, 3, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 2, 100, 5]], np.int32)
    pairs = heads[..., :3] + 1j * heads[..., 3:]
    turned = pairs * np.exp(1j * positions[:, :, None, None] * 50.0 ** (-np.arange(0, 6, 2) / 6))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    rotated = functional.rotate(jnp.asarray(heads), jnp.asarray(positions), base=50.0)
    np.testing.assert_allclose(rotated, expected, rtol=1e-4, atol=1e-4)
    assert functional.rotate(jnp.asarray(heads, jnp.bfloat16), jnp.arange(5)).dtype == jnp.bfloat16


def test_rotate_refuses_odd_heads():
    with pytest.raises(ValueError, match=r"`rotary_dim` or the head size must be even\. Got 5"):
        functional.rotate(jnp.ones((1, 2, 1, 5)), jnp.arange(2))


@pytest.mark.full
def test_heads_split_and_merge_back():
    features = jnp.arange(24.0).reshape(2, 12)
    heads = functional.split_heads(features, 3)
    np.testing.assert_array_equal(heads[0, 1], [4.0, 5.0, 6.0, 7.0])
    np.testing.assert_array_equal(functional.merge_heads(heads), features)


@pytest.mark.full
def test_layers_scan_and_remat():
    """Two layers with stacked parameters, scanned, each rematerialised, are the two layers in turn."""
    stacked = nnx.vmap(lambda key: layer_of(seed=key), in_axes=0, out_axes=0)(jax.random.split(jax.random.key(0), 2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def through(stream, layer):
        return stream + layer(stream, mask_mod=causal)

    inputs = inputs_of(1)
    expected = inputs
    graph, state = nnx.split(stacked)
    for index in range(2):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))
        expected = expected + layer(expected, mask_mod=causal)
    assert_close(through(inputs, stacked), expected)
    gradients = nnx.grad(lambda layers: jnp.sum(jnp.square(through(inputs, layers))))(stacked)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradients))
