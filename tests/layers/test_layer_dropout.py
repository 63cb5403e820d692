"""Dropout in both `FlexAttention`: when it is on, and where its keys come from. (Its weights: test_dropout.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_layers
import flax_layers.linen
import flax_layers.nnx
import jflex
from flax_layers.attention import core as attention_core
from tests.support.dense_masks import causal
from tests.support.layer_flavours import FLAVOURS, HEADS, LinenLayer
from tests.support.rows import tiers

IN_FEATURES, LENGTH, RATE = 32, 19, 0.4
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
assert_same = np.testing.assert_array_equal


def layer_of(flavour: str, *, rate: float = RATE, **options):
    """A layer; linen parameters are made without dropout."""
    options = {"num_kv_heads": 2, "mask_mod": causal, "implementation": "xla"} | options
    if flavour == "nnx":
        return FLAVOURS["nnx"].make(IN_FEATURES, dropout_rate=rate, **options)
    plain = FLAVOURS["linen"].make(IN_FEATURES, **options)
    return LinenLayer(plain.variables, plain.module.clone(dropout_rate=rate))


def key_argument(flavour: str, key: jax.Array) -> dict:
    """What passes this key to one call."""
    return {"rngs" if flavour == "nnx" else "dropout_rng": key}


INPUTS = np.random.default_rng(1).normal(size=(2, LENGTH, IN_FEATURES)).astype(np.float32)


def differ(first, second) -> bool:
    return bool(np.abs(np.asarray(first) - np.asarray(second)).max() > 1e-3)


# --- when it is on


@pytest.mark.full
@flavours
def test_a_rate_of_0_changes_nothing(flavour):
    """Neither the program nor the variables, and no key is needed, whatever `deterministic`."""
    plain = FLAVOURS[flavour].make(IN_FEATURES, mask_mod=causal, implementation="xla")
    zero = FLAVOURS[flavour].make(IN_FEATURES, mask_mod=causal, implementation="xla", dropout_rate=0.0)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(plain)) == jax.tree.map(jnp.shape, jax.tree.leaves(zero))
    program = lambda layer, **options: str(jax.make_jaxpr(lambda inputs: layer(inputs, **options))(INPUTS))
    assert program(zero) == program(plain) == program(zero, deterministic=False)
    assert_same(zero(INPUTS), plain(INPUTS))


@pytest.mark.full
def test_deterministic_calls_and_decoding_never_drop():
    """In linen; nnx shares the methods."""
    layer, plain = layer_of("linen"), layer_of("linen", rate=0.0)
    expected = plain(INPUTS)
    assert_same(layer(INPUTS, deterministic=True), expected)
    assert differ(layer(INPUTS, deterministic=False, rngs={"dropout": jax.random.key(1)}), expected)
    prompt, _ = layer.decode(INPUTS, layer.init_cache(2, LENGTH))
    assert_same(prompt, plain.decode(INPUTS, plain.init_cache(2, LENGTH))[0])
    pages, table = layer.init_paged_cache(5, 16), jnp.array([[1, 2], [3, 4]])
    batch = jflex.paged.PagedBatch(jnp.array([0, LENGTH, 2 * LENGTH]), jnp.array([LENGTH, LENGTH]), table)
    packed = INPUTS.reshape(-1, IN_FEATURES)
    assert_same(layer.decode_paged(packed, pages, batch)[0], plain.decode_paged(packed, pages, batch)[0])


@pytest.mark.full
def test_train_eval_and_view_of_nnx():
    layer, expected = layer_of("nnx"), layer_of("nnx", rate=0.0)(INPUTS)
    layer.eval()
    assert_same(layer(INPUTS), expected)
    layer.train()
    assert differ(layer(INPUTS), expected)
    assert_same(layer(INPUTS, deterministic=True), expected)  # the call goes first
    assert_same(nnx.view(layer, deterministic=True)(INPUTS), expected)
    assert differ(layer(INPUTS), expected)


# --- keys


@tiers(default={"flavour": "nnx"})
@flavours
def test_the_layer_is_attention_with_the_key_by_hand(flavour):
    layer, key = layer_of(flavour), jax.random.key(5)
    output = layer(INPUTS, deterministic=False, **key_argument(flavour, key))
    of_nnx = layer_of("nnx")  # projects by hand; the parameters are those of the layer
    nnx.update(of_nnx, nnx.State(jax.tree.map(jnp.asarray, FLAVOURS[flavour].params(layer))))
    query = attention_core.query_heads(of_nnx, INPUTS)
    key_heads, value = attention_core.project_kv(of_nnx, INPUTS)
    attended = jflex.flex_attention(
        query, key_heads, value, mask_mod=causal, implementation="xla", dropout_rate=RATE, dropout_key=key
    )
    assert_same(output, attention_core.join(of_nnx, attended))


def test_each_call_of_nnx_advances_the_stream():
    layer, again, stream = layer_of("nnx", deterministic=False), layer_of("nnx", deterministic=False), nnx.Rngs(3)
    outputs = [layer(INPUTS) for _ in range(3)]
    assert differ(outputs[0], outputs[1])
    assert differ(outputs[1], outputs[2])
    compiled = nnx.jit(lambda layer, inputs: layer(inputs))
    for output in outputs:  # and under jit
        np.testing.assert_allclose(compiled(again, INPUTS), output, rtol=1e-5, atol=1e-5)
    assert differ(layer(INPUTS, rngs=stream), layer(INPUTS, rngs=stream))
    assert differ(layer(INPUTS, rngs=stream.default), layer(INPUTS, rngs=stream.default))


@pytest.mark.full
def test_layers_of_one_rngs_have_streams_of_their_own():
    rngs = nnx.Rngs(0)
    make = lambda: flax_layers.nnx.FlexAttention(IN_FEATURES, HEADS, dropout_rate=RATE, rngs=rngs)
    first, second = make(), make()
    words = [np.asarray(jax.random.key_data(layer.rngs())) for layer in (first, second)]
    assert not np.array_equal(*words)


class Twice(linen.Module):
    """A layer that is called twice, on the same inputs."""

    @linen.compact
    def __call__(self, inputs):
        layer = flax_layers.linen.FlexAttention(
            IN_FEATURES, HEADS, dropout_rate=RATE, deterministic=False, implementation="xla"
        )
        return layer(inputs), layer(inputs)


@pytest.mark.full
def test_each_call_of_linen_makes_a_key():
    module, keys = Twice(), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, INPUTS)
    call = lambda variables, key: module.apply(variables, INPUTS, rngs={"dropout": key})
    first, second = call(variables, keys["dropout"])
    assert differ(first, second)
    compiled = jax.jit(call)(variables, keys["dropout"])
    np.testing.assert_allclose(compiled[0], first, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(compiled[1], second, rtol=1e-5, atol=1e-5)


# --- Flax's own layers


@tiers(default={"flavour": "nnx"})
@flavours
@pytest.mark.parametrize("broadcast", [{}, {"broadcast_dropout": False}], ids=["as by default", "not broadcast"])
def test_the_function_for_flaxs_own_layers_drops(flavour, broadcast):
    """With the key that they pass; by default, batch entries and heads drop the same weights."""
    keys = []

    def by_hand(query, key, value, dropout_rng=None, **handed):  # linen passes what it finds in the signature
        keys.append(dropout_rng)
        shared = dropout_rng if broadcast else dropout_rng[None, None]
        return jflex.flex_attention(query, key, value, dropout_rate=RATE, dropout_key=shared, implementation="xla")

    options = {"num_heads": HEADS, "dropout_rate": RATE, "deterministic": False} | broadcast
    outputs = []
    for function in (flax_layers.attention_fn(implementation="xla"), by_hand):
        if flavour == "nnx":
            layer = nnx.MultiHeadAttention(
                in_features=IN_FEATURES, attention_fn=function, decode=False, rngs=nnx.Rngs(0), **options
            )
            outputs.append(layer(INPUTS))
        else:
            layer = linen.MultiHeadDotProductAttention(attention_fn=function, **options)
            variables = layer.init(jax.random.key(0), INPUTS)
            outputs.append(layer.apply(variables, INPUTS, rngs={"dropout": jax.random.key(1)}))
    assert keys
    assert_same(*outputs)


# --- errors


CALLS = {
    "nnx, unset": ("nnx", {}, {}, ValueError, r"`deterministic` is not set.*layer\.train\(\)"),
    "nnx, no stream kept": (
        "nnx", {"keep_rngs": False}, {"deterministic": False}, ValueError,
        r"`rngs` are missing.*`rngs=nnx\.Rngs\(dropout=key\)`",
    ),
    "nnx, no such stream": (
        "nnx", {}, {"deterministic": False, "rngs": nnx.Rngs(params=0)}, ValueError,
        r"stream \"dropout\" or a default one.*\['params'\]",
    ),
    "nnx, a dict": (
        "nnx", {}, {"deterministic": False, "rngs": {"dropout": 0}}, TypeError,
        r"`rngs` must be nnx\.Rngs, .*Got dict",
    ),
    "linen, unset": ("linen", {}, {}, ValueError, r"\"deterministic\" must be passed"),
    "linen, no key": (
        "linen", {}, {"deterministic": False}, ValueError, r"no key for dropout.*`rngs=\{\"dropout\": key\}`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_compute_nothing(case, monkeypatch):
    flavour, options, call, error, message = CALLS[case]
    layer = layer_of(flavour, **options)
    monkeypatch.setattr(attention_core, "attend", None)
    with pytest.raises(error, match=message):
        layer(INPUTS, **call)


def test_a_constructor_of_nnx_without_a_stream():
    make = lambda **options: flax_layers.nnx.FlexAttention(
        IN_FEATURES, HEADS, dropout_rate=RATE, rngs=nnx.Rngs(params=0), **options
    )
    with pytest.raises(ValueError, match=r"Add one, as `nnx\.Rngs\(params=0, dropout=1\)`"):
        make()
    assert make(keep_rngs=False).rngs is None
