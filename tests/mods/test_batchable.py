"""Mods under `jax.vmap`: sums of products, which XLA's CPU compiler may get wrong, and branches, which take memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.cases.score_pairs import ScorePair
from tests.support import oracle
from tests.support.oracle import Score
from tests.support.rows import tiers

RNG = np.random.default_rng(13)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


B, T, S, Hq, Hkv, D = 2, 91, 200, 2, 1, 8
VECTORS = lambda rng, n: {"x": normal(T, 4), "y": normal(S, 4)}


def of_vectors(mod, value, d_x, d_y=None, d_score=None) -> ScorePair:
    """A pair with the vectors ``x[q]`` and ``y[k]``; values and derivatives are functions of these and the score."""
    at = lambda q, k, c: (c["x"][q], c["y"][k])
    d_captures = lambda s, b, h, q, k, c: {
        "x": [(d_x(s, *at(q, k, c)), (q,))],
        "y": [] if d_y is None else [(d_y(s, *at(q, k, c)), (k,))],
    }
    return ScorePair(
        lambda c: lambda s, b, h, q, k: mod(s, c["x"][q], c["y"][k]),
        Score(
            lambda s, b, h, q, k, c: value(s, *at(q, k, c)),
            None if d_score is None else lambda s, b, h, q, k, c: d_score(s, *at(q, k, c)),
            d_captures,
        ),
        VECTORS,
    )


dot = lambda x, y: (x * y).sum(-1)
norm = lambda x, y: np.sqrt(((x - y) ** 2).sum(-1))
SUMS = {
    "sum": of_vectors(lambda s, x, y: s + jnp.sum(x * y), lambda s, x, y: s + dot(x, y), lambda s, x, y: y + 0 * x,
                      lambda s, x, y: x + 0 * y),
    "scaled": of_vectors(lambda s, x, y: s - jnp.sum(-x * y * 2.5), lambda s, x, y: s + 2.5 * dot(x, y),
                         lambda s, x, y: 2.5 * y + 0 * x, lambda s, x, y: 2.5 * x + 0 * y),
    "dot": of_vectors(lambda s, x, y: s + jnp.dot(x, y), lambda s, x, y: s + dot(x, y), lambda s, x, y: y + 0 * x,
                      lambda s, x, y: x + 0 * y),
    "square": of_vectors(lambda s, x, y: s - jnp.sum(jnp.square(x - y)), lambda s, x, y: s - norm(x, y) ** 2,
                         lambda s, x, y: 2 * (y - x), lambda s, x, y: 2 * (x - y)),
    "norm": of_vectors(lambda s, x, y: s - jnp.linalg.norm(x - y), lambda s, x, y: s - norm(x, y),
                       lambda s, x, y: (y - x) / norm(x, y)[..., None],
                       lambda s, x, y: (x - y) / norm(x, y)[..., None]),
    "score": of_vectors(lambda s, x, y: s + jnp.sum(s * x) + 0 * y[0], lambda s, x, y: s * (1 + x.sum(-1)),
                        lambda s, x, y: s[..., None] + 0 * x, lambda s, x, y: 0 * x + 0 * y,
                        lambda s, x, y: 1 + x.sum(-1)),
    "broadcast": of_vectors(lambda s, x, y: s + jnp.sum(x[:, None] * y[None]),
                            lambda s, x, y: s + x.sum(-1) * y.sum(-1),
                            lambda s, x, y: y.sum(-1, keepdims=True) + 0 * x,
                            lambda s, x, y: x.sum(-1, keepdims=True) + 0 * y),
}  # fmt: skip
BIAS = lambda rng, n: {"bias": normal(B, Hq, T, S), "w": normal(Hq)}


def cond(c):
    return lambda s, b, h, q, k: jax.lax.cond(q > k, lambda y: y + c["bias"][b, h, q, k], lambda y: y * c["w"][h], s)


def nested(c):
    def mod(s, b, h, q, k):
        inner = lambda y: jax.lax.cond(b > 0, lambda z: z + c["bias"][b, h, q, k], lambda z: z * c["w"][h], y)
        return jax.jit(lambda y: jax.lax.cond(q > k, inner, lambda y: y * c["w"][h], y))(s)

    return mod


def switch(c):
    branches = [lambda i, y: y + c["bias"][i], lambda i, y: y * c["w"][i[1]], lambda i, y: y]
    return lambda s, b, h, q, k: jax.lax.switch(jnp.where(q > k, 0, 1 + b), branches, (b, h, q, k), s)


def looped(c):
    step = lambda i, y, b, h, q, k: jax.lax.cond(q > k + i, lambda: y + c["bias"][b, h, q, k], lambda: y * c["w"][h])
    return lambda s, b, h, q, k: jax.lax.fori_loop(0, 1, lambda i, y: step(i, y, b, h, q, k), s)


def chosen(mod, adds, multiplies) -> ScorePair:
    """A pair that adds ``bias`` in some places and multiplies by ``w`` in others."""
    full = lambda where, b, h, q, k: np.broadcast_to(
        where(b, q, k), np.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
    )
    factor = lambda b, h, q, k, c: np.where(full(multiplies, b, h, q, k), c["w"][h], 1.0)
    return ScorePair(
        mod,
        Score(
            lambda s, b, h, q, k, c: s * factor(b, h, q, k, c) + np.where(adds(b, q, k), c["bias"][b, h, q, k], 0),
            lambda s, b, h, q, k, c: factor(b, h, q, k, c),
            lambda s, b, h, q, k, c: {
                "bias": [(1.0 * full(adds, b, h, q, k), (b, h, q, k))],
                "w": [(s * full(multiplies, b, h, q, k), (h,))],
            },
        ),
        BIAS,
    )


above, below = lambda b, q, k: q > k, lambda b, q, k: q <= k
BRANCHES = {
    "cond": chosen(cond, above, below),
    "nested": chosen(nested, lambda b, q, k: (q > k) & (b > 0), lambda b, q, k: (q <= k) | (b <= 0)),
    "switch": chosen(switch, above, lambda b, q, k: (q <= k) & (b == 0)),
    "looped": chosen(looped, above, below),
}


class Run(NamedTuple):
    """Arrays in float64, and what a program says of them."""

    arrays: tuple[np.ndarray, ...]
    captures: dict[str, np.ndarray]
    compiled: jax.stages.Compiled


@functools.cache
def compiled(pair: ScorePair, implementation: str, masked: bool) -> Run:
    """Output, lse and all gradients of one call."""
    arrays = (normal(B, T, Hq, D), normal(B, S, Hkv, D), normal(B, S, Hkv, D), normal(B, T, Hq, D), normal(B, Hq, T))
    captures = pair.captures(RNG, None)
    block_mask = jflex.create_block_mask(seen, None, None, T, S, block_size=128) if masked else None

    def run(q, k, v, d_out, d_lse, captures):
        attend = lambda q, k, v, c: jflex.flex_attention(
            q, k, v, pair.jax(c), block_mask, return_lse=True, implementation=implementation
        )
        found, pull = jax.vjp(attend, q, k, v, captures)
        return (*found, *pull((d_out, d_lse)))

    narrow = lambda x: jax.tree.map(lambda a: a.astype(np.float32), x)
    return Run(arrays, captures, jax.jit(run).lower(*narrow(arrays), narrow(captures)).compile())


def seen(b, h, q, k):
    return q + 60 >= k


RUNS = [(name, "xla", False) for name in (*SUMS, *BRANCHES)]
RUNS += [("sum", "xla", True), ("nested", "xla", True), ("sum", "reference", False)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "implementation", "masked"), RUNS)
def test_numbers_and_gradients(name, implementation, masked):
    pair = (SUMS | BRANCHES)[name]
    run = compiled(pair, implementation, masked)
    narrow = lambda x: jax.tree.map(lambda a: a.astype(np.float32), x)
    *found, d_captures = run.compiled(*narrow(run.arrays), narrow(run.captures))
    q, k, v, d_out, d_lse = run.arrays
    mask = (lambda b, h, q, k, c: seen(b, h, q, k)) if masked else None
    right = oracle.forward(q, k, v, D**-0.5, pair.exact, mask, run.captures)
    grads = oracle.gradients(q, k, v, D**-0.5, pair.exact, right, run.captures, d_out, d_lse)
    for x, y in zip(found, (right.out, right.lse, grads.query, grads.key, grads.value), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    for key, x in d_captures.items():
        np.testing.assert_allclose(
            x, grads.captures[key], rtol=1e-4, atol=1e-4 * np.sqrt(grads.masses[key].max()) + 1e-4
        )


@tiers(default={"name": ["nested", "switch"]})
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_take_no_copies_of_captured_arrays(name):
    """A copy of the bias for each score would be 85 GB, or 1.3 GB of a block of one head."""
    memory = compiled(BRANCHES[name], "xla", masked=False).compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 20 * 4 * B * Hq * T * S


@pytest.mark.full
def test_the_derivative_of_a_branch_that_is_not_taken_is_no_nan():
    x = jnp.where(jnp.arange(T) % 2 == 0, 0.0, 4.0)
    mod = lambda x: (
        lambda s, b, h, q, k: jax.lax.cond(
            x[q] > 0, lambda: s + jnp.sqrt(x[q]) * (k - q).astype(jnp.float32), lambda: s
        )
    )
    q, k = jnp.ones((1, T, 1, D)), jnp.asarray(normal(1, S, 1, D), jnp.float32)
    attend = lambda x: jflex.flex_attention(q, k, k, mod(x), implementation="xla").sum()
    gradient = jax.grad(attend)(x)
    assert jnp.all(jnp.isfinite(gradient))
    assert jnp.all(gradient[::2] == 0)


@pytest.mark.full
@pytest.mark.parametrize("length", [64, 200])
def test_masks_of_products(length):
    rng = np.random.default_rng(length)
    x, y = rng.integers(-3, 4, (91, 4)), rng.integers(-3, 4, (length, 4))
    right = (x[:, None] * y[None]).sum(-1) > 0
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    mask = jflex.create_block_mask(lambda b, h, q, k: jnp.sum(x[q] * y[k]) > 0, None, None, 91, length, block_size=16)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], right)
    dense = jflex.create_mask(lambda b, h, q, k: jnp.sum(x[q] * y[k]) > 0, None, None, 91, length)
    np.testing.assert_array_equal(dense[0, 0], right)


@pytest.mark.full
def test_an_index_with_a_fill_value_keeps_it():
    """Where a load lies is computed from the numbers of the elements; the index that it takes is not."""
    ids, T = jnp.arange(40, dtype=jnp.int32) % 8, 30
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, T, 1, 8))

    def loss(t, implementation):
        mod = lambda s, b, h, i, j: s + t[ids.at[i + j].get(mode="fill", fill_value=1)]
        return jnp.sum(jnp.sin(jflex.flex_attention(q, k, v, mod, implementation=implementation)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found, wanted = (gradient(jnp.linspace(-1.0, 1.0, 8), name) for name in ("xla", "reference"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
