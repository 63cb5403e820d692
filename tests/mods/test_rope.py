"""`jflex.rope`: angles against numpy float64, scalings against the formulas of their papers, positions, messages."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling, rotate
from tests.cases.vector_pairs import turned
from tests.support.rows import tiers

assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
VECTORS = np.random.default_rng(0).normal(size=(2, 7, 3, 16)).astype(np.float32)
HF_PAIRS = [0, 20, 30, 40, 50, 63]
HF_FREQUENCIES = [1.0, 0.0133352149, 0.00106436096, 4.44569851e-05, 5.13381246e-06, 3.10234441e-07]
HF_BOTH = 1.121751143713058
PLACES = np.array([[0, 1, 2, 3, 4, 5, 6], [5, 9, 1, 1, 30, 2, 0]])


def applied(mod, x):
    """A mod on every vector [B, T, H, D]."""
    b, i, h = (jnp.asarray(a, jnp.int32) for a in np.indices(x.shape[:3]))
    for _ in range(3):
        mod = jax.vmap(mod)
    return mod(jnp.asarray(x), b, h, i)


@tiers(default={"positions": "B, T", "rotary_dim": 8})
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8, 0])
@pytest.mark.parametrize("positions", [None, PLACES[1], PLACES], ids=["index", "T", "B, T"])
def test_against_float64(positions, rotary_dim, interleaved):
    size = 16 if rotary_dim is None else rotary_dim
    at = np.arange(7) if positions is None else positions
    at = np.broadcast_to(at, (2, 7))[..., None]
    right = VECTORS.astype(np.float64)
    right = np.concatenate([turned(right[..., :size], at, 1, interleaved), right[..., size:]], -1)
    given = None if positions is None else jnp.asarray(positions)
    mod = jflex.rope(100.0, rotary_dim=rotary_dim, interleaved=interleaved, positions=given)
    assert_close(applied(mod, VECTORS), right)
    found = rotate(jnp.asarray(VECTORS), jnp.asarray(at[..., 0]), 100.0, rotary_dim=rotary_dim, interleaved=interleaved)
    assert_close(found, right)


def frequencies(D, base):
    return base ** (-np.arange(0, D, 2) / D)


def yarn(D, base, factor, original, fast=32.0, slow=1.0, whole=True):
    """By the index of pairs, from the base, as in the paper's appendix."""
    index = lambda turns: D * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
    first, last = index(fast), index(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    ramp = np.clip((np.arange(D // 2) - first) / max(last - first, 1e-3), 0, 1)
    return frequencies(D, base) * (ramp / factor + 1 - ramp)


def llama3(D, base, factor, low, high, original):
    """By wavelength, as in the paper's code."""
    scaled = []
    for frequency in frequencies(D, base):
        wavelength = 2 * np.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * frequency / factor + smooth * frequency
        is_long, is_short = wavelength > original / low, wavelength < original / high
        scaled.append(frequency / factor if is_long else frequency if is_short else between)
    return scaled


@pytest.mark.full
@pytest.mark.parametrize(
    ("D", "base", "scaling", "right"),
    [
        (16, 1e4, LinearScaling(4.0), frequencies(16, 1e4) / 4),
        (128, 1e6, YarnScaling(4.0, 32768), yarn(128, 1e6, 4.0, 32768)),
        (64, 1e4, YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707), yarn(64, 1e4, 40.0, 4096)),
        (64, 150000.0, YarnScaling(32.0, 4096, truncate=False), yarn(64, 150000.0, 32.0, 4096, whole=False)),
        (16, 1e4, YarnScaling(4.0, 64, 8.0, 2.0), yarn(16, 1e4, 4.0, 64, 8.0, 2.0)),
        (8, 100.0, YarnScaling(2.0, 2048), yarn(8, 100.0, 2.0, 2048)),
        (2, 100.0, YarnScaling(2.0, 2048), [1.0]),
        (80, 1e4, Llama3Scaling(8.0, 1.0, 4.0, 64), llama3(80, 1e4, 8.0, 1.0, 4.0, 64)),
    ],
)
def test_scaled_frequencies(D, base, scaling, right):
    found = scaling(jnp.asarray(frequencies(D, base), jnp.float32), 100)
    np.testing.assert_allclose(found, right, rtol=5e-6)


@pytest.mark.full
def test_numbers_of_transformers():
    """Of `modeling_rope_utils`: Qwen's YaRN, some pairs, and the attention factors of Qwen and DeepSeek."""
    scaled = YarnScaling(4.0, 32768)(jnp.asarray(frequencies(128, 1e6), jnp.float32), 0)
    np.testing.assert_allclose(scaled[jnp.array(HF_PAIRS)], HF_FREQUENCIES, rtol=1e-6)
    assert YarnScaling(4.0, 32768).magnitude == pytest.approx(1.138629436111989)
    both = {"factor": 16.0, "original_max_positions": 4096, "mscale": 1.0, "mscale_all_dim": 0.5}
    assert YarnScaling(**both).magnitude == pytest.approx(HF_BOTH)
    assert YarnScaling(**both, attention_factor=1.25).magnitude == 1.25
    assert YarnScaling(1.0, 4096).magnitude == 1.0


@pytest.mark.full
def test_long_rope_takes_the_length():
    scaling = LongRopeScaling((1.0,) * 8, (2.0,) * 8, original_max_positions=16, max_positions=64)
    for length, expected in ((16, None), (17, LinearScaling(2.0))):
        assert_close(
            applied(jflex.rope(100.0, scaling=scaling, length=length), VECTORS),
            applied(jflex.rope(100.0, scaling=expected), VECTORS),
        )


@pytest.mark.full
def test_far_positions_are_exact():
    """Scores of distances 0 to 6 are those at the origin, a million positions away."""
    scores = lambda first: jnp.einsum(
        "bthd,bhd->bth",
        applied(jflex.rope(100.0, positions=first + jnp.arange(7), is_far=True), VECTORS),
        applied(jflex.rope(100.0, positions=first + jnp.zeros(7, int), is_far=True), VECTORS)[:, 0],
    )
    assert_close(scores(1_000_003), scores(0))
