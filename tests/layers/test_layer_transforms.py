"""Both `FlexAttention` under the transformations of Flax, converted into each other, saved, and sharded."""

import functools

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_layers.linen
from flax_layers.linen import params_from_nnx, params_to_nnx
from flax_layers.rotary_scaling import LinearScaling
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.dense_masks import causal
from tests.support.layer_flavours import FLAVOURS, HEADS, LinenLayer
from tests.support.rows import in_turns

pytestmark = pytest.mark.full

FEATURES, LENGTH, DEPTH = 32, 13, 2
SIZES = {"num_kv_heads": 2, "head_dim": 8}
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
OPTIONS = {
    "plain": lambda flavour: {},
    "all": lambda flavour: {
        "rotary_base": 50.0,
        "qk_norm": True,
        "use_bias": True,
        "use_sinks": True,
        "bias_init": flax.linen.initializers.normal(0.3),
        "score_mod": FLAVOURS[flavour].alibi(),
    },
    "of families": lambda flavour: {
        "rotary_base": 50.0,
        "rotary_scaling": LinearScaling(2.0),
        "rotary_dim": 4,
        "qk_norm": True,
        "qk_norm_options": {"epsilon": 1e-2, "offset": 1.0},
        "out_bias": True,
    },
}


def layer_of(flavour: str, kind: str = "plain", **options):
    return FLAVOURS[flavour].make(FEATURES, **(SIZES | {"mask_mod": causal} | OPTIONS[kind](flavour) | options))


def inputs_of(*batch: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(*batch, LENGTH, FEATURES)), jnp.float32)


def squares(inputs: jax.Array, layer) -> jax.Array:
    return jnp.sum(jnp.square(layer(inputs)))


@in_turns
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("source", FLAVOURS)
def test_parameters_convert_with_outputs_and_gradients(source, kind):
    of_nnx, of_linen, inputs = layer_of("nnx", kind), layer_of("linen", kind, seed=1), inputs_of(2)
    if source == "nnx":
        of_linen = LinenLayer({"params": params_from_nnx(of_nnx)}, of_linen.module)
    else:
        before, of_nnx = of_nnx, params_to_nnx(of_linen.variables["params"], of_nnx)
        assert of_nnx is not before
    assert_close(nnx.jit(lambda layer: layer(inputs))(of_nnx), jax.jit(lambda layer: layer(inputs))(of_linen))
    loss = functools.partial(squares, inputs)
    of_state = params_from_nnx(nnx.jit(nnx.grad(loss))(of_nnx))
    jax.tree.map(functools.partial(assert_close, rtol=1e-4), of_state, FLAVOURS["linen"].gradients(loss, of_linen))
    chex.assert_trees_all_equal(params_from_nnx(of_nnx), of_linen.variables["params"], strict=True)


