"""Flax's own recipes for creating, saving, restoring and averaging models, with layers that keep masks and mods."""

import copy
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_layers
import flax_layers.linen
import flax_layers.nnx
import jflex
from flax_layers.nnx import AttentionMask
from jflex import masks, scores
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.layer_flavours import FLAVOURS, HEADS, LinenLayer
from tests.support.rows import tiers

LENGTH, FEATURES = 48, 16
IDS = np.arange(2 * LENGTH) // 20
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
full = pytest.mark.full


def blocks(mask_mod, length=LENGTH):
    return jflex.create_block_mask(mask_mod, None, None, length, length, block_size=16)


def same_id(ids):
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


OUTSIDE = blocks(masks.causal())
# What the function that constructs the layer passes; known values, but traced where that function is.
KNOWN = {
    "a mask from outside": lambda: {"block_mask": OUTSIDE},
    "a mask made inside": lambda: {"block_mask": blocks(masks.document(IDS))},
    "causal documents": lambda: {"block_mask": blocks(masks.causal_document(masks.document_ids_from_lengths([9], 99)))},
    "ready mods": lambda: {"score_mod": scores.alibi(scores.alibi_slopes(HEADS)), "mask_mod": masks.document(IDS)},
    "an offset": lambda: {"mask_mod": jflex.with_offset(masks.causal(), np.int32(3))},
    "numpy in a lambda": lambda: {"mask_mod": lambda b, h, q_idx, kv_idx: jnp.asarray(IDS)[q_idx] >= kv_idx},
}
TRACED = {
    "a mask": lambda: {"block_mask": blocks(masks.document(jnp.asarray(IDS) + 0))},
    "mods": lambda: {
        "score_mod": scores.alibi(jnp.exp2(-jnp.arange(1.0, HEADS + 1))),
        "mask_mod": same_id(jnp.asarray(IDS) + 0),
    },
}


def maker(flavour: str, options):
    return lambda: FLAVOURS[flavour].make(FEATURES, **options())


def inputs_of(length: int = LENGTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(1, length, FEATURES)), jnp.float32)


class Recipes:
    """The recipes of one flavour: the state of a layer, and a layer of another one's structure and a state."""

    def __init__(self, flavour: str, options):
        self.is_nnx, self.make = flavour == "nnx", maker(flavour, options)

    def state(self, layer):
        return nnx.state(layer) if self.is_nnx else layer.variables

    def updated(self, layer, state):
        if self.is_nnx:
            nnx.update(layer, state)
            return layer
        return jax.tree.unflatten(jax.tree.structure(layer), jax.tree.leaves(state))

    def abstract(self):
        """A layer of shapes, and what merges it with a state."""
        if self.is_nnx:
            graph, shapes = nnx.split(nnx.eval_shape(self.make))
            return shapes, lambda state: nnx.merge(graph, state)
        layer = jax.eval_shape(self.make)
        return layer.variables, lambda state: self.updated(layer, state)

    def jitted(self):
        return nnx.jit(self.make)() if self.is_nnx else jax.jit(self.make)()


@tiers(full={"options": "a mask made inside"}, in_turns=True, rest="full")
@flavours
@pytest.mark.parametrize("options", KNOWN)
def test_layers_of_known_masks_and_mods_keep_no_state_of_them(flavour, options, tmp_path):
    recipes, inputs = Recipes(flavour, KNOWN[options]), inputs_of()
    layer = recipes.make()
    outputs, state = layer(inputs), recipes.state(layer)
    same = lambda layer: assert_close(layer(inputs), outputs)
    assert jax.tree.structure(state).num_leaves == jax.tree.structure(FLAVOURS[flavour].params(layer)).num_leaves == 4

    same(recipes.updated(recipes.make(), state))
    same(copy.deepcopy(layer))
    shapes, merge = recipes.abstract()
    same(merge(state))
    same(recipes.jitted())
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)  # all leaves, whatever they are
    average = jax.tree.map(lambda a, b: (0.9 * a + 0.1 * b.astype(a.dtype)).astype(a.dtype), state, half)
    np.testing.assert_allclose(merge(average)(inputs), outputs, atol=0.02)

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        same(merge(checkpointer.restore(tmp_path / "state", shapes)))


