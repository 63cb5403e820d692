"""DeepSeek-V2 and V3 where they differ from other families: configurations, files of experts, what is refused.

What all families do is in `tests/models/test_models.py` and `tests/models/test_checkpoints.py`, and models of experts
are served and trained in `tests/models/test_experts.py`.
"""

import argparse
import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel
from flax_layers.models import ExpertsConfig, LatentConfig, LayerConfig, from_pretrained, save_pretrained
from flax_layers.models.checkpoint.config_json import read_config, write_config
from flax_layers.nnx import SharedPrefix
from flax_layers.rotary_scaling import YarnScaling
from flax_layers.train import Recipe, make_mesh, parse_mesh
from flax_layers.train.errors import InputError
from flax_layers.train.parallel import check_strategy
from flax_layers.train.setup import description
from tests.cases.engine_cases import engine_of
from tests.models.test_checkpoints import assert_equal
from tests.support.golden_models import ROOT, load

V2, V3 = "deepseek_v2", "deepseek_v3"


# --- configurations and files


# As on the hub; sizes are cut, and what no family reads is left out.
HUB = {
    V3: {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 8, "num_experts_per_tok": 8, "num_hidden_layers": 5,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 256,
    },
    V2: {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 64,
        "intermediate_size": 96, "kv_lora_rank": 512, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 3, "num_key_value_heads": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 256,
    },
}  # fmt: skip


def test_configurations_of_the_hub():
    three, two = read_config(HUB[V3]), read_config(HUB[V2])
    assert [layer.experts is None for layer in three.layers] == [True] * 3 + [False] * 2
    of_three, of_two = three.layers[3].experts, two.layers[1].experts
    assert of_three == ExpertsConfig(
        number=256, width=32, per_token=8, shared=1, groups=8, groups_per_token=4, scale=2.5
    )
    assert of_two == ExpertsConfig(number=64, width=1408, per_token=6, shared=2, scoring="softmax", normalized=False)
    assert (three.head_dim, three.value_head_dim, three.num_kv_heads) == (192, 128, 8)
    sizes: Any = {"latent_dim": 512, "nope_head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128}
    assert (three.latent, two.latent) == (LatentConfig(**sizes, query_latent_dim=1536), LatentConfig(**sizes))
    assert three.layers[0].rotary_scaling == YarnScaling(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0)
    for config in (three, two):
        assert read_config(write_config(config)) == config


def test_a_layer_without_experts_between_others_is_not_written():
    config = read_config(HUB[V3])
    dense = dataclasses.replace(config.layers[3], experts=None)
    for layers in ((*config.layers[:4], dense), (*config.layers[3:], dense, config.layers[4])):
        with pytest.raises(ValueError, match=r"family deepseek_v3 cannot describe this model: layers would change"):
            write_config(dataclasses.replace(config, layers=layers))
    all_dense = dataclasses.replace(config, layers=(dense,) * 2)
    assert read_config(write_config(all_dense)) == all_dense


def test_files_of_the_hub(tmp_path):
    """They have the kernels of routers in bfloat16, and a layer for multi-token prediction after the others."""
    shutil.copytree(ROOT / V3, tmp_path / "hub")
    path = tmp_path / "hub" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    for name in list(tensors):
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].astype(jnp.bfloat16)  # these numbers it holds
        if name.startswith("model.layers.2."):
            tensors[name.replace("layers.2.", "layers.3.")] = tensors[name]
    tensors["model.layers.3.eh_proj.weight"] = np.ones((48, 96), np.float32)
    safetensors.numpy.save_file(tensors, path)
    model = from_pretrained(tmp_path / "hub")
    mlp: Any = model.blocks[1].mlp
    assert mlp.router.kernel.dtype == jnp.float32
    assert_equal(model, from_pretrained(ROOT / V3))


def test_a_number_of_experts_that_the_files_do_not_hold(tmp_path):
    shutil.copytree(ROOT / V3, tmp_path / "more")
    path = tmp_path / "more" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_routed_experts": 12}))
    with pytest.raises(ValueError, match=r"24 missing:\n  model\.layers\.1\.mlp\.experts\.8\.gate_proj\.weight"):
        from_pretrained(tmp_path / "more")


