"""Checkpoints: what is read, where it lies, how much memory that takes, and messages of wrong ones."""

import functools
import json
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec as P

from flax_layers.generate.folder import load as load_folder
from flax_layers.models import CheckpointError, Decoder, LayerConfig, ModelConfig, from_pretrained, save_pretrained
from flax_layers.models.checkpoint import tensor_files
from flax_layers.models.checkpoint.checkpoint import read_folder_config
from tests.support.golden_models import NAMES, ROOT, add_head, change_config, expected, load, logits_of, relative_error
from tests.support.rows import tiers

BIG = ModelConfig(
    vocabulary=2048, width=256, mlp_width=512, num_heads=4, num_kv_heads=4, head_dim=64, layers=(LayerConfig(),) * 2,
    max_positions=64,
)  # fmt: skip


def parameters(model: Decoder) -> dict[str, jax.Array]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf[...] for path, leaf in state}


def assert_equal(found: Decoder, right: Decoder) -> None:
    """To the bit, with dtypes."""
    for path, value in parameters(right).items():
        own = np.asarray(parameters(found)[path])
        assert own.dtype == value.dtype
        assert own.tobytes() == np.asarray(value).tobytes(), path


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in safetensors.numpy.load_file(path).items()}


def rewrite(folder: pathlib.Path, tmp_path: pathlib.Path, change) -> pathlib.Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, tmp_path / "changed")
    changed = tensors(folder)
    change(changed)
    safetensors.numpy.save_file(changed, tmp_path / "changed" / "model.safetensors")
    return tmp_path / "changed"


@tiers(default={"name": ["gemma3", "phi3"]})
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_was_read(name, tmp_path):
    """Bit for bit, by the names and shapes of `transformers`, and with an equal configuration."""
    model = from_pretrained(ROOT / name)
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert again.config == model.config
    original, written = tensors(ROOT / name), tensors(tmp_path / "saved")
    assert set(original) == set(written)
    for path, tensor in original.items():
        assert (tensor.dtype, tensor.tobytes()) == (written[path].dtype, written[path].tobytes()), path
    assert_equal(again, model)


