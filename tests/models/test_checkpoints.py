"""Checkpoints: what is read, where it lies, how much memory that takes; what is written; what is said of wrong ones."""

import errno
import functools
import json
import os
import pathlib
import shutil
import tracemalloc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec as P

from flax_layers.generate.folder import load as load_folder
from flax_layers.models import (
    CheckpointError,
    Decoder,
    LayerConfig,
    ModelConfig,
    Tokenizer,
    from_pretrained,
    save_pretrained,
)
from flax_layers.models.checkpoint import folders, tensor_files
from flax_layers.models.checkpoint.checkpoint import read_folder_config
from flax_layers.models.checkpoint.folders import MORE_TEMPLATES
from flax_layers.nnx import AlibiBias
from tests.support.golden_models import NAMES, ROOT, add_head, change_config, expected, load, logits_of, relative_error
from tests.support.rows import tiers

BIG = ModelConfig(
    vocabulary=2048, width=256, mlp_width=512, num_heads=4, num_kv_heads=4, head_dim=64, layers=(LayerConfig(),) * 2,
    max_positions=64,
)  # fmt: skip


def parameters(model: Decoder) -> dict[str, jax.Array]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf[...] for path, leaf in state}


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
    for path, value in parameters(model).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(parameters(again)[path]))


@pytest.mark.full
def test_dtypes():
    assert from_pretrained(ROOT / "llama3").embed.embedding.dtype == jnp.bfloat16
    assert from_pretrained(ROOT / "llama_linear").embed.embedding.dtype == jnp.float16
    master = from_pretrained(ROOT / "llama3", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert {value.dtype for value in parameters(master).values()} == {jnp.dtype("float32")}
    assert master.hidden(expected("llama3")["tokens"]).dtype == jnp.bfloat16


def test_several_files_and_one(tmp_path):
    model = load("llama3")
    save_pretrained(model, tmp_path / "saved", max_file_bytes=60_000)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "saved" / tensor_files.INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors(ROOT / "llama3"))
    save_pretrained(from_pretrained(tmp_path / "saved"), tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").glob("*.safetensors*")] == ["model.safetensors"]
    assert set(tensors(tmp_path / "saved")) == set(index["weight_map"])


@pytest.mark.full
def test_each_device_gets_its_part():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"))
    model = load("phi3", mesh=mesh)  # queries, keys and values are parts of one tensor
    layout = {path: value.sharding.spec for path, value in parameters(model).items()}
    assert layout["blocks.0.attention.key.kernel"] == P("fsdp", "model")
    assert layout["blocks.2.mlp.down.kernel"] == P("model", "fsdp")
    assert layout["embed.embedding"] == P("model", "fsdp")
    assert layout["norm.scale"] == P()
    for path, value in parameters(load("phi3")).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(parameters(model)[path]))
    assert relative_error(logits_of(model, expected("phi3")["tokens"]), expected("phi3")["logits"]) < 1e-4


def test_a_mesh_that_does_not_divide_heads():
    mesh = jax.make_mesh((4,), ("model",))
    message = r"`mesh` {'model': 4} does not divide 9 parameters:\n.*key.kernel \[48, 16\]: 2 heads, over 4 devices"
    with pytest.raises(ValueError, match=message):
        load("phi3", mesh=mesh)
    rules = ((r"mlp\.(gate|up)", P(None, "model")),)
    assert load("phi3", mesh=mesh, rules=rules).blocks[0].mlp.up.kernel.sharding.spec == P(None, "model")


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True])
def test_memory_is_that_of_one_parameter_above_the_model(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 1 << 16)
    save_pretrained(Decoder(BIG, rngs=nnx.Rngs(0)), tmp_path / "big")
    mesh = jax.make_mesh((2, 2), ("fsdp", "model")) if sharded else None
    jax.block_until_ready(jax.tree.leaves(nnx.state(from_pretrained(tmp_path / "big", mesh=mesh))))  # imports, compiles
    tracemalloc.start()
    model = from_pretrained(tmp_path / "big", mesh=mesh)
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
    original = parameters(from_pretrained(ROOT / "mistral"))
    for path, value in parameters(from_pretrained(tmp_path / "changed")).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(original[path]))


