"""Mixtral, Qwen3-MoE and gpt-oss where they differ from other families: configurations and files.

`tests/models/` has what all families do, and experts in `test_experts.py`.
"""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_layers.models import CheckpointError, Decoder, ExpertsConfig, from_pretrained, save_pretrained
from flax_layers.models.checkpoint import tensor_files
from flax_layers.models.checkpoint.config_json import read_config, write_config
from flax_layers.models.checkpoint.mxfp4_files import PackedTensor
from flax_layers.rotary_scaling import YarnScaling
from tests.models.test_checkpoints import assert_equal, parameters
from tests.support.golden_models import ROOT, change_config

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")

# As on the hub; sizes are cut, and what no family reads is left out.
HUB: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 256,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 7, "decoder_sparse_step": 1,
        "eos_token_id": 8, "head_dim": 128, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 24, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 256,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 9, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 64, "initial_context_length": 4096, "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 4,
        "num_key_value_heads": 8, "num_local_experts": 32, "pad_token_id": 10, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 256,
    },
}  # fmt: skip
MORE_JOINED = ("qwen3_moe", "deepseek_v3")
SOFTMAX = {"shared": 0, "scoring": "softmax", "float32_router": False}


def test_configurations_of_the_hub():
    mixtral, qwen, oss = (read_config(HUB[name]) for name in MIXTURES)
    assert {layer.experts for layer in mixtral.layers} == {ExpertsConfig(number=8, width=96, per_token=2, **SOFTMAX)}
    assert {layer.experts for layer in qwen.layers} == {ExpertsConfig(number=128, width=24, per_token=8, **SOFTMAX)}
    assert {layer.experts for layer in oss.layers} == {
        ExpertsConfig(number=32, width=96, per_token=4, use_bias=True, swiglu_limit=7.0, **SOFTMAX)
    }
    assert [layer.window for layer in oss.layers] == [128, None] * 2
    assert oss.layers[0].rotary_scaling == YarnScaling(32.0, 4096, truncate=False)
    assert (oss.use_sinks, oss.qkv_bias, oss.out_bias, qwen.qk_norm) == (True, True, True, True)
    plain = read_config(HUB["gpt_oss"] | {"rope_scaling": {"rope_type": "default"}})
    assert plain.layers[0].rotary_scaling is None
    for config in (mixtral, qwen, oss, plain):
        assert read_config(write_config(config)) == config


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [True] * 4),
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True] * 2),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False] * 3 + [True]),
        ({"num_experts": 0}, [False] * 4),
        ({"num_local_experts": 16}, [True] * 4),  # the name of Transformers 5
    ],
)
def test_layers_with_experts(change, sparse):
    config = read_config(HUB["qwen3_moe"] | change)
    assert [layer.experts is not None for layer in config.layers] == sparse
    assert {layer.experts.number for layer in config.layers if layer.experts} <= {change.get("num_local_experts", 128)}
    assert read_config(write_config(config)) == config


