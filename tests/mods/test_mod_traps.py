"""Mods that are easily evaluated or differentiated wrongly, against the reference; powers of integers are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.support.sized_calls import call, paged

pytestmark = pytest.mark.full

F32 = jnp.float32
KERNEL = {"implementation": "triton", "config": jflex.Config(interpret=True)}
REFERENCE = {"implementation": "reference"}
SMALL_NUMBERS = np.arange(8, dtype=np.uint8) * 30


@jax.jit
def remainder(a, b):
    return jnp.maximum(a - b, 0)


def by_score(s, table, q, k):
    return s + table[jnp.clip(jnp.round(s * 2) + 5, 0, 9).astype(jnp.int32)]


def own_remainder(s, table, q, k):
    return s + table[1] * remainder(q, jnp.int32(3)).astype(F32)


def small_indices(s, table, q, k):
    return s + table[jnp.asarray(SMALL_NUMBERS)[k]]


def wide_indices(s, table, q, k):
    """What `small_indices` means: where XLA expands scatters, 8-bit indices of plain JAX count as out of bounds."""
    return s + table[jnp.asarray(SMALL_NUMBERS, jnp.int32)[k]]


def cumulated(s, table, q, k):
    return s + jnp.cumsum(jax.lax.dynamic_slice(table, (q + k,), (3,)))[1]


def searched(s, table, q, k):
    """JAX 0.12 breaks the search up later than most steps."""
    return s + table[jnp.searchsorted(jnp.array([2, 5]), k, side="right")]


def stopped_constant(s, table, q, k):
    """The rule of `stop_gradient` returns the Python bool that it is given."""
    return s * jnp.where(jax.lax.stop_gradient(jnp.full((), True, jnp.bool_)), table[0], 2.0)


@pytest.mark.parametrize(
    ("backend", "mod"),
    [
        ({"implementation": "xla"}, stopped_constant),
        (KERNEL, stopped_constant),
        ({"implementation": "xla"}, by_score),
        ({"implementation": "xla"}, searched),
        (KERNEL, own_remainder),
        (KERNEL, small_indices),
        (KERNEL, cumulated),
    ],
    ids=lambda x: x.__name__ if callable(x) else x["implementation"],
)
def test_as_the_reference(backend, mod):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 1, 16))
    table = jax.random.normal(jax.random.key(1), (300,))

    def loss(mod, q, table, **choice):
        score_mod = lambda s, b, h, q_idx, kv_idx: mod(s, table, q_idx, kv_idx)
        return (jflex.flex_attention(q, k, v, score_mod, **choice) ** 2).sum()

    def gradients(choice, mod):
        return jax.value_and_grad(functools.partial(loss, mod, **choice), argnums=(0, 1))

    found = jax.jit(gradients(backend, mod))(q, table)
    # Step by step: under `jit`, XLA's CPU compiler differentiates `cumulated` in plain JAX wrongly.
    wanted = gradients(REFERENCE, wide_indices if mod is small_indices else mod)(q, table)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), found, wanted)


# --- integer powers


LEVELS = jnp.arange(4)


def alibi(score, b, h, q_idx, kv_idx):  # the line of PyTorch's tutorial
    return score + (2 ** -(h + 1)).astype(jnp.float32) * (kv_idx - q_idx).astype(jnp.float32)


MAY_BE_NEGATIVE = {
    "negative": lambda h, q, k: 2 ** -(h + 1),
    "distance": lambda h, q, k: 2 ** (k - q),
    "captured": lambda h, q, k: 2 ** LEVELS[h],
    "computed_before": lambda h, q, k: (2**-LEVELS)[h],
    "function": lambda h, q, k: jnp.power(3, -h),
    "base": lambda h, q, k: (q + 1) ** -h,
    "inside": lambda h, q, k: jax.jit(lambda x: 2**x)(q - k),
    "branch": lambda h, q, k: jax.lax.cond(h > 1, lambda: 2**-h, lambda: h),
}
IS_NOT_NEGATIVE = {
    "float": lambda h, q, k: 2.0 ** -(h + 1),
    "exp2": lambda h, q, k: jnp.exp2(-(h + 1).astype(jnp.float32)),
    "positive": lambda h, q, k: 2 ** (h + 1),
    "quotient": lambda h, q, k: 2 ** (h // 2),
    "remainder": lambda h, q, k: 2 ** ((q - k) % 4),
    "maximum": lambda h, q, k: 2 ** jnp.maximum(LEVELS[h] - 7, 0),
    "clip": lambda h, q, k: 2 ** jnp.clip(q - k, 0, 3),
    "distance": lambda h, q, k: 2 ** jnp.abs(q - k),
    "unsigned": lambda h, q, k: 2 ** LEVELS[h].astype(jnp.uint32),
    "bits": lambda h, q, k: 2 ** ((q - k) & 3) + ((q >> h) & 1),
    "square": lambda h, q, k: (q - k) ** 2,
    "branch": lambda h, q, k: jax.lax.cond(h > 1, lambda: 2**h, lambda: h),
    "where": lambda h, q, k: 2 ** jnp.where(q > k, h, k),
}


def times(factor):
    return lambda s, b, h, q, k: s * jnp.asarray(factor(h, q, k)).astype(jnp.float32)


@pytest.mark.parametrize("name", MAY_BE_NEGATIVE)
def test_a_power_that_may_be_negative_is_refused(name):
    message = r"`score_mod` cannot raise an integer to a power.*times\.<lambda> \(test_mod_traps\.py:\d+\) does\."
    with pytest.raises(ValueError, match=rf"{message} .*`2\.0 \*\* -\(h \+ 1\)`"):
        call(score_mod=times(MAY_BE_NEGATIVE[name]))


@pytest.mark.parametrize("name", IS_NOT_NEGATIVE)
def test_another_power_is_accepted(name):
    with jax.numpy_dtype_promotion("standard"):
        assert jax.eval_shape(lambda: call(score_mod=times(IS_NOT_NEGATIVE[name]))).shape == (2, 32, 4, 8)


def test_every_mod_is_checked():
    power = lambda h: (2**-h).astype(jnp.float32)
    for of in (call, paged):
        for role, mod in (
            ("score", alibi),
            ("mask", lambda b, h, q, k: q * 2**-h >= k),
            ("query", lambda x, b, h, i: x * power(h)),
            ("key", lambda x, b, h, i: x * power(h)),
            ("output", lambda x, lse, b, h, i: x * power(h)),
        ):
            with pytest.raises(ValueError, match=f"`{role}_mod` cannot raise an integer to a power"):
                of(**{f"{role}_mod": mod})
    with pytest.raises(ValueError, match="`mask_mod` cannot raise"):
        jflex.create_block_mask(lambda b, h, q, k: q * 2 ** (q - k) >= k, None, None, 8, 8)
    with pytest.raises(TypeError, match="negative powers"):  # JAX's own: a number that is known
        call(score_mod=times(lambda h, q, k: h**-1))
