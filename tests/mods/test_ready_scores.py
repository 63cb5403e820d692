"""Ready scores in attention: activations in place of the softmax, and what kernels can evaluate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores
from tests.cases import ready_score_pairs as ready
from tests.cases.table import Sizes

INTERPRETED = jflex.Config(interpret=True)
KEYS = jax.random.split(jax.random.key(0), 3)
QUERY, KEY, VALUE = (jax.random.normal(key, (2, 20, heads, 16)) for key, heads in zip(KEYS, (4, 2, 2), strict=True))


def dense(function, query, key, value, visible):
    """``function(scores) @ value``, without a softmax."""
    key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
    weights = function(jnp.einsum("bthd,bshd->bhts", query, key) / 4) * visible[None, None]
    return jnp.einsum("bhts,bshd->bthd", weights, value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("implementation", "function", "mask_mod", "summed"),
    [
        ("xla", jax.nn.relu, None, lambda value: value.sum(1, keepdims=True)),
        ("triton", jax.nn.silu, masks.causal(), lambda value: jnp.cumsum(value, 1)),
    ],
    ids=["xla-relu", "triton-silu, causal"],
)
def test_activation_in_place_of_softmax(implementation, function, mask_mod, summed):
    visible = np.tri(20) if mask_mod else np.ones((20, 20))

    def attend(query, key, value):
        out, lse = jflex.flex_attention(
            query, key, value, scores.activation(function), mask_mod=mask_mod, return_lse=True,
            implementation=implementation, config=INTERPRETED,
        )  # fmt: skip
        return scores.undo_softmax(out, lse, summed(value))

    def run(attend):
        out, pull = jax.vjp(attend, QUERY, KEY, VALUE)
        return out, pull(QUERY)

    found, gradients = jax.jit(lambda: run(attend))()
    right, right_gradients = jax.jit(lambda: run(lambda *arrays: dense(function, *arrays, visible)))()
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
    for gradient, exact in zip(gradients, right_gradients, strict=True):
        np.testing.assert_allclose(gradient, exact, rtol=1e-3, atol=1e-3)


def test_undo_softmax_in_the_other_layout_and_where_nothing_is_visible():
    out, lse = jnp.zeros((2, 4, 3, 8)), jnp.full((2, 4, 3), -jnp.inf)
    np.testing.assert_array_equal(scores.undo_softmax(out, lse, jnp.zeros((2, 2, 3, 8)), layout="BNTH"), out)
    out, lse, value_sum = jnp.ones((2, 4, 3, 8), jnp.bfloat16), jnp.zeros((2, 4, 3)), jnp.ones((2, 2, 1, 8))
    found = scores.undo_softmax(out, lse, value_sum, offset=0.25, layout="BNTH")
    np.testing.assert_array_equal(found, jnp.full((2, 4, 3, 8), 0.75, jnp.bfloat16))


@pytest.mark.parametrize(
    "pair",
    [ready.sandwich, ready.relu_activation, ready.gelu_activation, ready.spatial_bias, ready.edge_bias],
    ids=["sandwich", "relu", "gelu", "spatial_bias", "edge_bias"],
)
def test_kernels_can_evaluate_it(pair):
    captures = pair.captures(np.random.default_rng(0), Sizes(2, 20, Hq=4))
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    account = jflex.explain(*shapes, pair.jax(captures), implementation="triton", config=INTERPRETED)
    assert account.backend == "triton"
