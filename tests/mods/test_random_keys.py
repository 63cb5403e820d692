"""Mods that draw from a random key get the numbers that it gives outside of a mod, on every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.mods.trace import trace_score_mod
from pallas_kernels.program.rules.random_bits import threefry2x32
from tests.support import gpu_compile
from tests.support.hopper_emulator import emulated
from tests.support.rows import tiers

T, HEADS = 5, 2
INTERPRET = jflex.Config(interpret=True)
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


@tiers(rest="full", in_turns=True, share=2)
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("implementation", ["xla", "triton", "reference"])
def test_numbers_are_those_of_the_key(kind, implementation):
    key = KEYS[kind]
    call = functools.partial(jflex.flex_attention, implementation=implementation, config=INTERPRET)
    factors = table(jax.random.uniform, key)
    seen = table(functools.partial(jax.random.bernoulli, p=0.7), key)
    known = lambda score, b, h, q_idx, kv_idx: score * factors[h, q_idx, kv_idx]
    known_mask = lambda b, h, q_idx, kv_idx: seen[h, q_idx, kv_idx] | (q_idx == kv_idx)

    def run(score_mod, mask_mod):
        loss = lambda *xs: jnp.sum(jnp.sin(call(*xs, score_mod, mask_mod=mask_mod)))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays())

    jax.tree.map(assert_close, run(noisy(key), chosen(key)), run(known, known_mask))


@pytest.mark.full
def test_keys_are_data():
    traced = [trace_score_mod(noisy(jax.random.key(seed)))[0] for seed in (0, 1)]
    assert traced[0] == traced[1]
    call = lambda key: jflex.flex_attention(*arrays(), noisy(key), implementation="xla")
    keys = jax.random.split(jax.random.key(5), 2)
    found, one = jax.jit(jax.vmap(call))(keys), jax.jit(call)
    assert_close(found, jnp.stack([one(key) for key in keys]))
    assert not np.allclose(found[0], found[1])


DRAWS = {
    "normal": jax.random.normal,
    "made_inside": lambda key: jax.random.uniform(
        jax.random.split(jax.random.key(1), 4)[jax.random.randint(key, (), 0, 4)]
    ),
    "integers": lambda key: jax.random.randint(key, (), -3, 9).astype(jnp.float32),
    "split": lambda key: jnp.subtract(*map(jax.random.uniform, jax.random.split(key))),
    "several": lambda key: jnp.max(jax.random.uniform(key, (3,))),
    "reshaped": lambda key: jax.random.uniform(jax.random.split(key, (2, 2)).reshape(4)[2]),
    "raw": lambda key: jax.random.uniform(jax.random.wrap_key_data(jax.random.key_data(jax.random.clone(key)) ^ 1)),
    "of_several": lambda key: jax.random.uniform(jax.random.split(key)[(jax.random.bits(key) % 2).astype(jnp.int32)]),
    "either": lambda key: jax.random.uniform(
        jax.lax.cond(jax.random.bernoulli(key), lambda: jax.random.fold_in(key, 1), lambda: key)
    ),
    "short": lambda key: jax.random.bits(key, (), jnp.uint16).astype(jnp.float32) * 1e-4,
}


@pytest.mark.full
@pytest.mark.parametrize("draw", DRAWS)
def test_what_a_kernel_draws(draw):
    mod = lambda score, b, h, q_idx, kv_idx: score + DRAWS[draw](place(KEYS["typed"], h, q_idx, kv_idx))
    call = lambda name: jax.jit(lambda *xs: jflex.flex_attention(*xs, mod, implementation=name, config=INTERPRET))
    assert_close(call("triton")(*arrays()), call("reference")(*arrays()))


@pytest.mark.full
def test_what_a_hopper_kernel_draws():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 16), jnp.bfloat16)
    call = functools.partial(jflex.flex_attention, query, key, value, noisy(KEYS["typed"]))
    with emulated():
        found = call(implementation="mosaic_gpu", config=INTERPRET)
    np.testing.assert_allclose(
        found.astype(np.float32), call(implementation="reference").astype(np.float32), rtol=0.02, atol=0.01
    )


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
@pytest.mark.parametrize("mods", [{"score_mod": noisy(KEYS["typed"])}, {"mask_mod": chosen(KEYS["typed"])}])
def test_compiles(mods):
    """For Hopper, with gradients by Triton; without the kernels that contain NaN, which spill but seldom run."""
    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
    call = functools.partial(jflex.flex_attention, implementation="mosaic_gpu", config=jflex.Config(contain_nan=False))
    total = lambda *args: call(*args, **mods).astype(jnp.float32).sum()
    with gpu_compile.absent_gpu():
        kernels = gpu_compile.compile_kernels(jax.grad(total, argnums=(0, 1, 2)), x, x, x)
    assert {kernel.name for kernel in kernels} == {
        "jflex_forward_sm90_mosaic_gpu_kernel",
        "jflex_backward_dkv",
        "jflex_backward_dq",
    }
    assert max(kernel.spill for kernel in kernels) <= 256


def test_threefry_is_that_of_jax():
    words = np.random.default_rng(0).integers(0, 1 << 32, (4, 50), dtype=np.uint32)
    expected = jax.random.wrap_key_data(jnp.asarray(words[:2].T), impl="threefry2x32")
    found = jnp.stack(threefry2x32(words[0], words[1], jnp.uint32(0), words[2]), axis=-1)
    np.testing.assert_array_equal(found, jax.random.key_data(jax.vmap(jax.random.fold_in)(expected, words[2])))


RBG = jax.random.key(3, impl="rbg")
SEVERAL = jax.random.split(jax.random.key(3), HEADS)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (
            lambda h, q: jax.random.uniform(jax.random.fold_in(RBG, q)),
            r"of key<rbg>: only keys of threefry2x32 are arithmetic",
        ),
        (lambda h, q: jax.random.uniform(SEVERAL[jnp.stack([h, q % 2])][0]), r"primitive `gather` of random keys"),
    ],
)
def test_kernels_name_the_primitive(factor, reason):
    def noise(score, b, h, q_idx, kv_idx):
        return score * factor(h, q_idx)

    with pytest.raises(jflex.UnsupportedError, match=rf"noise.*{reason}.*'xla'"):
        jflex.flex_attention(*arrays(), noise, implementation="triton", config=INTERPRET)
    assert np.all(np.isfinite(jflex.flex_attention(*arrays(), noise, implementation="xla")))
