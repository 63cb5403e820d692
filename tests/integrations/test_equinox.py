"""The integration of Equinox against `eqx.nn.MultiheadAttention`."""

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex import masks, scores
from tests.integrations.dense import HEADS, WIDTH, B, T, causal_array, draw, load, same

pytestmark = pytest.mark.full


@pytest.mark.parametrize("masked", ["mask of heads", "block mask"])
def test_equinox(masked: str):
    """The same parameters by the same key; rotary embedding by `process_heads`."""
    module = load("equinox", "equinox")
    import equinox as eqx

    sizes = {"num_heads": HEADS, "query_size": WIDTH, "key_size": 24, "value_size": 16, "qk_size": 8, "vo_size": 16}
    sizes |= {"output_size": 12, "use_query_bias": True, "use_output_bias": True, "key": jax.random.key(0)}
    arrays = draw(B, T, WIDTH), draw(B, T, 24, seed=1), draw(B, T, 16, seed=2)
    rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(8), 1, 1)
    mask = causal_array() | ((masked == "mask of heads") & (jnp.arange(HEADS)[:, None, None] == 1))
    options = {"mask": mask, "process_heads": lambda q, k, v: (rope(q), rope(k), v)}
    blocks = {"mask": None, "block_mask": jflex.create_block_mask(masks.causal(), None, None, T, T)}

    def run(layer, **more):
        loss = lambda layer: (jax.vmap(lambda *x: layer(*x, **options | more))(*arrays) ** 2).mean()
        return jax.tree.leaves(eqx.filter_value_and_grad(loss)(layer(**sizes)))

    shown = run(module.FlexMultiheadAttention, **(blocks if masked == "block mask" else {}))
    same(shown, run(eqx.nn.MultiheadAttention))


def test_equinox_learns_a_mod_and_drops_weights():
    module = load("equinox", "equinox")
    import equinox as eqx

    class Alibi(eqx.Module):
        slopes: jax.Array

        def __call__(self, score, b, h, q_idx, kv_idx):
            return scores.alibi(self.slopes)(score, b, h, q_idx, kv_idx)

    mod, x = Alibi(scores.alibi_slopes(HEADS)), draw(T, WIDTH)
    model = module.FlexMultiheadAttention(HEADS, WIDTH, dropout_p=0.5, score_mod=mod, key=jax.random.key(0))
    gradient = eqx.filter_grad(lambda model: (model(x, x, x, inference=True) ** 2).sum())(model)
    assert jnp.abs(gradient.score_mod.slopes).min() > 0
    dropped = eqx.filter_jit(model)(x, x, x, key=jax.random.key(1))
    assert jnp.abs(dropped - model(x, x, x, inference=True)).max() > 1e-3
