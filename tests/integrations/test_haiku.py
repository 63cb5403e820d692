"""The integration of Haiku against `hk.MultiHeadAttention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores
from tests.integrations.dense import HEADS, WIDTH, B, T, draw, load, same

pytestmark = pytest.mark.full


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_haiku(leading: tuple[int, ...]):
    """The same parameters by the same key."""
    module = load("haiku", "haiku")
    import haiku as hk

    arrays = draw(*leading, 9, WIDTH), draw(*leading, T, 24, seed=1), draw(*leading, T, 16, seed=2)
    axes = (*leading[:1], *(1 for _ in leading[1:]))
    mask = jnp.asarray(np.random.default_rng(3).random((*axes, 1, 9, T)) < 0.6)
    options = {"value_size": 12, "model_size": 20, "w_init": hk.initializers.VarianceScaling(), "name": "attention"}

    def run(layer):
        model = hk.transform(lambda q, k, v: layer(HEADS, 8, **options)(q, k, v, mask))
        parameters = model.init(jax.random.key(0), *arrays)
        return jax.value_and_grad(lambda parameters: (model.apply(parameters, None, *arrays) ** 2).mean())(parameters)

    same(run(module.FlexMultiHeadAttention), run(hk.MultiHeadAttention))


def test_haiku_learns_a_mod():
    module = load("haiku", "haiku")
    import haiku as hk

    block_mask = jflex.create_block_mask(masks.causal(), None, None, T, T)

    def forward(x):
        slopes = hk.get_parameter("slopes", (HEADS,), init=lambda *_: scores.alibi_slopes(HEADS))
        layer = module.FlexMultiHeadAttention(HEADS, 8, w_init=hk.initializers.VarianceScaling())
        return layer(x, x, x, score_mod=scores.alibi(slopes), block_mask=block_mask)

    model, x = hk.transform(forward), draw(B, T, WIDTH)
    parameters = model.init(jax.random.key(0), x)
    gradient = jax.grad(lambda parameters: (model.apply(parameters, None, x) ** 2).sum())(parameters)
    assert jnp.abs(gradient["~"]["slopes"]).max() > 0