def random_mxfp4(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, scales, and their products in float64, where these are exact."""
    experts, rows, columns = shape
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (experts, columns, rows), np.uint8)
    scales = rng.integers(118, 124, (experts, columns, rows // 32), np.uint8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(*scales.shape, 16)
    return blocks, scales, (values[codes] * 2.0 ** np.repeat(scales - 127.0, 32, axis=2)).swapaxes(1, 2)


@pytest.mark.parametrize("rows", [(0, 96), (0, 5), (7, 33), (32, 64), (63, 96)])
def test_parts_of_a_tensor_in_mxfp4(rows):
    blocks, scales, expected = random_mxfp4(2, 96, 10)
    part = (1, slice(*rows), slice(3, 9))
    np.testing.assert_array_equal(PackedTensor(blocks, scales)[part], expected[part])


def in_mxfp4(folder: pathlib.Path) -> None:
    """Replaces weights of experts of gpt-oss by random ones in MXFP4; `plain` beside the folder has them widened."""
    packed, plain = (safetensors.numpy.load_file(folder / "model.safetensors") for _ in range(2))
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        packed[f"{name}_blocks"], packed[f"{name}_scales"], widened = random_mxfp4(*packed.pop(name).shape)
        plain[name] = np.ascontiguousarray(widened.astype(np.float32))
    shutil.copytree(folder, folder.with_name("plain"))
    safetensors.numpy.save_file(plain, folder.with_name("plain") / "model.safetensors")
    safetensors.numpy.save_file(packed, folder / "model.safetensors")
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


@pytest.fixture
def mxfp4(tmp_path: pathlib.Path) -> pathlib.Path:
    """Files of gpt-oss, as on the hub, with rows of three blocks."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8, "num_local_experts": 4}
    config = read_config(HUB["gpt_oss"] | sizes | {"layer_types": None})
    save_pretrained(Decoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), tmp_path / "packed")
    in_mxfp4(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.full
def test_experts_in_mxfp4_are_widened(mxfp4, monkeypatch):
    """Bit for bit, whatever part is read at a time; with the dtype of the other tensors."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "model"), devices=jax.devices()[:4])
    options: dict[str, Any]
    for options, chunk in (({}, tensor_files.CHUNK_BYTES), ({"dtype": jnp.float32, "mesh": mesh}, 5000)):
        monkeypatch.setattr(tensor_files, "CHUNK_BYTES", chunk)
        model = from_pretrained(mxfp4, **options)
        assert {x.dtype for x in parameters(model).values()} == {jnp.dtype(options.get("dtype", jnp.bfloat16))}
        assert_equal(model, from_pretrained(mxfp4.with_name("plain"), **options))


@pytest.mark.full
def test_wrong_tensors_in_mxfp4(mxfp4):
    name, path = "model.layers.0.mlp.experts.down_proj", mxfp4 / "model.safetensors"
    held = safetensors.numpy.load_file(path)
    scales = held.pop(f"{name}_scales")
    safetensors.numpy.save_file(held, path)
    with pytest.raises(CheckpointError, match=rf"(?s)1 missing:\n  {name}\n.*1 unexpected:\n  {name}_blocks"):
        from_pretrained(mxfp4)
    safetensors.numpy.save_file(held | {f"{name}_scales": scales[:, ::2]}, path)
    with pytest.raises(CheckpointError, match=rf"(?s)1 missing:\n  {name}\n.*2 unexpected:\n  {name}_blocks"):
        from_pretrained(mxfp4)


def joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as `transformers` 5 holds them: the experts of a layer in two."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        for short, long in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{short}.", f".{long}.")
        layer, _, rest = name.partition(".experts.")
        if rest:
            number, part, _ = rest.split(".")
            found.setdefault(layer, {}).setdefault(part, {})[int(number)] = tensor
        else:
            found[name] = tensor
    for layer in [name for name, tensor in found.items() if isinstance(tensor, dict)]:
        gate, up, down = (
            [of[i] for i in range(len(of))] for of in map(found[layer].get, ("gate_proj", "up_proj", "down_proj"))
        )
        found[f"{layer}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
        found[f"{layer}.experts.down_proj"] = np.stack(down)
        del found[layer]
    return found


@pytest.mark.parametrize("name", ["mixtral", *(pytest.param(x, marks=pytest.mark.full) for x in MORE_JOINED)])
def test_files_with_joined_experts(name, tmp_path):
    shutil.copytree(ROOT / name, tmp_path / "joined")
    path = tmp_path / "joined" / "model.safetensors"
    safetensors.numpy.save_file(joined(safetensors.numpy.load_file(path)), path)
    mesh = jax.make_mesh((2, 2), ("fsdp", "model"), devices=jax.devices()[:4])
    for devices in (None, mesh):
        assert_equal(*(from_pretrained(x, mesh=devices) for x in (ROOT / name, tmp_path / "joined")))
