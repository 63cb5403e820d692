"""Several devices and several processes behind one server."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import httpx
import jax.numpy as jnp
import pytest

from flax_layers.generate.folder import load
from flax_layers.serving import Engine, EngineOptions, Request
from flax_layers.serving.command import main
from flax_layers.serving.device.penalties import Penalties
from tests.support.golden_models import ROOT

FOLDER = ROOT / "gemma3"
PROMPT = tuple(range(5, 40))
SIZES = ["--num-pages=40", "--page-size=8", "--context=100", "--max-requests=4", "--max-step-tokens=32"]

ERRORS = {
    "none": (["--devices=0"], "`--devices` must be from 1 to 8, the devices that JAX finds. Got 0"),
    "many": (["--devices=9"], "`--devices` must be from 1 to 8, the devices that JAX finds. Got 9"),
    "the demo's": (["--devices=2"], "`--devices` must be 1 for the demo's model, .* Pass `--model`"),
    "alone": (["--processes=2"], "`--coordinator`, `--processes` and `--process` must be passed together"),
    "beyond": (
        ["--coordinator=localhost:1", "--processes=2", "--process=2"],
        "`--process` must be from 0 to 1, one of `--processes`. Got 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_options(name, capsys):
    arguments, message = ERRORS[name]
    with pytest.raises(SystemExit) as ended:
        main(["--port=0", *arguments])
    assert ended.value.code == 2
    assert re.search(rf"(?s)error: .*{message}", capsys.readouterr().err)


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """A checkpoint with a tokenizer."""
    made = tmp_path / "gemma3"
    shutil.copytree(ROOT / "tokenizer", made)
    shutil.copytree(FOLDER, made, dirs_exist_ok=True)
    return made


def alone(folder: pathlib.Path, bias: tuple[tuple[int, float], ...]) -> str:
    """What one process answers."""
    loaded, events = load(folder, jnp.float32, "xla"), []
    engine = Engine(loaded.model, EngineOptions(num_pages=40, page_size=8))
    engine.submit(Request(PROMPT, max_tokens=20, penalties=Penalties(logit_bias=bias)), events.append)
    while engine.step():
        pass
    return loaded.tokenizer.decode([token for event in events for token in event.tokens])


def start(folder: pathlib.Path, address: str, number: int) -> subprocess.Popen[str]:
    together = [f"--coordinator={address}", "--processes=2", f"--process={number}", "--devices=2"]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
    with (folder / f"errors{number}").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "flax_layers.serve", f"--model={folder}", "--port=0", "--no-warm-up",
             "--implementation=xla", *SIZES, *together],
            cwd=ROOT.parent.parent, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip


@pytest.mark.full
def test_two_processes_answer_as_one(folder):
    """Each holds half of the heads. The first one takes requests, and ends the other one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with start(folder, address, 0) as first, start(folder, address, 1) as second:
        try:
            assert first.stdout is not None
            lines = iter(first.stdout.readline, "")
            found = next(filter(None, (re.match(r"Serving gemma3 at (\S+)", line) for line in lines)), None)
            assert found is not None, (folder / "errors0").read_text()
            for bias in ((), ((7, -100.0), (200, 5.0))):
                body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
                body |= {"logit_bias": {str(token): value for token, value in bias}, "n": 2}
                answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=300).json()
                assert [choice["text"] for choice in answer["choices"]] == [alone(folder, bias)] * 2
            first.send_signal(signal.SIGTERM)
            assert (first.wait(120), second.wait(120)) in ((0, 0), (-signal.SIGTERM, 0))
        finally:
            first.kill()
            second.kill()
    assert "Traceback" not in (folder / "errors1").read_text()
