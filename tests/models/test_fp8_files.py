"""Checkpoints in FP8 with a scale for each block: what is read is the product, bit for bit; what is refused."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_layers.models import CheckpointError, Decoder, LayerConfig, ModelConfig, from_pretrained, save_pretrained
from flax_layers.models.checkpoint import tensor_files
from flax_layers.models.checkpoint.config_json import read_config
from tests.models.test_checkpoints import assert_equal, tensors
from tests.support.golden_models import ROOT, load

FP8 = ml_dtypes.float8_e4m3fn
NAMES = ("llama3", "qwen3", "phi3", "deepseek_v3")  # two files, other dtypes of scales, fused projections, experts
# Blocks of 128 that end within a matrix along both axes.
RAGGED = ModelConfig(
    vocabulary=64, width=200, mlp_width=328, num_heads=3, num_kv_heads=1, head_dim=56, layers=(LayerConfig(),),
    max_positions=64,
)  # fmt: skip


def quantized(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A weight in FP8, and the scale of each block."""
    scales = np.empty([-(-size // x) for size, x in zip(weight.shape, block, strict=True)], np.float32)
    values = np.empty(weight.shape, FP8)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.abs(weight[part].astype(np.float32)).max() / 448
        values[part] = (weight[part].astype(np.float32) / scales[i, j]).astype(FP8)
    return values, scales


def widened(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """In float64, where the products are exact, and then rounded to float32."""
    rows, columns = (np.arange(size) // x for size, x in zip(values.shape, block, strict=True))
    return (values.astype(np.float64) * scales.astype(np.float64)[rows][:, columns]).astype(np.float32)


def in_fp8(
    folder: pathlib.Path, target: pathlib.Path, block: tuple[int, int], scale_dtype=np.float32, files: int = 1, **more
) -> pathlib.Path:
    """Copies a checkpoint: `target/fp8` has projections in FP8, `target/plain` has them as they should be read.

    Args:
        folder: The checkpoint.
        target: Where the copies are written.
        block: Rows and columns of a block.
        scale_dtype: Dtype of the scales.
        files: Files that the tensors are divided among.
        **more: Of `quantization_config`.
    """
    held: dict[str, np.ndarray] = {}
    plain = {}
    for name, weight in tensors(folder).items():
        if "_proj" not in name or weight.ndim != 2:
            held[name] = plain[name] = weight
            continue
        values, scales = quantized(weight, block)
        scales = scales.astype(scale_dtype)
        held |= {name: values, f"{name}_scale_inv": scales}
        plain[name] = widened(values, scales, block)
    for kind, contents in {"fp8": held, "plain": plain}.items():
        shutil.copytree(folder, target / kind, ignore=shutil.ignore_patterns("*.safetensors*", "expected.npz"))
        write(target / kind, contents, files)
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    configure(target / "fp8", {**described, **more})
    return target / "fp8"


def write(folder: pathlib.Path, contents: dict[str, np.ndarray], files: int = 1) -> None:
    """Tensors in turns to several files: scales lie in another file than their weights."""
    if files == 1:
        safetensors.numpy.save_file(contents, folder / "model.safetensors")
        return
    file_of = {name: f"model-{number % files}.safetensors" for number, name in enumerate(sorted(contents))}
    for file in set(file_of.values()):
        safetensors.numpy.save_file({x: contents[x] for x in contents if file_of[x] == file}, folder / file)
    (folder / tensor_files.INDEX).write_text(json.dumps({"weight_map": file_of}))


def configure(folder: pathlib.Path, quantization) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_value_times_scale(name, tmp_path):
    """With ragged blocks, and scales of 16 bits or in other files."""
    kinds = {"qwen3": jnp.bfloat16, "phi3": np.float16}
    folder = in_fp8(ROOT / name, tmp_path, (20, 12), kinds.get(name, np.float32), 3 if name == "llama3" else 1)
    for dtype in (jnp.float32, jnp.bfloat16):
        assert_equal(from_pretrained(folder, dtype=dtype), from_pretrained(tmp_path / "plain", dtype=dtype))


@pytest.mark.full
def test_ragged_blocks_of_128(tmp_path):
    """With the dtype of the other tensors, though there are more scales."""
    save_pretrained(Decoder(RAGGED, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), tmp_path / "saved")
    model = from_pretrained(in_fp8(tmp_path / "saved", tmp_path, (128, 128)))
    assert_equal(model, from_pretrained(tmp_path / "plain", dtype=jnp.bfloat16))
    save_pretrained(model, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert_equal(from_pretrained(tmp_path / "again"), model)


@pytest.mark.full
def test_each_device_reads_its_part(tmp_path):
    mesh = jax.make_mesh((2, 2), ("fsdp", "model"), devices=jax.devices()[:4])
    for name in ("phi3", "deepseek_v3"):  # parts of a tensor that begin within a block; experts
        folder = in_fp8(ROOT / name, tmp_path / name, (20, 12))
        assert_equal(load("fp8", tmp_path / name, mesh=mesh), load("fp8", folder.parent))


@pytest.mark.full
def test_layers_for_multi_token_prediction_are_passed_over(tmp_path):
    folder = in_fp8(ROOT / "deepseek_v3", tmp_path, (20, 12))
    contents = {"model.layers.3.eh_proj.weight": np.ones((48, 96), np.float32)}
    contents |= {f"model.layers.3.mlp.up_proj.{x}": np.ones((1, 1), FP8) for x in ("weight", "weight_scale_inv")}
    safetensors.numpy.save_file(contents, folder / "model-2.safetensors")
    assert_equal(load("fp8", tmp_path), load("plain", tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_not_quantized(key, tmp_path):
    """Names of modules, and of parts of them; those of `lm_head` and of norms name nothing in FP8."""
    kept = ["lm_head", "model.layers.0.input_layernorm", "model.layers.*.mlp.gate", "up"]
    folder = in_fp8(ROOT / "llama2", tmp_path, (20, 12), **{key: kept})
    assert_equal(load("fp8", tmp_path), load("plain", tmp_path))
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    configure(folder, {**described, key: [*kept, "layers.1.mlp", "model.layers.*.self_attn.q_proj"]})
    message = (
        r"5 in FP8, though `modules_to_not_convert` .* names their modules:\n"
        r"  model.layers.0.self_attn.q_proj.weight\n  model.layers.1.self_attn.q_proj.weight\n  model.layers.1.mlp"
    )
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(folder)


def change_tensors(change):
    def apply(folder: pathlib.Path) -> None:
        contents = {}
        for name, weight in tensors(ROOT / "llama2").items():
            contents[name] = weight
            if name.endswith("_proj.weight"):
                contents[name], contents[f"{name}_scale_inv"] = quantized(weight, (20, 12))
        change(contents)
        write(folder, contents)

    return apply


Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
WRONG_TENSORS = [
    (change_tensors(lambda x: x.pop(f"{Q}_scale_inv")), rf"1 missing:\n  {Q}_scale_inv$"),
    (change_tensors(lambda x: x.update({Q: np.ones((48, 48), np.float32)})), rf"1 unexpected:\n  {Q}_scale_inv$"),
    (
        change_tensors(lambda x: x.update({f"{NORM}_scale_inv": np.ones(1, np.float32)})),
        rf"1 unexpected:\n  {NORM}_scale_inv$",
    ),
    (
        change_tensors(lambda x: x.update({f"{Q}_scale_inv": np.ones((2, 4), np.float32)})),
        rf"1 with another shape:\n  {Q}_scale_inv: \[2, 4\], not \[3, 4\]$",
    ),
    (
        change_tensors(lambda x: x.update({f"{Q}_scale_inv": np.ones((3, 4), np.uint8)})),
        rf"dtype other than F32, F16, BF16, F64, MXFP4:\n  {Q}_scale_inv: U8$",
    ),
    (change_tensors(lambda x: x.update({NORM: np.ones(48, FP8)})), rf"{NORM}: F8_E4M3"),
    (lambda folder: configure(folder, None), rf"(?s)14 unexpected:.*14 with a dtype other than .*\n  {Q}: F8_E4M3"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS, ids=range(len(WRONG_TENSORS)))
def test_wrong_tensors(change, message, tmp_path, monkeypatch):
    folder = in_fp8(ROOT / "llama2", tmp_path, (20, 12))
    change(folder)
    monkeypatch.setattr(tensor_files.TensorFiles, "read", lambda *args, **options: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=message):
        from_pretrained(folder)


METHODS = ("gptq", None)
WRONG_CONFIGS = [
    *(({"quant_method": x}, rf"`quant_method` in .* must be 'fp8': .* Got {x!r}, which is not read") for x in METHODS),
    ({"fmt": "e5m2"}, r"`fmt` in .* must be 'e4m3': .* Got 'e5m2'"),
    ({"activation_scheme": "static"}, r"`activation_scheme` in .* must be 'dynamic': .* Got 'static'"),
    *(
        ({"weight_block_size": x}, r"`weight_block_size` .* must be two positive integers, as \[128, 128\]\. Got")
        for x in ([128], [True, 128])
    ),
    ({"modules_to_not_convert": "lm_head"}, r"`modules_to_not_convert` .* must be a list of names\. Got 'lm_head'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CONFIGS, ids=range(len(WRONG_CONFIGS)))
def test_other_quantization_is_refused(change, message):
    raw = json.loads((ROOT / "llama2" / "config.json").read_text())
    held = {"quant_method": "fp8", "weight_block_size": [128, 128]} | change
    with pytest.raises(ValueError, match=message):
        read_config(raw | {"quantization_config": held})


def test_quantization_that_is_no_object():
    raw = json.loads((ROOT / "llama2" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"`quantization_config` .* must be a JSON object\. Got str"):
        read_config(raw | {"quantization_config": "fp8"})
