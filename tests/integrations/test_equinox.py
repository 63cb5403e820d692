"""The integration of Equinox against `eqx.nn.MultiheadAttention`."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex import masks, scores
from tests.integrations.dense import HEADS, WIDTH, B, T, assert_close, causal_array, draw, load

pytestmark = pytest.mark.full


@pytest.mark.parametrize("handed", ["nothing", "mask", "mask of heads", "block mask", "rotary"])
def test_equinox(handed: str):
    module = load("equinox", "equinox")
    import equinox as eqx

    sizes = {"num_heads": HEADS, "query_size": WIDTH, "key_size": 24, "value_size": 16, "qk_size": 8, "vo_size": 16}
    sizes |= {"output_size": 12, "use_query_bias": True, "use_output_bias": True, "key": jax.random.key(0)}
    ours, theirs = module.FlexMultiheadAttention(**sizes), eqx.nn.MultiheadAttention(**sizes)
    arrays = draw(B, T, WIDTH), draw(B, T, 24, seed=1), draw(B, T, 16, seed=2)
    options: dict[str, Any] = {}
    for_ours: dict[str, Any] = {}
    if handed == "mask":
        options["mask"] = causal_array()
    elif handed == "mask of heads":
        options["mask"] = causal_array() | (jnp.arange(HEADS)[:, None, None] == 1)
    elif handed == "block mask":
        options["mask"] = causal_array()
        for_ours = {"mask": None, "block_mask": jflex.create_block_mask(masks.causal(), None, None, T, T)}
    elif handed == "rotary":
        rope = eqx.nn.RotaryPositionalEmbedding(8)
        turn = lambda q, k, v: (jax.vmap(rope, 1, 1)(q), jax.vmap(rope, 1, 1)(k), v)
        options["process_heads"] = turn

    def loss(model, options):
        return (jax.vmap(lambda q, k, v: model(q, k, v, **options))(*arrays) ** 2).mean()

    shown = eqx.filter_value_and_grad(loss)(ours, options | for_ours)
    expected = eqx.filter_value_and_grad(loss)(theirs, options)
    jax.tree.map(assert_close, jax.tree.leaves(shown), jax.tree.leaves(expected))


def test_equinox_learns_a_mod_drops_weights_and_saves(tmp_path: pathlib.Path):
    module = load("equinox", "equinox")
    import equinox as eqx

    class Alibi(eqx.Module):
        slopes: jax.Array

        def __call__(self, score, b, h, q_idx, kv_idx):
            return scores.alibi(self.slopes)(score, b, h, q_idx, kv_idx)

    make = functools.partial(module.FlexMultiheadAttention, HEADS, WIDTH, dropout_p=0.5)
    model = make(score_mod=Alibi(scores.alibi_slopes(HEADS)), key=jax.random.key(0))
    x = draw(T, WIDTH)
    gradient = eqx.filter_grad(lambda model: (model(x, x, x, inference=True) ** 2).sum())(model)
    assert jnp.abs(gradient.score_mod.slopes).min() > 0
    silent = eqx.nn.inference_mode(model)(x, x, x)
    assert_close(model(x, x, x, inference=True), silent)
    dropped = eqx.filter_jit(model)(x, x, x, key=jax.random.key(1))
    assert jnp.abs(dropped - silent).max() > 1e-3
    # Files of Equinox's own layer load.
    theirs = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=0.5, key=jax.random.key(2))
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", theirs)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", make(key=jax.random.key(0)))
    assert_close(loaded(x, x, x, inference=True), theirs(x, x, x, inference=True))
