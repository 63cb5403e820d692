"""Mods that index numpy arrays by their arguments."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.mods.trace import trace_score_mod
from tests.support.sized_calls import call, draw

SLOPES = np.array([0.5, 0.25, 0.125, 2.0], np.float32)  # a global
as_jax = jnp.asarray(SLOPES)


def of_global(score, b, h, q_idx, kv_idx):
    return score * SLOPES[h]


def read(table, h):
    return table[h] + SLOPES[h]


def of_helper(score, b, h, q_idx, kv_idx):
    return score * read(SLOPES, h)


def of_default(score, b, h, q_idx, kv_idx, slopes=SLOPES, *, more=(SLOPES,)):
    return score * slopes[h] * more[0][h]


def of_argument(slopes, score, b, h, q_idx, kv_idx):
    return score * slopes["of"][h]


def of_closure():
    slopes, tables = SLOPES, {"a": [SLOPES]}

    def inner(h):
        return slopes[h] * (inner(h) if h is None else 1)  # refers to itself

    return lambda score, b, h, q_idx, kv_idx: score * inner(h) * tables["a"][0][h]


class Scaled:
    def mod(self, score, b, h, q_idx, kv_idx):
        return score * SLOPES[h]


MODS = {
    "global": (of_global, lambda h: as_jax[h]),
    "helper": (of_helper, lambda h: 2 * as_jax[h]),
    "default": (of_default, lambda h: as_jax[h] ** 2),
    "partial": (functools.partial(of_argument, {"of": SLOPES}), lambda h: as_jax[h]),
    "closure": (of_closure(), lambda h: as_jax[h] ** 2),
    "method": (Scaled().mod, lambda h: as_jax[h]),
    "offset": (jflex.with_offset(of_global, 3), lambda h: as_jax[h]),
    "numpy_too": (
        lambda s, b, h, q, k: s * np.exp(SLOPES)[h] * float(SLOPES.sum()),
        lambda h: jnp.exp(as_jax)[h] * 2.875,
    ),
}


@pytest.mark.parametrize("name", MODS)
def test_numpy_arrays_are_read_as_jax_arrays(name):
    mod, factor = MODS[name]
    traced, operands = trace_score_mod(mod)
    values = [traced(operands, jnp.float32(2), *map(jnp.int32, (0, h, 5, 3))) for h in range(4)]
    np.testing.assert_allclose(values, [2 * factor(h) for h in range(4)], rtol=1e-6)
    again, _ = trace_score_mod(mod)
    assert traced == again  # a cache hit


@pytest.mark.full
def test_masks_and_vector_mods():
    ids = np.repeat(np.arange(4), 8)
    by_numpy = jflex.and_masks(lambda b, h, q, k: ids[q] == ids[k], lambda b, h, q, k: SLOPES[h] < 1)
    by_jax = lambda b, h, q, k: (jnp.asarray(ids)[q] == jnp.asarray(ids)[k]) & (as_jax[h] < 1)
    masks = [jflex.create_block_mask(mod, None, 4, 32, 32, block_size=8) for mod in (by_numpy, by_jax)]
    np.testing.assert_array_equal(*(mask.to_elements() for mask in masks))
    vectors = draw(3, 2, 8)
    turned = jflex.apply_vector_mod(lambda x, b, h, i: x * SLOPES[h] * SLOPES[i], vectors, jnp.arange(3))
    np.testing.assert_allclose(turned, np.asarray(vectors) * SLOPES[:2, None] * SLOPES[:3, None, None], rtol=1e-6)


def test_an_array_that_is_too_short_is_refused():
    short = SLOPES[:2]
    with pytest.raises(ValueError, match=r"`h` must hold an element for each query head.*indexes float32\[2\]"):
        call(score_mod=lambda s, b, h, q, k: s * short[h])