@pytest.mark.full
@flavours
def test_a_state_is_restored_for_another_length(flavour):
    of = lambda length: Recipes(flavour, lambda: {"block_mask": blocks(masks.causal(), length)})
    short, long = of(LENGTH), of(2 * LENGTH)
    layer, inputs = short.make(), inputs_of(2 * LENGTH)
    longer = long.abstract()[1](short.state(layer))
    assert_close(longer(inputs)[:, :LENGTH], layer(inputs[:, :LENGTH]))
    assert_close(longer(inputs), layer(inputs, mask_mod=masks.causal()))


@full
@NEEDS_EIGHT_DEVICES
@flavours
@pytest.mark.parametrize("options", ["a mask made inside", "ready mods"])
def test_sharded_creation_in_one_jit(flavour, options):
    recipes, inputs = Recipes(flavour, KNOWN[options]), inputs_of()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "model"))

    def create():
        layer = recipes.make()
        return recipes.updated(layer, jax.lax.with_sharding_constraint(recipes.state(layer), sharding))

    layer = nnx.jit(create)() if recipes.is_nnx else jax.jit(create)()
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(recipes.state(layer)))
    assert_close(layer(inputs), recipes.make()(inputs), atol=1e-5)


@full
@NEEDS_EIGHT_DEVICES
@flavours
def test_batches_sharded_over_the_mesh_of_make_mesh(flavour):
    """Its axes are explicit: shardings are part of the types of ids, caches and masks."""
    layer, mesh = FLAVOURS[flavour].make(FEATURES, mask_mod=masks.causal()), jax.make_mesh((2,), ("data",))
    x = jax.random.normal(jax.random.key(0), (4, LENGTH, FEATURES))
    ids = jnp.sort(jax.random.randint(jax.random.key(1), (4, LENGTH), 0, 3), axis=1)

    def packed(layer, x, ids):
        mask = masks.causal_document(ids)
        return layer(x, block_mask=jflex.create_block_mask(mask, 4, None, LENGTH, LENGTH, block_size=16))

    def decoded(layer, x, cache):
        _, cache = layer.decode(x[:, :-1], cache)
        return layer.decode(x[:, -1:], cache)[0]

    def padded(x, ids):
        mask, options = nnx.make_attention_mask(ids > 0, ids > 0), {"attention_fn": flax_layers.attention_fn()}
        if flavour == "nnx":
            return nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), decode=False, **options)(x, mask=mask)
        own = flax.linen.MultiHeadDotProductAttention(HEADS, **options)
        return own.init_with_output(jax.random.key(0), x, mask=mask)[0]

    def outputs(place):
        arrays, cache = place((x, ids)), layer.init_cache(4, max_length=LENGTH)
        caches = [decoded(layer, arrays[0], cache), decoded(layer, arrays[0], place(cache))]
        return [jax.jit(packed)(layer, *arrays), *caches, jax.jit(padded)(*arrays)]

    expected = outputs(lambda tree: tree)
    with jax.set_mesh(mesh):
        found = outputs(lambda tree: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))), tree))
    jax.tree.map(functools.partial(assert_close, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.full
@pytest.mark.parametrize("options", [pytest.param("a mask", marks=full), "mods"])
def test_traced_masks_and_mods_are_variables_of_a_layer_made_in_jit(options):
    recipes, inputs = Recipes("nnx", TRACED[options]), inputs_of()
    layer, eager = recipes.jitted(), recipes.make()
    assert_close(layer(inputs), eager(inputs))
    params, others = nnx.state(layer, nnx.Param, ...)
    assert len(jax.tree.leaves(params)) == 4
    assert len(jax.tree.leaves(others)) > 0
    nnx.update(layer, nnx.state(layer))
    restored = nnx.merge(nnx.split(nnx.eval_shape(recipes.make))[0], nnx.state(layer))
    assert_close(restored(inputs), eager(inputs))
    gradients = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(inputs) ** 2)))(layer)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    step = lambda layer, cache: layer.decode(inputs[:, 30:31], cache)[0]
    caches = [layer.decode(inputs[:, :30], layer.init_cache(1, LENGTH))[1] for layer in (layer, eager)]
    assert_close(nnx.jit(step)(layer, caches[0]), step(eager, caches[1]), atol=1e-5)


