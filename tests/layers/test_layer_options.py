"""What layers take for the models: scaled rotary embedding, norms with an offset, biases, a BlockMask for a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers import functional
from flax_layers.nnx import FlexAttention, RMSNorm
from flax_layers.rotary_scaling import LinearScaling, Llama3Scaling, LongRopeScaling
from jflex.masks import causal, sliding_window

HEADS = np.random.default_rng(0).normal(size=(1, 6, 2, 8)).astype(np.float32)
PLACES = jnp.arange(6)


def test_linear_scaling_is_a_shorter_way():
    scaled = functional.rotate(HEADS, PLACES * 4, scaling=LinearScaling(4.0))
    np.testing.assert_allclose(scaled, functional.rotate(HEADS, PLACES), rtol=1e-6, atol=1e-6)


def test_llama3_scaling_against_its_definition():
    """By wavelength, in numpy, as the paper's code has it."""
    frequencies = 10000.0 ** -np.linspace(0, 1, 40)
    low, high = 64 / 1.0, 64 / 4.0
    expected = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        smooth = (64 / wavelength - 1.0) / 3.0
        between = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency if wavelength < high else frequency / 8 if wavelength > low else between)
    found = Llama3Scaling(8.0, 1.0, 4.0, 64)(jnp.asarray(frequencies, jnp.float32), length=64)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_longrope_has_a_factor_for_each_pair_and_a_magnitude():
    """Of the long ones beyond 5 positions, by the length that is passed, or else by the largest position."""
    scaling = LongRopeScaling((1.0,) * 4, (2.0,) * 4, 5, max_positions=32, magnitude=1.5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    scaled = functools.partial(functional.rotate, HEADS, scaling=scaling)
    short = 1.5 * functional.rotate(HEADS, PLACES)
    long = 1.5 * functional.rotate(HEADS, PLACES, scaling=LinearScaling(2.0))
    close(scaled(PLACES), long)
    close(scaled(PLACES, length=5), short)
    close(scaled(PLACES, length=6), long)
    close(jax.jit(scaled)(PLACES - 1), 1.5 * functional.rotate(HEADS, PLACES - 1))
    limited = dataclasses.replace(scaling, max_positions=5)
    close(scaled(PLACES, scaling=limited), short)


@pytest.mark.parametrize("name", ["short_factors", "long_factors"])
def test_wrong_factors_of_longrope(name):
    factors = {"short_factors": (1.0,) * 4, "long_factors": (1.0,) * 4} | {name: (1.0,) * 3}
    scaling = LongRopeScaling(**factors, original_max_positions=16, max_positions=32)
    message = rf"`{name}` of a LongRopeScaling must hold one factor for each of the 4 pairs .* Got 3\. Change them, or"
    with pytest.raises(ValueError, match=message):
        functional.rotate(HEADS, PLACES, scaling=scaling)


def test_rotary_dim_leaves_the_rest():
    rotated = functional.rotate(HEADS, PLACES, rotary_dim=4)
    np.testing.assert_array_equal(rotated[..., 4:], HEADS[..., 4:])
    np.testing.assert_array_equal(rotated[..., :4], functional.rotate(HEADS[..., :4], PLACES))
    with pytest.raises(ValueError, match=r"`rotary_dim` must be between 0 and the head size, 8\. Got 10"):
        functional.rotate(HEADS, PLACES, rotary_dim=10)


def test_norms():
    """As Flax's own; and Gemma's, whose scales begin at 0."""
    for options in ({}, {"epsilon": 0.1}):
        own, flax = RMSNorm(8, rngs=nnx.Rngs(0), **options), nnx.RMSNorm(8, rngs=nnx.Rngs(0), **options)
        np.testing.assert_allclose(own(HEADS), flax(HEADS), rtol=1e-6)
    gemma = RMSNorm(8, offset=1.0, rngs=nnx.Rngs(0))
    assert not np.any(gemma.scale[...])
    np.testing.assert_array_equal(gemma(HEADS), RMSNorm(8, rngs=nnx.Rngs(0))(HEADS))
    assert gemma(jnp.asarray(HEADS, jnp.bfloat16)).dtype == jnp.bfloat16


def test_biases_and_norms_of_the_layer():
    layer = FlexAttention(
        16, 2, use_bias=True, out_bias=False, qk_norm=True, qk_norm_options={"epsilon": 0.5, "offset": 1.0},
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert layer.query.bias is not None
    assert layer.out.bias is None
    assert (layer.query_norm.epsilon, layer.query_norm.offset) == (0.5, 1.0)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_block_mask_for_a_cache_is_its_mask_mod(tokens):
    layer = FlexAttention(16, 2, implementation="xla", rngs=nnx.Rngs(0))
    cache = layer.init_cache(2, 300)
    filled = jnp.asarray(np.random.default_rng(1).normal(size=cache.k.shape).astype(np.float32))
    cache = type(cache)(filled, filled, cache.lengths).with_lengths([7, 260])
    inputs = jax.random.normal(jax.random.key(0), (2, tokens, 16))
    for mod in (causal(), sliding_window(20)):
        plain, one = layer.decode(inputs, cache, mask_mod=mod)
        block_mask = cache.block_mask(mod, tokens)
        blocks, other = layer.decode(inputs, cache, block_mask=block_mask)
        np.testing.assert_allclose(blocks, plain, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(one.k, other.k)
    with pytest.raises(ValueError, match=r"`mask_mod` and `block_mask` are two forms of one mask"):
        layer.decode(inputs, cache, mask_mod=causal(), block_mask=block_mask)