@pytest.mark.full
def test_dtypes():
    assert from_pretrained(ROOT / "llama3").embed.embedding.dtype == jnp.bfloat16
    assert from_pretrained(ROOT / "llama_linear").embed.embedding.dtype == jnp.float16
    master = from_pretrained(ROOT / "llama3", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert {value.dtype for value in parameters(master).values()} == {jnp.dtype("float32")}
    assert master.hidden(expected("llama3")["tokens"]).dtype == jnp.bfloat16


# Of tensors that hold several projections, in a row or in turn, and of stacked experts.
LAYOUTS = {
    "phi3": {
        "blocks.0.attention.key.kernel": P("fsdp", "model"), "blocks.2.mlp.down.kernel": P("model", "fsdp"),
        "embed.embedding": P("model", "fsdp"), "norm.scale": P(),
    },
    "deepseek_v3": {
        "blocks.1.mlp.experts.up.kernel": P(None, "fsdp", "model"), "blocks.0.attention.up.kernel": P("fsdp", "model"),
        "blocks.1.mlp.experts.down.kernel": P(None, "model", "fsdp"),
        "blocks.2.mlp.shared.down.kernel": P("model", "fsdp"),
    },
    "gpt_oss": {
        "blocks.1.mlp.experts.up.kernel": P(None, "fsdp", "model"), "blocks.1.mlp.experts.gate.bias": P(None, "model"),
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_device_gets_its_part(name):
    model = load(name, mesh=jax.make_mesh((2, 2, 2), ("data", "fsdp", "model")))
    layout = {path: value.sharding.spec for path, value in parameters(model).items()}
    assert {path: layout[path] for path in LAYOUTS[name]} == LAYOUTS[name]
    assert_equal(load(name), model)
    assert relative_error(logits_of(model, expected(name)["tokens"]), expected(name)["logits"]) < 1e-4


def test_a_mesh_that_does_not_divide_heads():
    mesh = jax.make_mesh((4,), ("model",))
    message = r"`mesh` {'model': 4} does not divide 9 parameters:\n.*key.kernel \[48, 16\]: 2 heads, over 4 devices"
    with pytest.raises(ValueError, match=message):
        load("phi3", mesh=mesh)
    rules = ((r"mlp\.(gate|up)", P(None, "model")),)
    assert load("phi3", mesh=mesh, rules=rules).blocks[0].mlp.up.kernel.sharding.spec == P(None, "model")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "sharded", "fp8"])
def test_memory_is_that_of_one_parameter_above_the_model(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 1 << 16)
    save_pretrained(Decoder(BIG, rngs=nnx.Rngs(0)), tmp_path / "big")
    folder = tmp_path / "big"
    if kind == "fp8":
        from tests.models.test_fp8_files import in_fp8  # which imports this module

        folder = in_fp8(folder, tmp_path, (128, 128))
    mesh = jax.make_mesh((2, 2), ("fsdp", "model")) if kind == "sharded" else None
    jax.block_until_ready(jax.tree.leaves(nnx.state(from_pretrained(folder, mesh=mesh))))  # imports, compiles
    tracemalloc.start()
    model = from_pretrained(folder, mesh=mesh)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sizes = [value.nbytes for value in parameters(model).values()]
    assert max(sizes) == 2048 * 256 * 4
    assert peak - kept < max(sizes) + (1 << 19)
    assert peak < sum(sizes) + max(sizes) + (1 << 19)


@pytest.mark.full
def test_tied_embeddings_may_stand_in_the_file_twice(tmp_path):
    folder = rewrite(ROOT / "gemma2", tmp_path, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"]}))
    assert from_pretrained(folder).head is None


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma2", "llama3"])
def test_a_head_beside_tied_embeddings_is_kept(name, tmp_path):
    """As in Transformers 5.24, whatever `tie_word_embeddings` says; and written so that all versions agree."""
    shutil.copytree(ROOT / name, tmp_path / "changed")
    head = add_head(tmp_path / "changed")
    model, tied = load("changed", root=tmp_path), load(name)
    assert (tied.config.tied_embeddings, read_folder_config(tmp_path / "changed")) == (True, model.config)
    assert not model.config.tied_embeddings
    tokens = expected(name)["tokens"]
    right = np.asarray(tied.hidden(tokens), np.float64) @ head.astype(np.float64).T
    cap = model.config.logits_softcap
    right = right if cap is None else cap * np.tanh(right / cap)
    assert relative_error(logits_of(model, tokens), right) < 1e-5
    save_pretrained(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    assert from_pretrained(tmp_path / "saved").config == model.config
    np.testing.assert_array_equal(tensors(tmp_path / "saved")["lm_head.weight"], head.astype(np.float32))


@pytest.mark.full
def test_one_file_counts_alone(tmp_path):
    """As in Transformers: beside it, there are Mistral's own file, or an index of an earlier save."""
    shutil.copytree(ROOT / "mistral", tmp_path / "changed")
    safetensors.numpy.save_file(
        {"norm.weight": np.ones(3, np.float32)}, tmp_path / "changed" / "consolidated.safetensors"
    )
    (tmp_path / "changed" / tensor_files.INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert_equal(from_pretrained(tmp_path / "changed"), from_pretrained(ROOT / "mistral"))


@pytest.mark.full
def test_a_name_of_the_hub_is_answered_with_its_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for read in (from_pretrained, load_folder):
        with pytest.raises(FileNotFoundError, match=r"hf download google/gemma-3-1b-it --local-dir gemma-3-1b-it$"):
            read("google/gemma-3-1b-it")
        with pytest.raises(FileNotFoundError, match=r"Pass the folder of a checkpoint\.$"):
            read(tmp_path / "gone")


@pytest.mark.full
def test_frequencies_in_old_files_are_passed_over(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    from_pretrained(rewrite(ROOT / "llama2", tmp_path, lambda x: x.update(extra)))


def test_all_differences_are_listed_before_anything_is_read(tmp_path, monkeypatch):
    def change(x):
        del x["model.norm.weight"], x["model.layers.1.mlp.up_proj.weight"]
        x["model.layers.2.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
        x["model.layers.0.self_attn.q_proj.weight"] = np.ones((48, 47), np.float32)
        x["model.layers.0.input_layernorm.weight"] = np.ones(48, np.int8)

    folder = rewrite(ROOT / "llama2", tmp_path, change)
    monkeypatch.setattr(tensor_files.TensorFiles, "read", lambda *args, **options: pytest.fail("read"))
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(folder)
    for part in (
        "which describes llama with 2 layers. Nothing was loaded.",
        "2 missing:\n  model.norm.weight\n  model.layers.1.mlp.up_proj.weight",
        "1 unexpected:\n  model.layers.2.mlp.up_proj.weight",
        "1 with another shape:\n  model.layers.0.self_attn.q_proj.weight: [48, 47], not [48, 48]",
        "1 with a dtype other than F32, F16, BF16, F64, MXFP4:\n  model.layers.0.input_layernorm.weight: I8",
    ):
        assert part in str(caught.value)


def broken(tmp_path: pathlib.Path, name: str, change) -> pathlib.Path:
    shutil.copytree(ROOT / name, tmp_path / "broken")
    change(tmp_path / "broken")
    return tmp_path / "broken"


def cut(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def replace_config(**changes):
    return functools.partial(change_config, **changes)


WRONG = [
    ("llama2", lambda f: (f / "config.json").unlink(), FileNotFoundError,
     r"`folder` must hold `config.json`. There is"),
    ("llama2", lambda f: (f / "config.json").write_text("{"), CheckpointError, r"config.json is not the configuration"),
    ("llama2", lambda f: (f / "config.json").write_text("[]"), CheckpointError, r"must hold a JSON object. Got list"),
    ("llama2", lambda f: (f / "model.safetensors").unlink(), FileNotFoundError,
     r"must hold \*.safetensors. .*expected"),
    ("llama2", cut, CheckpointError, r"model.safetensors is not a complete safetensors file: .*incomplete"),
    ("llama3", lambda f: (f / "model-00002-of-00002.safetensors").unlink(), FileNotFoundError,
     r"index.json lists files that do not exist: .*model-00002-of-00002.safetensors"),
    ("llama3", lambda f: shutil.copy(f / "model-00001-of-00002.safetensors", f / "model-00002-of-00002.safetensors"),
     CheckpointError, r"model-00002-of-00002.safetensors does not hold tensors that .*index.json lists: model"),
    ("llama3", lambda f: (f / tensor_files.INDEX).write_text("{}"), CheckpointError, r"is not an index of tensors"),
    ("llama2", replace_config(hidden_size="48"), CheckpointError, r"broken/config.json is not .* integer. Got '48'"),
    ("llama2", lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"), FileNotFoundError,
     r"broken holds config.json, consolidated.safetensors, .*as Mistral's consolidated.safetensors, are not read"),
    ("llama2", lambda f: (f / "config.json").rename(f / "adapter_config.json"), CheckpointError,
     r"broken holds an adapter, adapter_config.json, .* `merge_and_unload`"),
    ("llama2", replace_config(num_hidden_layers=1), CheckpointError, r"9 unexpected"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_folders(name, change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        from_pretrained(broken(tmp_path, name, change))
