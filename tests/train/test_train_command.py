"""How the commands of training and of the demo end: with one line, whatever happens."""

import importlib
import signal
import sys

import pytest

from flax_layers.demo import __main__ as demo
from flax_layers.models import CheckpointError
from flax_layers.train import InputError, Interrupted, LossError, SaveError
from flax_layers.train import __main__ as train
from flax_layers.train.errors import run_command
from flax_layers.train.log import draw_losses


def raising(error: BaseException):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (Interrupted("SIGTERM ended the run", signal.SIGTERM), 143, "SIGTERM ended the run"),
        (Interrupted("SIGINT ended the run", signal.SIGINT), 130, "SIGINT ended the run"),
        (KeyboardInterrupt(), 130, "SIGINT ended the command."),
    ],
)
def test_a_signal_ends_a_command_with_one_line(capsys, error: BaseException, status: int, line: str):
    with pytest.raises(SystemExit) as ended:
        run_command(raising(error))
    assert ended.value.code == status
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    "error",
    [
        *(kind("why") for kind in (InputError, CheckpointError, LossError, SaveError, ModuleNotFoundError)),
        PermissionError(13, "Permission denied", "text.txt"),
    ],
)
def test_an_error_ends_a_command_with_one_line(error: Exception):
    with pytest.raises(SystemExit) as ended:
        run_command(raising(error))
    assert ended.value.code == f"error: {error}"  # which Python prints, and exits with 1


@pytest.mark.parametrize(
    ("command", "extra", "package"),
    [
        *((train, "train", package) for package in ("grain", "matplotlib", "tensorboardX", "tqdm")),
        *((demo, "demo", package) for package in ("matplotlib", "tqdm")),
    ],
)
def test_packages_that_are_used_late_are_missed_early(monkeypatch, tmp_path, command, extra: str, package: str):
    arguments = ["--data=none", f"--log-dir={tmp_path}"] if command is train else []
    monkeypatch.setitem(sys.modules, "tensorboardX", sys)  # it may be absent
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ModuleNotFoundError,
        match=rf"`flax_layers\.{extra}` needs {package}: in a checkout, pip install -e '\.\[{extra}\]'",
    ):
        command.main([*arguments, f"--output={tmp_path}"])


@pytest.mark.parametrize(
    ("package", "module"), [("optax", "optimizer"), ("optax", "trainer"), ("orbax", "checkpoints")]
)
def test_packages_that_are_imported_at_once(monkeypatch, package: str, module: str):
    importlib.import_module(f"flax_layers.train.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"flax_layers.train.{module}")
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}: in a checkout, pip install -e '\.\[train\]'"):
        importlib.import_module(f"flax_layers.train.{module}")


def test_pictures_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: in a checkout, pip install -e '\.\[train\]'"):
        draw_losses(tmp_path / "loss.png", [(1, 2.0)])
