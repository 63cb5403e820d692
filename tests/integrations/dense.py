"""Not tests: dense attention, drawn arrays, and the integrations of `examples/integrations/`, loaded or skipped."""

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

B, T, HEADS, WIDTH = 2, 40, 4, 32
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def same(found, expected, **tolerance: float) -> None:
    """Fails unless two trees hold the same numbers."""
    jax.tree.map(functools.partial(assert_close, **tolerance), found, expected)


def load(name: str, *packages: str) -> types.ModuleType:
    """An integration, or a skipped test without its packages."""
    for package in packages:
        pytest.importorskip(package)
    return importlib.import_module(f"examples.integrations.{name}_attention")


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense(query, key, value, visible=True, scale=None, change=lambda scores: scores, sinks=None):
    """Attention [B, T, H, D] by its formula; `visible` and the scores are [B, H, T, S]."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    raw = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest")
    raw = jnp.where(visible, change(raw * (query.shape[-1] ** -0.5 if scale is None else scale)), -jnp.inf)
    top = raw.max(-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(raw - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None, None] - top)
    return jnp.einsum("bhts,bshd->bthd", weights / jnp.where(total == 0, 1.0, total), value, precision="highest")


def causal_array(length: int = T) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def segments() -> jax.Array:
    """Two rows of packed documents; the last tokens are padding."""
    return jnp.asarray([[1] * 13 + [2] * 20 + [0] * 7, [1] * 30 + [2] * 4 + [3] * 6], jnp.int32)
