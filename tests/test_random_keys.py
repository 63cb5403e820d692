"""Mods that capture a random key: the numbers are those that the key gives outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.mods.trace import trace_score_mod

T, HEADS = 5, 2
pytestmark = pytest.mark.usefixtures("in_haste")
KEYS = {"typed": jax.random.key(3), "raw": jax.random.PRNGKey(3)}
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def arrays():
    return jax.random.normal(jax.random.key(0), (3, 1, T, HEADS, 16))


def place(key, h, q_idx, kv_idx):
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, h), q_idx), kv_idx)


def noisy(key):
    return lambda score, b, h, q_idx, kv_idx: score * jax.random.uniform(place(key, h, q_idx, kv_idx))


def chosen(key):
    return lambda b, h, q_idx, kv_idx: jax.random.bernoulli(place(key, h, q_idx, kv_idx), 0.7) | (q_idx == kv_idx)


def table(draw, key):
    places = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in (HEADS, T, T)), indexing="ij")
    drawn = jax.vmap(lambda *at: draw(place(key, *at)))(*(x.reshape(-1) for x in places))
    return drawn.reshape(HEADS, T, T)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_numbers_are_those_of_the_key(kind, implementation):
    key, call = KEYS[kind], functools.partial(jflex.flex_attention, implementation=implementation)
    factors = table(jax.random.uniform, key)
    seen = table(functools.partial(jax.random.bernoulli, p=0.7), key)
    known = lambda score, b, h, q_idx, kv_idx: score * factors[h, q_idx, kv_idx]
    known_mask = lambda b, h, q_idx, kv_idx: seen[h, q_idx, kv_idx] | (q_idx == kv_idx)

    def run(score_mod, mask_mod):
        loss = lambda *xs: jnp.sum(jnp.sin(call(*xs, score_mod, mask_mod=mask_mod)))
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*arrays())

    jax.tree.map(assert_close, run(noisy(key), chosen(key)), run(known, known_mask))


def test_keys_are_data():
    traced = [trace_score_mod(noisy(jax.random.key(seed)))[0] for seed in (0, 1)]
    assert traced[0] == traced[1]
    call = lambda key: jflex.flex_attention(*arrays(), noisy(key), implementation="xla")
    keys = jax.random.split(jax.random.key(5), 2)
    found = jax.jit(jax.vmap(call))(keys)
    assert_close(found, jnp.stack([call(key) for key in keys]))
    assert not np.allclose(found[0], found[1])


def test_a_block_mask_of_a_key():
    key = KEYS["typed"]
    block_mask = jflex.create_block_mask(chosen(key), None, HEADS, T, T, block_size=4)
    found = jflex.flex_attention(*arrays(), block_mask=block_mask, implementation="xla")
    assert_close(found, jflex.flex_attention(*arrays(), mask_mod=chosen(key), implementation="reference"))


def test_kernels_name_the_primitive():
    config = jflex.Config(interpret=True)
    with pytest.raises(jflex.UnsupportedError, match=r"noisy.*primitive `random_wrap` has no meaning on a tile.*'xla'"):
        jflex.flex_attention(*arrays(), noisy(KEYS["typed"]), implementation="triton", config=config)
