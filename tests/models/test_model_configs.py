"""`config.json`: of models on the Hugging Face hub, in the form of Transformers 4 and of 5, and what is refused."""

import dataclasses
import json
from typing import Any

import pytest

from flax_layers.models import LayerConfig, ModelConfig
from flax_layers.models.checkpoint.config_json import read_config, write_config
from flax_layers.rotary_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from tests.support.golden_models import NAMES, ROOT

# What differs between files on the hub, as they are there; sizes are cut.
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
SHORT, LONG = [1.0, 1.1], [2.0, 3.0]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def read(architecture: str, max_positions: int | None = None, **raw):
    return read_config({**SIZES, "architectures": [f"{architecture}ForCausalLM"], **raw}, max_positions)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_configuration_is_read_as_it_was(name):
    """The form of Transformers 4 is written; the files are in that of 5."""
    config = read_config(json.loads((ROOT / name / "config.json").read_text()))
    assert read_config(write_config(config)) == config


def test_llama():
    config = read("Llama", rope_theta=500000.0, rope_scaling=LLAMA3, eos_token_id=[128001, 128008, 128009])
    assert config.layers[0] == LayerConfig(None, 500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.head_dim, config.tied_embeddings, config.qkv_bias) == (16, False, False)
    old = read("Llama", num_key_value_heads=None, rope_scaling={"type": "linear", "factor": 2.0})
    assert (old.num_kv_heads, old.layers[0].rotary_scaling) == (4, LinearScaling(2.0))


def test_windows():
    windows = lambda *args, **raw: [layer.window for layer in read(*args, **raw).layers]
    assert windows("Mistral") == [4096] * 4
    assert windows("Mistral", sliding_window=None) == [None] * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows("Mistral", sliding_window=9, layer_types=kinds) == windows(
        "Ministral", layer_types=kinds, sliding_window=9
    )
    assert windows("Ministral", sliding_window=9, layer_types=kinds) == [None, 9] * 2
    assert windows("Ministral", sliding_window=9) == [9] * 4
    assert windows("GptOss") == [128, None] * 2
    assert windows("Qwen2", sliding_window=131072, use_sliding_window=False, max_window_layers=28) == [None] * 4
    assert windows("Qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3) == [None] * 3 + [8]
    assert windows("Gemma2") == windows("Gemma2", sliding_window_pattern=3) == [4096, None] * 2
    assert windows("Gemma3", num_hidden_layers=7, sliding_window=512) == [512] * 5 + [None, 512]
    assert windows("Gemma3", sliding_window=512, sliding_window_pattern=2) == [512, None] * 2


def test_gemma():
    two = read("Gemma2", query_pre_attn_scalar=144, hidden_act="gelu_pytorch_tanh")
    assert (two.head_dim, two.attention_scale, two.embedding_scale) == (256, 144**-0.5, 8.0)
    assert (two.attention_softcap, two.logits_softcap, two.activation) == (50.0, 30.0, "gelu_pytorch_tanh")
    assert (two.tied_embeddings, two.post_norms, two.norm_offset, two.qk_norm) == (True, True, 1.0, False)
    linear = {"rope_type": "linear", "factor": 8.0}
    three = read("Gemma3", num_hidden_layers=6, rope_local_base_freq=10000, rope_theta=1000000, rope_scaling=linear)
    assert three.layers[0] == LayerConfig(4096, 10000.0)
    assert read("Gemma3", sliding_window_pattern=1, rope_scaling=None).layers[0] == LayerConfig(None, 1e6)
    assert three.layers[5] == LayerConfig(None, 1e6, LinearScaling(8.0))
    assert (three.attention_softcap, three.qk_norm) == (None, True)


def test_qwen():
    two, three = read("Qwen2"), read("Qwen3", attention_bias=False)
    assert (two.qkv_bias, two.out_bias, two.qk_norm, two.head_dim) == (True, False, False, 16)
    assert (three.qkv_bias, three.qk_norm, three.head_dim) == (False, True, 128)


def test_longrope():
    raw: dict[str, Any] = {"rope_scaling": LONGROPE, "max_position_embeddings": 131072, "head_dim": 4}
    raw["original_max_position_embeddings"] = 4096
    long, short = read("Phi3", **raw), read("Phi3", max_positions=4096, **raw)
    assert long.layers[0].rotary_scaling == LongRopeScaling(
        tuple(SHORT), tuple(LONG), 4096, 131072, magnitude=pytest.approx(1.1902380714238083)
    )
    assert short.layers[0].rotary_scaling.max_positions == short.max_positions == 4096
    assert (long.context_limits, short.context_limits) == ((4096, 131072), (4096,))
    assert read("Phi3", **raw | {"rope_scaling": LONGROPE | {"type": "su"}}) == long
    partial = read("Phi3", partial_rotary_factor=0.5, **raw | {"head_dim": 8})
    assert partial.layers[0].rotary_dim == 4


# What Qwen's documentation adds to `config.json`, the form of Transformers 5, and each optional field.
YARN: dict[str, tuple[dict[str, Any], YarnScaling]] = {
    "qwen": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        YarnScaling(4.0, 32768),
    ),
    "transformers 5": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "attention_factor": 1.5}},
        YarnScaling(2.0, 40960, attention_factor=1.5),
    ),
    "no factor": (
        {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}},
        YarnScaling(10.0, 4096),
    ),
    "betas": (
        {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": None, "truncate": False}},
        YarnScaling(4, 40960, beta_fast=16, truncate=False),
    ),
    "mscale": (
        {"rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5}},
        YarnScaling(40.0, 40960, mscale=0.707, mscale_all_dim=0.5),
    ),
    "beside": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 10240},
        YarnScaling(4.0, 10240),
    ),
}