def test_parameters_of_a_whole_model_convert():
    class OfNNX(nnx.Module):
        def __init__(self):
            self.norm = nnx.RMSNorm(FEATURES, rngs=nnx.Rngs(0))
            self.attention = layer_of("nnx", "all")
            self.head = nnx.Linear(FEATURES, 5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.head(x + self.attention(self.norm(x)))

    class OfLinen(flax.linen.Module):
        def setup(self):
            options = SIZES | {"mask_mod": causal} | OPTIONS["all"]("linen")
            self.norm = flax.linen.RMSNorm()
            self.attention = flax_layers.linen.FlexAttention(FEATURES, HEADS, **options)
            self.head = flax.linen.Dense(5)

        def __call__(self, x):
            return self.head(x + self.attention(self.norm(x)))

    inputs, of_nnx = inputs_of(1), OfNNX()
    assert_close(OfLinen().apply({"params": params_from_nnx(of_nnx)}, inputs), of_nnx(inputs))


def test_message_of_parameters_that_do_not_fit():
    params = layer_of("linen", "all").variables["params"]
    wrong = r"`params` must have .*query/kernel is missing; key_norm/scale is not in the module; .*key/kernel has shape"
    params = {name: value for name, value in params.items() if name != "query"}
    with pytest.raises(ValueError, match=wrong):
        params_to_nnx(params, layer_of("nnx", use_bias=True, num_kv_heads=4))
    with pytest.raises(TypeError, match=r"`source` must be an nnx.Module or an nnx.State. Got dict"):
        params_from_nnx(params)


class LinenBlock(flax.linen.Module):
    """A residual layer, in the form that `linen.scan` takes."""

    @flax.linen.compact
    def __call__(self, stream, _):
        options = SIZES | {"mask_mod": causal} | OPTIONS["all"]("linen")
        return stream + flax_layers.linen.FlexAttention(FEATURES, HEADS, **options, name="layer")(stream), None


def test_linen_scan_and_remat_are_the_layers_in_turn():
    lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": DEPTH}
    scanned, inputs = flax.linen.scan(flax.linen.remat(LinenBlock), **lift)(), inputs_of(2)
    variables = scanned.init(jax.random.key(0), inputs, None)
    assert jax.tree.leaves(variables)[0].shape[0] == DEPTH

    def in_turn(variables):
        stream = inputs
        for index in range(DEPTH):
            own = jax.tree.map(lambda leaf, index=index: leaf[index], variables)
            stream, _ = LinenBlock().apply(own, stream, None)
        return stream

    loss = lambda run: jax.jit(jax.value_and_grad(lambda variables: jnp.sum(jnp.square(run(variables)))))(variables)
    through = lambda variables: scanned.apply(variables, inputs, None)[0]
    jax.tree.map(functools.partial(assert_close, rtol=1e-4, atol=1e-4), loss(through), loss(in_turn))


def test_nnx_scan_and_remat_are_the_layers_in_turn():
    options = lambda: SIZES | {"mask_mod": causal} | OPTIONS["all"]("nnx")
    stacked = FLAVOURS["nnx"].stack(jax.random.split(jax.random.key(0), DEPTH), FEATURES, options)
    inputs = inputs_of(2)
    block = lambda stream, layer: stream + layer(stream)
    through = nnx.scan(nnx.remat(block), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)

    def in_turn(stream, layers):
        merge, state = FLAVOURS["nnx"].split(layers)
        for index in range(DEPTH):
            stream = block(stream, merge(jax.tree.map(lambda leaf, index=index: leaf[index], state)))
        return stream

    def loss(run):
        value, gradients = nnx.jit(nnx.value_and_grad(lambda layers: jnp.sum(jnp.square(run(inputs, layers)))))(stacked)
        return value, nnx.to_pure_dict(gradients)

    jax.tree.map(functools.partial(assert_close, rtol=1e-4, atol=1e-4), loss(through), loss(in_turn))


def sharded(tree, mesh, spec_of):
    put = lambda path, leaf: jax.device_put(leaf, NamedSharding(mesh, spec_of(jax.tree_util.keystr(path), leaf)))
    return jax.tree_util.tree_map_with_path(put, tree)


def heads_over_model(path: str, leaf: jax.Array) -> P:
    """Columns of the projections to heads, rows of the one from heads; slopes, and norms of a head, everywhere."""
    if "kernel" not in path:
        return P()
    return P("model", None) if "out" in path else P(None, "model")


@NEEDS_EIGHT_DEVICES
def test_heads_and_batch_over_devices_give_what_one_device_gives():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layer, inputs = layer_of("linen", "all", implementation="xla"), inputs_of(4)
    merge, state = FLAVOURS["linen"].split(layer)
    run = jax.jit(jax.value_and_grad(lambda state, inputs: squares(inputs, merge(state)), argnums=(0, 1)))
    apart = sharded(state, mesh, heads_over_model), jax.device_put(inputs, NamedSharding(mesh, P("data")))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, run(*apart), run(state, inputs))
    program = run.lower(*apart).compile().as_text()
    gathers = [line for line in program.splitlines() if "all-gather(" in line]
    assert not [line for line in gathers if f"{LENGTH},2,8" in line or f"{LENGTH},4,8" in line]