@full
def test_each_layer_of_a_stack_has_its_traced_window():
    window = lambda n: lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < n)
    make = lambda n: FLAVOURS["nnx"].make(FEATURES, mask_mod=window(n))
    stacked, inputs, sizes = nnx.vmap(make)(jnp.array([3, 9])), inputs_of(), (3, 9)
    outputs = nnx.vmap(lambda layer: layer(inputs))(stacked)
    for output, n in zip(outputs, sizes, strict=True):
        assert_close(output, make(n)(inputs))


@pytest.mark.parametrize("options", [pytest.param("a mask", marks=full), "mods"])
def test_flaxs_own_layer_made_in_jit(options):
    def make():
        function = flax_layers.attention_fn(**TRACED[options]())
        return nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=function, decode=False, rngs=nnx.Rngs(0))

    assert_close(nnx.jit(make)()(inputs_of()), make()(inputs_of()))


@pytest.mark.full
def test_equal_masks_share_a_program_and_variables_any():
    traces, inputs = [], inputs_of()

    @nnx.jit
    def run(layer):
        traces.append(1)
        return layer(inputs)

    layer = maker("nnx", KNOWN["a mask made inside"])()
    assert isinstance(layer.block_mask, jflex.BlockMask)
    for mask_mod in (masks.document(IDS), masks.document(IDS)):
        layer.block_mask = blocks(mask_mod)
        run(layer)
    assert len(traces) == 1
    for width in (7, 8, 9):  # data: the programs of both masks have the same captured shapes
        mask = blocks(masks.document(np.arange(LENGTH) // width))
        layer.block_mask = AttentionMask(mask)
        assert_close(run(layer), maker("nnx", lambda mask=mask: {"block_mask": mask})()(inputs))
    assert len(traces) == 2


def test_layers_of_equal_ready_mods_share_a_program_and_are_averaged():
    traces, inputs = [], inputs_of()
    mods = lambda left=4: {"mask_mod": masks.sliding_window(left), "score_mod": scores.softcap(5.0)}
    first, second = (FLAVOURS["nnx"].make(FEATURES, seed=seed, **mods()) for seed in range(2))
    run = nnx.jit(lambda layer: traces.append(1) or layer(inputs))
    for layer in (first, second, jax.tree.map(lambda a, b: (a + b) / 2, first, second), copy.copy(first)):
        assert_close(run(layer), layer(inputs), atol=1e-5)
    assert len(traces) == 1
    module = functools.partial(flax_layers.linen.FlexAttention, FEATURES, HEADS)
    assert module(**mods()) == module(**mods()) != module(**mods(5))
    assert masks.sliding_window(1) != masks.sliding_window(True)
    assert masks.document(IDS) != masks.document(IDS)  # numpy arrays may change


def test_linen_modules_of_equal_masks_are_equal_and_jitted():
    of = lambda make=flax_layers.linen.FlexAttention: make(FEATURES, HEADS, block_mask=blocks(masks.document(IDS)))
    module, inputs = of(), inputs_of()
    assert module == of()
    assert hash(module) == hash(of())
    variables = module.init(jax.random.key(0), inputs)
    jitted = of(flax.linen.jit(flax_layers.linen.FlexAttention))
    assert_close(jitted.apply(variables, inputs), module.apply(variables, inputs))


def test_sizes_of_a_cloned_linen_module_follow_its_arguments():
    sizes = {"in_features": FEATURES, "num_heads": HEADS}
    for changes in ({"num_heads": 2 * HEADS}, {"num_heads": HEADS // 2}, {"in_features": 2 * FEATURES}):
        changed = flax_layers.linen.FlexAttention(**sizes).clone(**changes)
        expected = flax_layers.linen.FlexAttention(**sizes | changes)
        assert changed == expected
        assert changed.init_cache(1, 8).k.shape == expected.init_cache(1, 8).k.shape


@full
@flavours
def test_latent_layers_keep_masks_alike(flavour):
    sizes = {"latent_dim": 8, "nope_head_dim": 4, "rope_head_dim": 4, "value_head_dim": 4}
    options = KNOWN["a mask made inside"]
    if flavour == "linen":
        layer = flax_layers.linen.MultiHeadLatentAttention
        assert layer(FEATURES, HEADS, **sizes, **options()) == layer(FEATURES, HEADS, **sizes, **options())
        return
    make = lambda: flax_layers.nnx.MultiHeadLatentAttention(FEATURES, HEADS, **sizes, **options(), rngs=nnx.Rngs(0))
    layer = make()
    assert nnx.state(layer, nnx.Param) == nnx.state(layer)
    assert_close(nnx.jit(make)()(inputs_of()), layer(inputs_of()))


def captured(module, inputs, flavour):
    """The outputs under `jit`, and the intermediate values that Flax captures of all modules."""
    if flavour == "linen":
        apply = jax.jit(functools.partial(module.module.apply, capture_intermediates=True))
        outputs, state = apply(module.variables, inputs)
        return outputs, state["intermediates"]
    keep = functools.partial(nnx.capture, method_outputs=nnx.Intermediate)
    return nnx.jit(lambda module, inputs: keep(module, nnx.Intermediate)(inputs))(module, inputs)


@full
@flavours
def test_all_intermediate_values_but_those_of_mods_are_captured(flavour):
    layer, inputs = FLAVOURS[flavour].make(FEATURES, score_mod=FLAVOURS[flavour].alibi()), inputs_of()
    expected = layer(inputs)
    outputs, values = captured(layer, inputs, flavour)
    assert_close(outputs, expected)
    assert {"query", "key", "value", "out"} == set(values) - {"__call__"}
    assert_close(values["out"]["__call__"][0], expected)
    assert_close(layer(inputs), expected)


@full
def test_functions_that_call_modules_are_not_captured():
    class Model(nnx.Module):
        def __init__(self):
            self.attention, self.bias = FLAVOURS["nnx"].make(FEATURES), FLAVOURS["nnx"].alibi()

        def __call__(self, inputs):
            return self.attention(inputs, score_mod=lambda *arguments: self.bias(*arguments))

    model, inputs = Model(), inputs_of()
    outputs, values = captured(model, inputs, "nnx")
    assert_close(outputs, model(inputs))
    assert set(values) == {"__call__", "attention"}


@full
@flavours
def test_flaxs_own_layer_is_created_in_jit_and_captures_no_values_of_mods(flavour):
    sizes, inputs = {"num_heads": HEADS, "qkv_features": FEATURES}, inputs_of()
    if flavour == "nnx":
        attention_fn = flax_layers.attention_fn(score_mod=FLAVOURS[flavour].alibi())
        make = functools.partial(nnx.MultiHeadAttention, in_features=FEATURES, decode=False, rngs=nnx.Rngs(0))
        layer = make(**sizes, attention_fn=attention_fn)
    else:

        class Layer(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, inputs):
                attention_fn = flax_layers.attention_fn(score_mod=FLAVOURS[flavour].alibi(name="alibi"))
                return flax.linen.MultiHeadDotProductAttention(**sizes, attention_fn=attention_fn)(inputs)

        layer = LinenLayer(jax.jit(Layer().init)(jax.random.key(0), inputs), Layer())
    outputs, values = captured(layer, inputs, flavour)
    assert_close(outputs, layer(inputs))
    names = str(jax.tree.map(jnp.shape, values))
    assert "query" in names
    assert "alibi" not in names
    assert "score_mod" not in names
