"""The integration of Penzai: its transformers, converted."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.dense import HEADS, WIDTH, B, T, assert_close, dense, draw, load, same, segments

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("heads", "window"), [((1, 2), None), ((2, 2), 5)])
def test_penzai_converts_a_transformer(heads: tuple[int, int], window: int | None):
    module = load("penzai", "penzai")
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    kind = common.AttentionTypeGlobalCausal() if window is None else common.AttentionTypeSlidingWindowCausal(window)
    sizes = {"num_kv_heads": heads[0], "query_head_multiplier": heads[1], "embedding_dim": WIDTH, "projection_dim": 8}
    sizes |= {"mlp_hidden_dim": 16, "num_decoder_blocks": 2, "vocab_size": 11, "mlp_variant": "swiglu"}
    sizes |= {"tie_embedder_and_logits": False, "attention_type": kind, "attn_logits_soft_cap": 2.0}
    config = common.LlamalikeTransformerConfig(**sizes)
    model = common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    converted = pz.select(model).at_instances_of(pz.nn.Attention).apply(module.FlexAttention.from_attention)
    assert pz.select(converted).at_instances_of(module.FlexAttention).count() == 2
    tokens = pz.nx.wrap(jnp.asarray(np.random.default_rng(0).integers(0, 11, (B, T))), "batch", "seq")

    def run(model):
        without, variables = pz.unbind_params(model)
        logits = lambda values: pz.bind_variables(without, values)(tokens).unwrap("batch", "seq", "vocabulary")
        frozen = tuple(variable.freeze() for variable in variables)
        return jax.value_and_grad(lambda values: (logits(values) ** 2).mean())(frozen)

    same(run(converted), run(model))
    attention = types.SimpleNamespace(query_key_to_attn=pz.nn.Sequential([pz.nn.Identity(), pz.nn.Identity()]))
    with pytest.raises(ValueError, match="No mod is known for Identity"):
        module.FlexAttention.from_attention(attention)


def test_penzai_packed_documents_and_a_mod():
    module = load("penzai", "penzai")
    from penzai import pz

    linear = lambda name, *axes: pz.nn.Linear.from_config(name, jax.random.key(0), *axes)
    embedding, head = {"embedding": WIDTH}, {"heads": HEADS, "projection": 8}
    layer = module.FlexAttention(*(linear(name, embedding, head) for name in "qkv"), linear("out", head, embedding))
    mod = jax.tree_util.Partial(lambda s, score, *_: score * s, jnp.array(0.5))
    layer = dataclasses.replace(layer, score_mod=mod, masker=pz.nn.ApplyExplicitAttentionMask("mask", -1e9))
    x, ids = pz.nx.wrap(draw(B, T, WIDTH), "batch", "seq", "embedding"), segments()
    visible = ids[:, :, None] == ids[:, None]
    shown = layer(x, mask=pz.nx.wrap(visible, "batch", "seq", "kv_seq"))
    projections = layer.input_to_query, layer.input_to_key, layer.input_to_value
    arrays = [project(x).unwrap("batch", "seq", *head) for project in projections]
    expected = dense(*arrays, visible[:, None], scale=1.0, change=lambda scores: scores * 0.5)
    expected = linear("out", head, embedding)(pz.nx.wrap(expected, "batch", "seq", *head))
    assert_close(*(y.unwrap("batch", "seq", "embedding") for y in (shown, expected)))
