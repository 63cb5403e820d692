"""DeepSeek-V2 and V3 where they differ from other families: configurations, files of experts, serving and training.

What all families do is in `tests/models/test_models.py` and `tests/models/test_checkpoints.py`.
"""

import argparse
import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec as P

from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel
from flax_layers.generate import generate
from flax_layers.models import (
    Decoder,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    from_pretrained,
    save_pretrained,
)
from flax_layers.models.checkpoint.config_json import read_config, write_config
from flax_layers.nnx import SharedPrefix
from flax_layers.rotary_scaling import YarnScaling
from flax_layers.train import Recipe, Rows, Trainer, create_model, make_mesh, parse_mesh
from flax_layers.train.errors import InputError
from flax_layers.train.flops import multiplied_parameters, step_flops, visible_pairs
from flax_layers.train.parallel import check_strategy
from flax_layers.train.setup import description
from flax_layers.train.trainer import parameter_shapes
from jflex.paged import PagedBatch
from tests.cases.engine_cases import Client, engine_of, run
from tests.serving.test_engine_speculation import Foreseeing
from tests.support.golden_models import ROOT, expected, load, logits_of, relative_error
from tests.support.rows import tiers

V2, V3 = "deepseek_v2", "deepseek_v3"


# --- configurations and files


WRONG_MODELS = [
    ({"num_kv_heads": 2}, r"`num_kv_heads` must be 4 with `latent`, as latent attention has it\. Got 2"),
    ({"head_dim": 8}, r"`head_dim` must be 20 with `latent`.* Got 8"),
    ({"qk_norm": True}, r"`qk_norm` must be False with `latent`.* Got True"),
    ({"layers": (LayerConfig(rotary_dim=4),)}, r"`rotary_dim` must be None with `latent`, whose `rope_head_dim`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_MODELS, ids=range(len(WRONG_MODELS)))
def test_wrong_models(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(load(V3).config, **change)


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
    assert of_two == ExpertsConfig(number=64, width=1408, per_token=6, shared=2, scoring="softmax", normalised=False)
    assert (three.head_dim, three.value_head_dim, three.num_kv_heads) == (192, 128, 8)
    sizes: Any = {"latent_dim": 512, "nope_head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128}
    assert (three.latent, two.latent) == (LatentConfig(**sizes, query_latent_dim=1536), LatentConfig(**sizes))
    assert three.layers[0].rotary_scaling == YarnScaling(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0)
    for config in (three, two):
        assert read_config(write_config(config)) == config


WRONG_CONFIGS = [
    (V3, {"attention_bias": True}, r"`attention_bias` of `config.json` must be False for deepseek_v3\. Got True"),
    (V3, {"scoring_func": "softmax"}, r"`scoring_func` .* must be 'sigmoid' for deepseek_v3\. Got 'softmax'"),
    (V2, {"topk_method": "noaux_tc"}, r"`topk_method` .* must be 'greedy' or 'group_limited_greedy' for deepseek_v2"),
    (V2, {"norm_topk_prob": True}, r"`norm_topk_prob` .* must be False for deepseek_v2\. Got True"),
    (V2, {"rope_interleave": False}, r"`rope_interleave` .* must be True for deepseek_v2\. Got False"),
    (V3, {"mlp_bias": True}, r"`mlp_bias` .* must be False for deepseek_v3\. Got True"),
    (V2, {"moe_layer_freq": 2}, r"`moe_layer_freq` .* must be 1 for deepseek_v2\. Got 2"),
    (V2, {"num_experts_per_tok": None}, r"lacks num_experts_per_tok\."),
    (V2, {"topk_method": "group_limited_greedy", "n_group": None}, r"lacks n_group\."),
    (V3, {"quantization_config": {"fmt": "e4m3"}}, r"`quant_method` in `quantization_config` .* Got None"),
]


@pytest.mark.parametrize(("family", "change", "message"), WRONG_CONFIGS, ids=range(len(WRONG_CONFIGS)))
def test_wrong_configurations(family, change, message):
    with pytest.raises(ValueError, match=message):
        read_config(HUB[family] | change)


def test_a_layer_without_experts_between_others_is_not_written():
    config = read_config(HUB[V3])
    dense = dataclasses.replace(config.layers[3], experts=None)
    for layers in ((*config.layers[:4], dense), (*config.layers[3:], dense, config.layers[4])):
        with pytest.raises(ValueError, match=r"family deepseek_v3 cannot describe this model: layers would change"):
            write_config(dataclasses.replace(config, layers=layers))
    all_dense = dataclasses.replace(config, layers=(dense,) * 2)
    assert read_config(write_config(all_dense)) == all_dense


@pytest.mark.full
def test_each_device_gets_its_part_of_each_expert():
    mesh = jax.make_mesh((2, 2), ("fsdp", "model"), devices=jax.devices()[:4])
    model, whole = load(V3, mesh=mesh), load(V3)
    layout = {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert layout["blocks.1.mlp.experts.up.kernel"].sharding.spec == P(None, "fsdp", "model")
    assert layout["blocks.1.mlp.experts.down.kernel"].sharding.spec == P(None, "model", "fsdp")
    assert layout["blocks.2.mlp.shared.down.kernel"].sharding.spec == P("model", "fsdp")
    assert layout["blocks.0.attention.up.kernel"].sharding.spec == P("fsdp", "model")
    for path, x in nnx.to_flat_state(nnx.state(whole, nnx.Param)):
        np.testing.assert_array_equal(np.asarray(x[...]), np.asarray(layout[".".join(map(str, path))]))
    assert relative_error(logits_of(model, expected(V3)["tokens"]), expected(V3)["logits"]) < 1e-4


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
    original = from_pretrained(ROOT / V3)
    for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(original)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


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
    again = from_pretrained(tmp_path / "saved")
    for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# --- generation and serving


@pytest.mark.full
def test_experts_in_bfloat16_are_selected_in_float32():
    model = load(V3, dtype=jnp.bfloat16)
    mlp: Any = model.blocks[1].mlp
    assert mlp.router.kernel.dtype == mlp.router.correction.dtype == jnp.float32
    assert mlp.experts.up.kernel.dtype == jnp.bfloat16
    assert relative_error(logits_of(model, expected(V3)["tokens"]).astype(jnp.float32), expected(V3)["logits"]) < 1


@tiers(full={"cache": "dense"}, rest="long")
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_generation(cache):
    known = expected(V3)
    found = generate(load(V3), known["tokens"].tolist(), max_tokens=12, cache=cache)
    assert [list(x.tokens) for x in found.results()] == known["greedy"][:, :12].tolist()


@pytest.mark.full
def test_decoding_in_bfloat16_pages():
    known, model = expected(V2), load(V2)
    cache = model.init_paged_cache(8, 16, dtype=jnp.bfloat16)
    batch = PagedBatch(jnp.array([0, 24]), jnp.array([24]), jnp.array([[5, 2]]))
    logits, cache = nnx.jit(lambda model, *args: model.decode_paged(*args))(model, known["tokens"][0], cache, batch)
    assert cache.rows.shape == (3, 8, 16, 1, 40)
    assert 0 < np.abs(np.asarray(logits) - known["logits"][0]).mean() < 0.05


@tiers(full={"devices": 2}, rest="long")
@pytest.mark.parametrize("devices", [1, 2])
def test_served_tokens_are_those_of_transformers(devices):
    """Pages are poisoned; the second time, prompts are read from cached pages. A cascade would pay, and none runs."""
    known = expected(V3)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]) if devices == 2 else None
    engine = engine_of(load(V3, mesh=mesh), max_step_tokens=20, context=None, cascade_bytes=1)
    for _ in range(2):
        clients = [Client(engine, prompt, max_tokens=16) for prompt in known["tokens"].tolist()]
        run(engine)
        assert [client.tokens for client in clients] == known["greedy"][:, :16].tolist()
    assert engine.stats().hit_tokens > 0
    assert engine.stats().cascade_steps == 0
    assert engine._executor.token_bytes == 4 * (32 + 8)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(engine._executor._state.cache))


@pytest.mark.full
def test_speculation_changes_no_token(monkeypatch):
    """Trees of drafts, and accepted ones whose latent vectors move."""
    known = expected(V3)
    futures = {tuple(prompt): tokens for prompt, tokens in zip(known["tokens"].tolist(), known["greedy"], strict=True)}
    monkeypatch.setattr("flax_layers.serving.engine.engine.PromptLookup", Foreseeing)
    monkeypatch.setattr(Foreseeing, "futures", futures)
    engine = engine_of(load(V3), context=None, draft_tokens=5)
    clients = [Client(engine, prompt, max_tokens=16) for prompt in futures]
    run(engine)
    assert [client.tokens for client in clients] == known["greedy"][:, :16].tolist()
    assert engine.stats().accepted_tokens > 8


STREAMING = Streaming(sinks=2, window=6)
REFUSED = {
    "served streaming": (
        lambda model: engine_of(model, streaming=STREAMING),
        r"`streaming` must be None for a model with latent attention, .* Got Streaming",
    ),
    "streaming": (
        lambda model: model.decode_paged(None, None, None, streaming=STREAMING),
        r"`streaming` must be None for a model with latent attention.* Got Streaming\. Leave it out",
    ),
    "shared prefix": (
        lambda model: model.decode_paged_hidden(None, None, None, SharedPrefix(jnp.array(1), jnp.array(4))),
        r"`shared_prefix` must be None for a model with latent attention",
    ),
    "context": (
        lambda model: model.hidden(
            jnp.zeros((1, 4), jnp.int32), context=ContextParallel(jax.make_mesh((1,), ("context",)), "context")
        ),
        r"`context` must be None for a model with latent attention.* Got ContextParallel",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    provoke, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        provoke(load(V3))


@pytest.mark.full
def test_eight_bits_in_a_dense_cache_are_refused():
    with pytest.raises(TypeError, match=r"`dtype` must be floating-point, of 16 bits or more\. Got int8"):
        load(V3).init_caches(1, 8, dtype=jnp.int8)


# --- training


def small() -> ModelConfig:
    return dataclasses.replace(load(V3).config, max_positions=32, vocabulary=64)


def rows(seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(rng.integers(0, 64, (4, 32)), np.sort(rng.integers(0, 3, (4, 32)), axis=1))


@functools.cache
def trained(mesh: str) -> tuple[list[float], Trainer]:
    devices = make_mesh(parse_mesh(mesh))
    model = create_model(lambda: Decoder(small(), implementation="xla", rngs=nnx.Rngs(0)), devices)
    trainer = Trainer(model, Recipe(steps=20, learning_rate=1e-2, warmup=1), mesh=devices)
    return [float(trainer.step(rows(0)).loss) for _ in range(4)], trainer


@pytest.mark.full
def test_training():
    losses, trainer = trained("data=1")
    assert losses[-1] < losses[1] < losses[0] + 1e-6
    corrections = [x for path, x in trainer.state.parameters.items() if path.endswith("correction")]
    assert len(corrections) == 2
    assert not any(np.asarray(x).any() for x in corrections)  # nothing balances the experts


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,model=2"])
def test_training_on_a_mesh(mesh):
    np.testing.assert_allclose(trained(mesh)[0], trained("data=1")[0], rtol=1e-4)


def test_flops_count_the_experts_of_a_token():
    config = load(V3).config
    multiplied = multiplied_parameters(parameter_shapes(config), config)
    attention = 48 * 24 + 24 * 80 + 48 * 40 + 32 * 88 + 40 * 48
    experts = 48 * 8 + 3 * 48 * 16 * (3 + 1)  # the router, three routed experts and a shared one
    assert multiplied == 3 * attention + 3 * 48 * 80 + 2 * experts + 48 * 256
    documents = np.zeros((1, 6), int)
    pairs = 3 * visible_pairs(documents)
    assert step_flops(config, multiplied, documents) == 6 * multiplied * 6 + 6 * 4 * (20 + 10) * pairs


def test_tokens_are_not_divided_among_devices():
    with pytest.raises(InputError, match=r"context=2.* divides the tokens of a row, which latent attention does not"):
        check_strategy(make_mesh(parse_mesh("context=2")), load(V3).config, "ring")


@pytest.mark.full
def test_runs_of_other_families_are_described_as_before_there_were_experts():
    """So that they go on from their checkpoints."""
    corpus = argparse.Namespace(end_token=None, size=0, fingerprint="")
    options: Any = argparse.Namespace(bias=None, batch=1, length=1, seed=0, dtype="float32")
    batches: Any = argparse.Namespace(corpus=corpus, rows=())
    for name, has_both in (("llama3", False), (V3, True)):
        model, _ = description(options, Recipe(steps=1), load(name).config, batches)
        assert ("model.latent" in model, "experts" in model["attention of each layer"][-1]) == (has_both, has_both)