@pytest.mark.parametrize("name", YARN)
def test_yarn(name):
    raw, expected = YARN[name]
    config = read("Qwen3", max_position_embeddings=40960, **raw)
    assert {layer.rotary_scaling for layer in config.layers} == {expected}
    assert read_config(write_config(config)) == config


def golden(name: str, **changes) -> ModelConfig:
    return read_config(json.loads((ROOT / name / "config.json").read_text()) | changes)


# Of a checkpoint in `tests/goldens`: keys that Transformers 5.24 does not read, or that change nothing there. With
# `transformers`, `tests/house/test_goldens.py` compares the logits of all.
IGNORED: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}),
    ("llama2", {"hidden_activation": "gelu", "sliding_window": 3, "layer_types": ["sliding_attention"] * 2}),
    ("llama2", {"partial_rotary_factor": 0.5, "rope_local_base_freq": 55.0, "rope_interleave": False}),
    ("llama2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("llama2", {"architectures": None, "num_experts": 4, "norm_topk_prob": True, "use_sliding_window": True}),
    ("llama2", {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}),
    ("mistral", {"attention_bias": True, "mlp_bias": True, "rope_local_base_freq": 55.0}),
    ("ministral", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}),
    ("qwen2", {"attention_bias": True, "sliding_window_pattern": 2}),
    ("qwen3", {"final_logit_softcapping": 2.0, "layer_types": None}),
    ("gemma2", {"hidden_act": "silu", "sliding_window_pattern": 3, "rope_local_base_freq": 55.0}),
    ("gemma3", {"hidden_act": "silu", "attn_logit_softcapping": 2.0, "sliding_window_pattern": 2}),
    ("phi3", {"attention_bias": True, "final_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 3}),
    ("deepseek_v3", {"sliding_window": 3, "num_mtp_layers": 2}),
    ("mixtral", {"norm_topk_prob": False, "attention_bias": True, "use_sliding_window": False}),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 3, "max_window_layers": 0, "swiglu_limit": 0.1}),
    ("gpt_oss", {"hidden_act": "gelu", "norm_topk_prob": False, "sliding_window_pattern": 3}),
]


@pytest.mark.parametrize(("name", "changes"), IGNORED, ids=range(len(IGNORED)))
def test_keys_that_change_nothing(name, changes):
    assert golden(name, **changes) == golden(name)


# Keys that a file has twice, or under another name.
READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rotary_scaling": LinearScaling(2.0)}),
    ("llama3", {"original_max_position_embeddings": 16}, {"rotary_scaling": Llama3Scaling(8.0, 1.0, 4.0, 16)}),
    (
        "qwen3_yarn",
        {"original_max_position_embeddings": 32},
        {"rotary_scaling": YarnScaling(4.0, 32, 2.0, 0.05, truncate=False)},
    ),
    (
        "llama2",
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k}},
        {"rotary_scaling": Llama3Scaling(32.0, 1.0, 4.0, 128)},
    ),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rotary_scaling": LinearScaling(2.0)}),
    (
        "gemma3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rotary_base": 1e6, "rotary_scaling": None},
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
        {"rotary_dim": 4},
    ),
    ("mixtral", {"rope_parameters": None}, {"rotary_base": 1e6}),
    (
        "gpt_oss",
        {"rope_parameters": None},
        {"rotary_base": 150000.0, "rotary_scaling": YarnScaling(32.0, 4096, truncate=False)},
    ),
]


