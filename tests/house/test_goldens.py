"""The committed checkpoints are what the installed `transformers` makes; it reads what is written here."""

import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from flax_layers.generate import generate
from flax_layers.models import save_pretrained
from tests.models.test_model_configs import IGNORED, READ
from tests.support.golden_models import NAMES, ROOT, add_head, change_config, expected, load, logits_of, relative_error

READER = """
import sys, numpy as np, torch, transformers
for tokens, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(np.load(tokens)["tokens"]).long(), use_cache=False).logits
    np.save(folder + "/logits.npy", logits.numpy())
"""
IS_OLD = importlib.util.find_spec("transformers") is not None and (
    tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (5, 23)
)
RECENT = pytest.mark.skipif(IS_OLD, reason="5.17 computes gpt_oss otherwise, and fails at a changed config")


def python(*arguments: str | pathlib.Path) -> None:
    """In a process of its own: warnings of torch are no errors there."""
    process = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def packages() -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def made(packages, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("goldens")
    python(ROOT / "make_checkpoints.py", folder)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("name", [pytest.param(x, marks=RECENT if x == "gpt_oss" else ()) for x in NAMES])
def test_checkpoints_made_anew(name, made, tmp_path):
    anew, committed = expected(name, made), expected(name)
    np.testing.assert_array_equal(anew["tokens"], committed["tokens"])
    np.testing.assert_array_equal(anew["greedy"], committed["greedy"])
    assert relative_error(anew["logits"], committed["logits"]) < 1e-5
    with jax.default_matmul_precision("highest"):
        model = load(name, root=made, implementation=None)
        assert relative_error(logits_of(model, anew["tokens"]), anew["logits"]) < 1e-4
        results = generate(model, anew["tokens"].tolist(), max_tokens=anew["greedy"].shape[1], stop_tokens=()).results()
        assert [result.tokens for result in results] == anew["greedy"].tolist()
    save_pretrained(model, tmp_path / "saved")
    python("-c", READER, made / name / "expected.npz", tmp_path / "saved")
    assert relative_error(np.load(tmp_path / "saved" / "logits.npy"), anew["logits"]) < 1e-6


@pytest.mark.gpu
@RECENT
def test_changed_checkpoints(packages, tmp_path):
    """The tables of `tests/models/test_model_configs.py`, and files that hold a head beside tied embeddings."""
    rows: list[tuple[str, pathlib.Path]] = []
    for name, changes in [*IGNORED, *(row[:2] for row in READ), *[("gemma2", {}), ("llama3", {})]]:
        rows.append((name, tmp_path / f"{len(rows)}-{name}"))
        shutil.copytree(ROOT / name, rows[-1][1])
        change_config(rows[-1][1], **changes)
        if not changes:
            add_head(rows[-1][1])
    python("-c", READER, *(x for name, folder in rows for x in (ROOT / name / "expected.npz", folder)))
    with jax.default_matmul_precision("highest"):
        for name, folder in rows:
            found = logits_of(load(folder.name, root=tmp_path, implementation=None), expected(name)["tokens"])
            assert relative_error(found, np.load(folder / "logits.npy")) < 1e-5, folder.name
