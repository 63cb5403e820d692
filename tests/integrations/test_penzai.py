"""The integration of Penzai against its transformers."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.dense import HEADS, WIDTH, B, T, assert_close, dense, draw, load, segments

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("heads", "window"), [((2, 1), None), ((1, 2), None), ((2, 2), 5)])
def test_penzai_transformer(heads: tuple[int, int], window: int | None):
    module = load("penzai", "penzai")
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    kind = common.AttentionTypeGlobalCausal() if window is None else common.AttentionTypeSlidingWindowCausal(window)
    config = common.LlamalikeTransformerConfig(
        num_kv_heads=heads[0],
        query_head_multiplier=heads[1],
        embedding_dim=WIDTH,
        projection_dim=8,
        mlp_hidden_dim=16,
        num_decoder_blocks=2,
        vocab_size=11,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        attention_type=kind,
        attn_logits_soft_cap=2.0,
    )
    model = common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    converted = pz.select(model).at_instances_of(pz.nn.Attention).apply(module.FlexAttention.from_attention)
    assert pz.select(converted).at_instances_of(module.FlexAttention).count() == 2
    tokens = pz.nx.wrap(jnp.asarray(np.random.default_rng(0).integers(0, 11, (B, T))), "batch", "seq")

    def loss(model):
        without, variables = pz.unbind_params(model)

        def of(values):
            return (pz.bind_variables(without, values)(tokens).unwrap("batch", "seq", "vocabulary") ** 2).mean()

        return jax.value_and_grad(of)(tuple(variable.freeze() for variable in variables))

    jax.tree.map(assert_close, loss(converted), loss(model))


def test_penzai_explicit_mask_and_positions():
    module = load("penzai", "penzai")
    from penzai import pz

    def linear(name, *axes):
        return pz.nn.Linear.from_config(
            name, jax.random.key(0), input_axes={"embedding": WIDTH}, output_axes=dict(axes)
        )

    head = (("heads", HEADS), ("projection", 8))
    back = pz.nn.Linear.from_config("out", jax.random.key(1), dict(head), {"embedding": WIDTH})
    layer = module.FlexAttention(*(linear(name, *head) for name in "qkv"), back)
    layer = dataclasses.replace(layer, score_mod=jax.tree_util.Partial(lambda s, score, *_: score * s, jnp.array(0.5)))
    x = pz.nx.wrap(draw(B, T, WIDTH), "batch", "seq", "embedding")
    arrays = [
        getattr(layer, f"input_to_{name}")(x).unwrap("batch", "seq", *dict(head)) for name in ("query", "key", "value")
    ]
    ids = segments()
    same = ids[:, :, None] == ids[:, None]
    positions = jnp.asarray([[*range(20), *range(20)], [*range(5, T), *[-1] * 5]], jnp.int32)
    later = (positions[:, :, None] >= positions[:, None]) & (positions[:, None] >= 0)
    explicit = pz.nn.ApplyExplicitAttentionMask("mask", -1e9)
    causal = pz.nn.ApplyCausalAttentionMask(-1e9)
    side_inputs = {
        "mask": pz.nx.wrap(same, "batch", "seq", "kv_seq"),
        "token_positions": pz.nx.wrap(positions, "batch", "seq"),
    }
    for masker, visible in ((explicit, same), (causal, later)):
        shown = dataclasses.replace(layer, masker=masker)(x, **side_inputs)
        expected = dense(*arrays, visible[:, None], scale=1.0, change=lambda scores: scores * 0.5)
        expected = back(pz.nx.wrap(expected, "batch", "seq", *dict(head)))
        assert_close(shown.unwrap("batch", "seq", "embedding"), expected.unwrap("batch", "seq", "embedding"))


def test_penzai_refuses_an_unknown_layer():
    module = load("penzai", "penzai")
    from penzai import pz

    attention = types.SimpleNamespace(query_key_to_attn=pz.nn.Sequential([pz.nn.Identity(), pz.nn.Identity()]))
    with pytest.raises(ValueError, match="No mod is known for Identity"):
        module.FlexAttention.from_attention(attention)