@pytest.mark.full
def test_a_file_for_each_expert(tmp_path):
    model = from_pretrained(ROOT / V2)
    save_pretrained(model, tmp_path / "saved", max_file_bytes=1)
    assert_equal(from_pretrained(tmp_path / "saved"), model)


# --- generation and serving


@pytest.mark.full
def test_runs_of_other_families_are_described_as_before_there_were_experts():
    """So that they go on from their checkpoints."""
    corpus = argparse.Namespace(end_token=None, size=0, fingerprint="")
    options: Any = argparse.Namespace(bias=None, batch=1, length=1, seed=0, dtype="float32", train=None)
    batches: Any = argparse.Namespace(corpus=corpus, rows=())
    for name, has_both in (("llama3", False), (V3, True)):
        model, _ = description(options, Recipe(steps=1), load(name).config, batches)
        assert ("model.latent" in model, "experts" in model["attention of each layer"][-1]) == (has_both, has_both)


# --- messages


def read(family: str, **changes: Any):
    return lambda: read_config(HUB[family] | changes)


def changed(**changes: Any):
    return lambda: dataclasses.replace(load(V3).config, **changes)


def in_context(model):
    context = ContextParallel(jax.make_mesh((1,), ("context",)), "context")
    return model.hidden(jnp.zeros((1, 4), jnp.int32), context=context)


STREAMING = Streaming(sinks=2, window=6)
PREFIX = SharedPrefix(jnp.array(1), jnp.array(4))
WRONG = [
    (changed(num_kv_heads=2), r"`num_kv_heads` must be 4 with `latent`, as latent attention has it\. Got 2"),
    (changed(head_dim=8), r"`head_dim` must be 20 with `latent`.* Got 8"),
    (changed(qk_norm=True), r"`qk_norm` must be False with `latent`.* Got True"),
    (changed(layers=(LayerConfig(rotary_dim=4),)), "`rotary_dim` must be None with `latent`, whose `rope_head_dim`"),
    (read(V3, attention_bias=True), r"`attention_bias` of `config.json` must be False for deepseek_v3\. Got True"),
    (read(V3, scoring_func="softmax"), r"`scoring_func` .* must be 'sigmoid' for deepseek_v3\. Got 'softmax'"),
    (read(V2, topk_method="noaux_tc"), "`topk_method` .* must be 'greedy' or 'group_limited_greedy' for deepseek_v2"),
    (read(V2, norm_topk_prob=True), r"`norm_topk_prob` .* must be False for deepseek_v2\. Got True"),
    (read(V2, rope_interleave=False), r"`rope_interleave` .* must be True for deepseek_v2\. Got False"),
    (read(V3, mlp_bias=True), r"`mlp_bias` .* must be False for deepseek_v3\. Got True"),
    (read(V2, moe_layer_freq=2), r"`moe_layer_freq` .* must be 1 for deepseek_v2\. Got 2"),
    (read(V2, num_experts_per_tok=None), r"lacks num_experts_per_tok\."),
    (read(V2, topk_method="group_limited_greedy", n_group=None), r"lacks n_group\."),
    (lambda: engine_of(load(V3), streaming=STREAMING),
     "`streaming` must be None for a model with latent attention, .* Got Streaming"),
    (lambda: load(V3).decode_paged(None, None, None, streaming=STREAMING),
     r"`streaming` must be None for a model with latent attention.* Got Streaming\. Leave it out"),
    (lambda: load(V3).decode_paged_hidden(None, None, None, PREFIX),
     "`shared_prefix` must be None for a model with latent attention"),
    (lambda: in_context(load(V3)), "`context` must be None for a model with latent attention.* Got ContextParallel"),
    (lambda: check_strategy(make_mesh(parse_mesh("context=2")), load(V3).config, "ring"),
     "context=2.* divides the tokens of a row, which latent attention does not"),
    (lambda: load(V3).init_caches(1, 8, dtype=jnp.int8),
     r"`dtype` must be floating-point, of 16 bits or more\. Got int8"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "message"), WRONG, ids=range(len(WRONG)))
def test_messages(provoke, message):
    with pytest.raises((ValueError, TypeError, InputError), match=message):
        provoke()