@pytest.mark.full
def test_a_name_of_the_hub_is_answered_with_its_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for read in (from_pretrained, load_folder):
        with pytest.raises(FileNotFoundError, match=r"hf download google/gemma-3-1b-it --local-dir gemma-3-1b-it$"):
            read("google/gemma-3-1b-it")
        with pytest.raises(FileNotFoundError, match=r"Pass the folder of a checkpoint\.$"):
            read(tmp_path / "gone")


@pytest.mark.full
def test_saving_in_16_bits(tmp_path):
    """Rounded to nearest, but for what selects experts; and `config.json` says so."""
    model = load("deepseek_v3")
    mlp: Any = model.blocks[1].mlp
    mlp.router.kernel[...] += 1e-4
    mlp.experts.up.kernel[...] *= 1.01
    for dtype in (jnp.bfloat16, jnp.float16):
        save_pretrained(model, tmp_path / "saved", dtype=dtype)
        written = tensors(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == jnp.dtype(dtype).name
        kinds = {str(tensor.dtype) for name, tensor in written.items() if not name.endswith(("gate.weight", "_bias"))}
        assert kinds == {jnp.dtype(dtype).name}
        gate, up = (written[f"model.layers.1.mlp.{x}.weight"] for x in ("gate", "experts.2.up_proj"))
        np.testing.assert_array_equal(gate, np.asarray(mlp.router.kernel[...]).T)
        np.testing.assert_array_equal(up, np.asarray(mlp.experts.up.kernel[...])[2].T.astype(dtype))
    model.norm.scale[...] = jnp.full(48, 1e5)
    with pytest.raises(CheckpointError, match=r"Got float16, and numbers up to 1e\+05 in norm\.scale\. Take bfloat16"):
        save_pretrained(model, tmp_path / "saved", dtype=jnp.float16)
    assert from_pretrained(tmp_path / "saved").config == model.config


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


NO_CONFIG, NO_TENSORS = r"`folder` must hold `config.json`. There is", r"must hold \*.safetensors. .*expected"
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
    ("llama2", lambda f: (f / "adapter_config.json").write_text("{}"), CheckpointError,
     r"broken holds an adapter, adapter_config.json, .* `merge_and_unload`"),
    ("llama2", replace_config(num_hidden_layers=1), CheckpointError, r"9 unexpected"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_folders(name, change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        from_pretrained(broken(tmp_path, name, change))


def test_a_wrong_length():
    with pytest.raises(ValueError, match=r"`max_positions` must be at least 1\. Got 0\. The default is"):
        from_pretrained(ROOT / "phi3", max_positions=0)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    save_pretrained(load("llama3"), folder, source=ROOT / "tokenizer")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} <= set(before)
    save_file, calls = safetensors.numpy.save_file, []

    def fill(held, path, **options):
        calls.append(path)
        if len(calls) > 1:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(held, path, **options)

    monkeypatch.setattr(safetensors.numpy, "save_file", fill)
    with pytest.raises(OSError, match=r"Writing .*model-00002-of-.* failed: .*No space left"):
        save_pretrained(load("qwen2"), folder, max_file_bytes=60_000)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    monkeypatch.undo()
    save_pretrained(load("qwen2"), folder)
    assert from_pretrained(folder).config.family == "qwen2"
    assert (folder / "tokenizer.json").exists()  # that of the checkpoint before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.full
def test_templates_in_a_folder_of_their_own_are_kept(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tokenizer", source)
    (source / MORE_TEMPLATES).mkdir()
    (source / MORE_TEMPLATES / "rag.jinja").write_text("B")
    for _ in range(2):  # the second time from the folder itself
        save_pretrained(load("llama3"), tmp_path / "saved", source=source)
        source = None
    assert (tmp_path / "saved" / MORE_TEMPLATES / "rag.jinja").read_text() == "B"


def test_a_disk_that_is_full_at_the_last_moment(tmp_path, monkeypatch):
    save_pretrained(load("llama3"), tmp_path / "saved")

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(load("qwen2"), tmp_path / "saved")
    assert from_pretrained(tmp_path / "saved").config.family == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A folder whose replacement was killed between the two renames: nothing ran after the first of them."""
    folder = tmp_path / "saved"
    save_pretrained(load("llama3"), folder, source=ROOT / "tokenizer")
    renamed = []

    def rename(self, target):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(os.rename(self, target))

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", rename)
        patch.setattr(folders, "_recover", lambda folder: False)
        with pytest.raises(KeyboardInterrupt):
            save_pretrained(load("qwen2"), folder)
    assert [path.name for path in tmp_path.iterdir()] == [".saved.old"]
    return folder


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: from_pretrained(folder).config.family,
        lambda folder: Tokenizer(folder) and "llama",
        lambda folder: load_folder(folder).model.config.family,
    ],
    ids=["from_pretrained", "Tokenizer", "generate"],
)
def test_reading_restores_an_interrupted_checkpoint(read, interrupted):
    with pytest.warns(UserWarning, match=r"A save to .*/saved was interrupted\. .* restored from \.saved\.old\."):
        assert read(interrupted) == "llama"
    assert [path.name for path in interrupted.parent.iterdir()] == ["saved"]


def test_saving_restores_an_interrupted_checkpoint_first(interrupted):
    """So that the tokenizer in it is kept."""
    with pytest.warns(UserWarning, match="was interrupted"):
        save_pretrained(load("qwen2"), interrupted)
    assert (from_pretrained(interrupted).config.family, Tokenizer(interrupted).vocabulary) == ("qwen2", 280)
    assert [path.name for path in interrupted.parent.iterdir()] == ["saved"]


@pytest.mark.full
def test_a_replaced_checkpoint_that_remains_is_removed(tmp_path):
    save_pretrained(load("llama3"), tmp_path / "saved")
    shutil.copytree(ROOT / "qwen2", tmp_path / ".saved.old", ignore=shutil.ignore_patterns("expected.npz"))
    assert from_pretrained(tmp_path / "saved").config.family == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_folder_of_that_name_with_other_files_is_left_alone(tmp_path):
    (tmp_path / ".saved.old").mkdir()
    (tmp_path / ".saved.old" / "thesis.tex").write_text("")
    with pytest.raises(FileNotFoundError):
        from_pretrained(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == [".saved.old"]


@pytest.mark.full
def test_a_rename_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    save_pretrained(load("llama3"), tmp_path / "saved")
    rename = pathlib.Path.rename

    def fail(self, target):
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        save_pretrained(load("qwen2"), tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert from_pretrained(tmp_path / "saved").config.family == "llama"


def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match=r"`folder` must be new, empty or a checkpoint.* holds thesis.tex"):
        save_pretrained(load("llama3"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.full
@pytest.mark.parametrize("bias", [False, True], ids=["no rotary embedding", "learned score_mod"])
def test_what_files_cannot_describe_is_refused(bias, tmp_path):
    config = ModelConfig(
        vocabulary=64, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64,
        layers=(LayerConfig(rotary_base=10000.0 if bias else None),),
    )  # fmt: skip
    score_mod = functools.partial(AlibiBias, 2) if bias else None
    model = Decoder(config, score_mod=score_mod, rngs=nnx.Rngs(0))
    message = r"score_mods with .* Got blocks\.0\.score_mod\.slopes" if bias else "a layer without a rotary embedding"
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_host_holds_one_file_at_a_time(tmp_path, monkeypatch):
    made: list[weakref.ref] = []
    join = tensor_files._joined

    def watched(*args):
        assert not any(ref() is not None for ref in made)
        tensor = join(*args)
        made.extend([weakref.ref(tensor)] if tensor.flags.owndata else [])  # others are views of the model
        return tensor

    monkeypatch.setattr(tensor_files, "_joined", watched)
    save_pretrained(load("phi3"), tmp_path / "new", max_file_bytes=1)  # one tensor in each file
    assert len(made) > 3
