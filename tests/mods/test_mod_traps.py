"""Mods that are easily evaluated or differentiated wrongly, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex

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
