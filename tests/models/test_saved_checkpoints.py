"""Checkpoints that are written: their files and dtypes, and what faults leave."""

import errno
import functools
import json
import os
import pathlib
import shutil
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

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
from flax_layers.models.checkpoint.folders import MORE_TEMPLATES
from flax_layers.nnx import AlibiBias
from tests.models.test_checkpoints import tensors
from tests.support.golden_models import ROOT, load


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


def second_file(monkeypatch) -> str:
    save_file, calls = safetensors.numpy.save_file, []

    def fill(held, path, **options):
        calls.append(path)
        if len(calls) > 1:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(held, path, **options)

    monkeypatch.setattr(safetensors.numpy, "save_file", fill)
    return r"Writing .*model-00002-of-.* failed: .*No space left"


def last_moment(monkeypatch) -> str:
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    return "No space left"


def rename(monkeypatch) -> str:
    sound = pathlib.Path.rename

    def fail(self, target):
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, "Input/output error")
        return sound(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", fail)
    return "Input/output"


@pytest.mark.full
@pytest.mark.parametrize("inject", [second_file, last_moment, rename])
def test_a_save_that_fails_leaves_the_last_checkpoint(inject, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    save_pretrained(load("llama3"), folder, source=ROOT / "tokenizer")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} <= set(before)
    message = inject(monkeypatch)
    with pytest.raises(OSError, match=message):
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("use", "family"),
    [
        (lambda folder: from_pretrained(folder).config.family, "llama"),
        (lambda folder: Tokenizer(folder) and "llama", "llama"),
        (lambda folder: load_folder(folder).model.config.family, "llama"),
        (lambda folder: save_pretrained(load("qwen2"), folder) or "qwen2", "qwen2"),  # its tokenizer is kept
    ],
    ids=["from_pretrained", "Tokenizer", "generate", "save_pretrained"],
)
def test_an_interrupted_checkpoint_is_restored(use, family, interrupted):
    with pytest.warns(UserWarning, match=r"A save to .*/saved was interrupted\. .* restored from \.saved\.old\."):
        assert use(interrupted) == family
    assert (from_pretrained(interrupted).config.family, Tokenizer(interrupted).vocabulary) == (family, 280)
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
