"""The row of the guide for Equinox: `flex_attention` under `jax.vmap`, with the projections of its own layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.scores import alibi, alibi_slopes

eqx = pytest.importorskip("equinox")  # of the extra `test`


B, T, HEADS, WIDTH = 2, 40, 4, 32


class Attention(eqx.Module):
    """Causal attention of one example, [T, WIDTH], as `eqx.nn.MultiheadAttention` with `jflex.flex_attention`."""

    layer: Any
    slopes: jax.Array
    block_mask: jflex.BlockMask

    def __call__(self, inputs, biased: bool = True):
        projections = (self.layer.query_proj, self.layer.key_proj, self.layer.value_proj)
        q, k, v = (jax.vmap(project)(inputs).reshape(T, HEADS, -1) for project in projections)
        score_mod = alibi(self.slopes) if biased else None
        attended = jflex.flex_attention(q[None], k[None], v[None], score_mod, self.block_mask)[0]
        return jax.vmap(self.layer.output_proj)(attended.reshape(T, -1))


@pytest.fixture(scope="module")
def module() -> Attention:
    block_mask = jflex.create_block_mask(jflex.masks.causal(), None, None, T, T, block_size=16)
    return Attention(eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0)), alibi_slopes(HEADS), block_mask)


def inputs_of(*batch: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(*batch, T, WIDTH)), jnp.float32)


def test_it_is_equinoxs_own_layer_with_gradients(module):
    mask = jnp.asarray(np.tri(T, dtype=bool))
    ours = lambda module, x: module(x, biased=False)
    theirs = lambda module, x: module.layer(x, x, x, mask=mask)

    def run(function):
        loss = lambda module: jnp.sum(jnp.sin(jax.vmap(lambda x: function(module, x))(inputs_of(B))))
        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(module)

    for one, other in zip(*map(jax.tree.leaves, (run(ours), run(theirs))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