@pytest.mark.parametrize(("name", "changes", "fields"), READ, ids=range(len(READ)))
def test_keys_of_rotary_embeddings(name, changes, fields):
    """Of layers without a window."""
    for layer in golden(name, **changes).layers:
        if name != "gemma3" or layer.window is None:
            assert {field: getattr(layer, field) for field in fields} == fields


def test_the_null_of_a_boolean_is_false():
    """As in Transformers, though an absent key is true."""
    config = golden("deepseek_v3", norm_topk_prob=None, rope_interleave=None)
    assert config == golden("deepseek_v3", norm_topk_prob=False, rope_interleave=False) != golden("deepseek_v3")


def test_other_names_of_keys():
    for name, key in (("mixtral", "num_experts"), ("qwen3_moe", "num_local_experts"), ("gpt_oss", "num_experts")):
        experts = golden(name, **{key: 3}).layers[0].experts
        assert experts is not None
        assert experts.number == 3


REFUSED = [
    (lambda: read("Qwen2Moe"), r"Qwen2MoeForCausalLM is not supported: it has shared experts with a gate"),
    (lambda: read("Llama", model_type="mistral"),
     r"`architectures` and `model_type` of `config.json` must be of one family\. Got \['LlamaForC.* and 'mistral'"),
    (lambda: read_config(SIZES | {"architectures": "LlamaForCausalLM"}),
     r"`architectures` .* must be a list\. Got 'Ll"),
    (lambda: read("Llama", hidden_size="32"),
     r"`hidden_size` of `config.json` must be an integer\. Got '32'\. Correct"),
    (lambda: read("Llama", rms_norm_eps="1e-5"), r"`rms_norm_eps` of `config.json` must be a number\. Got '1e-5'"),
    (lambda: read("Llama", attention_bias="true"), r"`attention_bias` of `config.json` must be true or false\. Got"),
    (lambda: read("Llama", hidden_act="relu6"), r"`activation` must be one of silu, .* Got 'relu6'"),
    (lambda: read("Mistral", sliding_window=0), r"`window` must be at least 1, the query's own key\. Got 0"),
    (lambda: read("Llama", num_key_value_heads=3), r"`num_kv_heads` must divide `num_heads`, 4\. Got 3"),
    (lambda: read("Phi3", rope_scaling=LONGROPE, num_attention_heads=2, original_max_position_embeddings=4096),
     r"`short_factor` and `long_factor` .* must hold 16 numbers, .* Got \[1\.0, 1\.1\]"),
    (lambda: read("Qwen2", rope_parameters={"full_attention": {"rope_theta": 50.0}}),
     r"must hold parameters for all layers of qwen2\. Got some for full_attention, which Transformers does not read"),
    (lambda: read("Llama", partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0}),
     r"`partial_rotary_factor` of `config.json` must be 1 for llama with a rotary scaling\. Got 0\.5"),
    (lambda: golden("deepseek_v3", rope_scaling={"type": "linear", "factor": 2.0, "mscale_all_dim": 0.5}),
     r"`mscale_all_dim` of `config.json` must be absent with a linear rotary scaling.* Got 0\.5"),
    (lambda: read("Qwen2", layer_types=["sliding_attention"] * 4, sliding_window=8),
     r"`sliding_window` of `config.json` must be a number where `layer_types` has sliding_attention"),
    (lambda: read_config({"architectures": ["Gemma3ForConditionalGeneration"]}),
     r"it has a vision tower\. Use a text model, Gemma3ForCausalLM"),
    (lambda: read("Mamba", model_type="mamba"),
     r"`architectures` .* must name one of LlamaForCausalLM, .* Got \['MambaForCausalLM'\], .* 'mamba'"),
    (lambda: read("Llama", quantization_config={"quant_method": "gptq", "bits": 4}), r"`quant_method` .* Got 'gptq'"),
    (lambda: read("Gemma3", use_bidirectional_attention=True),
     r"`use_bidirectional_attention` .* must be False for gemma3"),
    (lambda: read("Qwen2", rope_scaling={"type": "dynamic", "factor": 4.0}),
     r"must be default, linear, llama3, longrope or yarn\. Got 'dynamic'"),
    (lambda: read("Qwen2", rope_scaling={"type": "yarn"}), r"yarn rotary scaling of `config.json` lacks factor"),
    (lambda: read("Gemma2", layer_types=["chunked_attention"] * 4),
     r"`layer_types` .* for each of the 4 layers\. Got \['chunked_attention'"),
    (lambda: write_config(dataclasses.replace(read("Llama"), attention_softcap=3.0)),
     r"family llama cannot describe this model: attention_softcap would change"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "message"), REFUSED, ids=range(len(REFUSED)))
def test_messages(provoke, message):
    with pytest.raises(ValueError, match=message):
        provoke()
