"""The integration of Haiku against `hk.MultiHeadAttention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores
from tests.integrations.dense import HEADS, WIDTH, B, T, assert_close, draw, load

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("leading", "masked"), [((), True), ((B,), False), ((2, 3), True)])
def test_haiku(leading: tuple[int, ...], masked: bool):
    module = load("haiku", "haiku")
    import haiku as hk

    arrays = draw(*leading, 9, WIDTH), draw(*leading, T, 24, seed=1), draw(*leading, T, 16, seed=2)
    mask = None
    if masked:
        mask = jnp.asarray(np.random.default_rng(3).random((*leading[:1], *(1 for _ in leading[1:]), 1, 9, T)) < 0.6)

    def of(layer):
        options = {"value_size": 12, "model_size": 20, "w_init": hk.initializers.VarianceScaling(), "name": "attention"}
        transformed = hk.transform(lambda q, k, v: layer(HEADS, 8, **options)(q, k, v, mask))
        return transformed, lambda parameters: (transformed.apply(parameters, None, *arrays) ** 2).mean()

    (_, loss), (theirs, expected) = of(module.FlexMultiHeadAttention), of(hk.MultiHeadAttention)
    parameters = theirs.init(jax.random.key(0), *arrays)
    jax.tree.map(assert_close, jax.value_and_grad(loss)(parameters), jax.value_and_grad(expected)(parameters))


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
    assert all(jnp.abs(leaf).max() > 0 for name, leaf in gradient["~"].items()), gradient.keys()
