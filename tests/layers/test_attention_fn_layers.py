"""`flax_layers.attention_fn` inside Flax's own layers: training, decode caches, mods with parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jflex
from flax_layers import attention_fn
from flax_layers.linen import params_from_nnx
from tests.layers.test_attention_fn import (
    KV_HEADS,
    WIDTH,
    B,
    D,
    T,
    arrays,
    assert_close,
    causal_array,
    draw,
    flavours,
    shown,
)
from tests.support.layer_flavours import HEADS, SLOPES, LinenAlibi, NNXAlibi
from tests.support.rows import in_turns


def nnx_layer(function=None, **options) -> nnx.MultiHeadAttention:
    plain = {"num_kv_heads": KV_HEADS, "decode": False, "rngs": nnx.Rngs(0)}
    functions = {} if function is None else {"attention_fn": function}
    return nnx.MultiHeadAttention(HEADS, WIDTH, **(plain | functions | options))


def linen_layer(function=None, **options) -> linen.MultiHeadDotProductAttention:
    functions = {} if function is None else {"attention_fn": function}
    return linen.MultiHeadDotProductAttention(HEADS, **(functions | options))


def inputs_of(*batch: int) -> jax.Array:
    return draw(*batch, T, WIDTH, seed=11)


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_nnx_layer_trains_as_with_its_own_function():
    mask, inputs = nnx.make_causal_mask(jnp.ones((B, T))), inputs_of(B)
    run = nnx.jit(nnx.value_and_grad(lambda layer: jnp.sum(jnp.square(layer(inputs, mask=mask)))))
    (value, gradients), (expected, right) = run(nnx_layer(attention_fn())), run(nnx_layer())
    jax.tree.map(close, (value, nnx.to_pure_dict(gradients)), (expected, nnx.to_pure_dict(right)))
    assert_close(nnx_layer(attention_fn())(inputs, is_causal=True), nnx_layer()(inputs, mask=mask))


@pytest.mark.full
def test_linen_layer_trains_as_with_its_own_function():
    mask, inputs = linen.make_causal_mask(jnp.ones((B, T))), inputs_of(B)
    options = {"normalize_qk": True, "force_fp32_for_softmax": True, "dropout_rate": 0.1, "deterministic": True}
    variables = linen_layer(**options).init(jax.random.key(0), inputs)
    loss = lambda layer, variables: jnp.sum(jnp.square(layer.apply(variables, inputs, mask=mask)))
    run = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    jax.tree.map(close, *(run(linen_layer(function, **options), variables) for function in (attention_fn(), None)))


def nnx_steps(function, inputs: jax.Array, user_mask) -> jax.Array:
    layer = nnx_layer(function, decode=True)
    layer.init_cache(inputs.shape)
    step = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))
    return jnp.concatenate([step(layer, inputs[..., i : i + 1, :], user_mask) for i in range(T)], axis=-2)


def linen_steps(function, inputs: jax.Array, user_mask) -> jax.Array:
    layer = linen_layer(function, decode=True)
    variables = layer.init(jax.random.key(0), inputs)
    step = jax.jit(lambda variables, x, mask: layer.apply(variables, x, mask=mask, mutable=["cache"]))
    outputs = []
    for i in range(T):
        output, cache = step(variables, inputs[..., i : i + 1, :], user_mask)
        variables = variables | cache
        outputs.append(output)
    return jnp.concatenate(outputs, axis=-2)


STEPS = {"nnx": nnx_steps, "linen": linen_steps}
decoding = pytest.mark.parametrize(
    ("flavour", "batch"), [("nnx", (B,)), ("linen", (B,)), ("linen", (2, 1)), ("nnx", (1, 2))]
)


@pytest.mark.full
@in_turns
@decoding
@pytest.mark.parametrize("masked", [False, True])
def test_decode_caches_give_what_flaxs_own_function_gives(flavour, batch, masked):
    inputs = inputs_of(*batch)
    hole = jnp.ones((*batch, 1, 1, T), bool).at[..., 1, 0, 0, 4].set(False)
    user_mask = hole if masked else None
    assert_close(STEPS[flavour](attention_fn(), inputs, user_mask), STEPS[flavour](None, inputs, user_mask))


@pytest.mark.full
@in_turns
@decoding
@pytest.mark.parametrize("form", ["mask_mod", "block_mask"])
def test_mods_see_the_position_in_decode_caches(flavour, batch, form):
    alibi = lambda score, b, h, q_idx, kv_idx: score - SLOPES[h] * (q_idx - 2 * kv_idx * b).astype(score.dtype)
    window = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 4 + b)
    block_mask = jflex.create_block_mask(window, 2, None, T, T, block_size=4)
    mask = {"mask_mod": {"mask_mod": window}, "block_mask": {"block_mask": block_mask}}[form]
    inputs, function = inputs_of(*batch), attention_fn(alibi, **mask, decode=True)
    if flavour == "nnx":
        expected = nnx_layer(function)(inputs)
    else:
        expected = linen_layer(function).apply(linen_layer().init(jax.random.key(0), inputs), inputs)
    assert_close(STEPS[flavour](function, inputs, None), expected)


@pytest.mark.full
def test_the_position_is_that_of_the_cache_under_a_mask_of_the_caller():
    """Which hides tokens of one sequence, its newest, too, but not of the other."""
    far = lambda score, b, h, q_idx, kv_idx: score - 0.3 * (q_idx - kv_idx).astype(score.dtype)
    inputs = inputs_of(B)
    hides = jnp.ones((B, 1, 1, T), bool).at[1, 0, 0, 5:].set(False)
    whole = nnx_layer(attention_fn(far))(inputs, mask=hides & causal_array().astype(bool))
    assert_close(nnx_steps(attention_fn(far, decode=True), inputs, hides), whole)


@pytest.mark.full
@flavours
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("score_mod", attention_fn(jflex.scores.softcap(3.0))),
        ("mask_mod", attention_fn(None, jflex.masks.causal())),
        ("block_mask", attention_fn(block_mask=jflex.create_block_mask(jflex.masks.causal(), None, None, T, T))),
    ],
)
def test_mods_are_refused_where_the_position_is_not_known(flavour, name, function):
    with pytest.raises(
        ValueError, match=f"`{name}` needs the position of the query.*pass decode=True to `attention_fn`"
    ):
        STEPS[flavour](function, inputs_of(B), None)


@pytest.mark.full
def test_one_query_of_other_inputs_stands_at_the_beginning():
    query, key, value = draw(B, 1, HEADS, D), *arrays((B,))[1:]
    mask = shown(B, 1, 1, T)
    far = lambda score, b, h, q_idx, kv_idx: score + 0.1 * (q_idx - kv_idx).astype(score.dtype)
    bias = -0.1 * jnp.arange(T, dtype=jnp.float32).reshape(1, 1, 1, T)
    expected = linen.dot_product_attention(query, key, value, bias=bias, mask=mask)
    assert_close(attention_fn(far, decode=False)(query, key, value, mask=mask), expected)
    assert_close(attention_fn(far)(query, key, value), linen.dot_product_attention(query, key, value, bias=bias))
    with pytest.raises(ValueError, match="`is_causal` needs the position"):
        attention_fn()(query, key, value, mask=mask, is_causal=True)


@pytest.mark.full
def test_an_nnx_mod_with_parameters_trains_in_flaxs_layer():
    inputs = inputs_of(B)
    layer = nnx_layer(attention_fn(NNXAlibi(), jflex.masks.causal()))
    loss = lambda layer: jnp.sum(jnp.square(layer(inputs)))
    gradients = params_from_nnx(nnx.jit(nnx.grad(loss))(layer))
    captured = lambda slopes: loss(nnx_layer(attention_fn(jflex.scores.alibi(slopes), jflex.masks.causal())))
    assert_close(gradients["attention_fn"]["score_mod"]["slopes"], jax.grad(captured)(SLOPES), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("form", ["module", "closure", "captured"])
def test_a_linen_mod_with_parameters_trains_in_flaxs_layer(form):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, inputs):
            if form == "captured":
                score_mod = jflex.scores.alibi(self.param("slopes", lambda key: SLOPES))
            else:
                alibi = LinenAlibi(name="alibi")
                score_mod = alibi if form == "module" else lambda *place: alibi(*place)
            return linen_layer(attention_fn(score_mod, jflex.masks.causal()), name="attention")(inputs)

    inputs, model = inputs_of(B), Model()
    variables = model.init(jax.random.key(0), inputs)
    gradients = jax.jit(jax.grad(lambda variables: jnp.sum(jnp.square(model.apply(variables, inputs)))))(variables)
    found = gradients["params"]["slopes"] if form == "captured" else gradients["params"]["alibi"]["slopes"]

    def loss(slopes):
        layer = linen_layer(attention_fn(jflex.scores.alibi(slopes), jflex.masks.causal()))
        return jnp.sum(jnp.square(layer.apply({"params": variables["params"]["attention"]}, inputs)))

    assert_close(found, jax.grad(loss)(SLOPES), rtol=1e-4)
