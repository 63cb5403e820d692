"""The committed checkpoints are what the installed `transformers` makes; it reads what is written here."""

import importlib.util
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from flax_layers.models import save_pretrained
from tests.golden_models import NAMES, ROOT, expected, greedy_from_dense, load, logits_of, relative_error

READER = """
import sys, numpy as np, torch, transformers
tokens, found = np.load(sys.argv[1])["tokens"], sys.argv[3]
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, attn_implementation="eager")
with torch.no_grad():
    np.save(found, model.eval()(torch.from_numpy(tokens).long()).logits.numpy())
"""


def python(*arguments: str | pathlib.Path) -> None:
    """In a process of its own: warnings of torch are no errors there."""
    process = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("goldens")
    python(ROOT / "make_checkpoints.py", folder)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_made_anew(name, made, tmp_path):
    anew, committed = expected(name, made), expected(name)
    np.testing.assert_array_equal(anew["tokens"], committed["tokens"])
    np.testing.assert_array_equal(anew["greedy"], committed["greedy"])
    assert relative_error(anew["logits"], committed["logits"]) < 1e-5
    with jax.default_matmul_precision("highest"):
        model = load(name, root=made, implementation=None)
        assert relative_error(logits_of(model, anew["tokens"]), anew["logits"]) < 1e-4
        np.testing.assert_array_equal(greedy_from_dense(model, anew["tokens"]), anew["greedy"])
    save_pretrained(model, tmp_path / "saved")
    python("-c", READER, made / name / "expected.npz", tmp_path / "saved", tmp_path / "logits.npy")
    assert relative_error(np.load(tmp_path / "logits.npy"), anew["logits"]) < 1e-6
