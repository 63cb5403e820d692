"""Several devices and several processes behind one server."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import httpx
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_layers.generate.folder import load
from flax_layers.models import Decoder, save_pretrained
from flax_layers.serving import Engine, EngineOptions
from flax_layers.serving.device.penalties import Penalties
from tests.cases.engine_cases import Client, run
from tests.serving.test_serving_command import CONFIG
from tests.support.golden_models import ROOT

PROMPT = tuple(range(5, 40))
SIZES = ["--num-pages=40", "--page-size=8", "--context=100", "--max-requests=2", "--max-step-tokens=48"]


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
def test_two_processes_answer_as_one(tmp_path):
    """Each holds half of the heads. The first one takes requests, and ends the other one."""
    folder = tmp_path / "two_heads"
    config = dataclasses.replace(CONFIG, num_kv_heads=2)
    save_pretrained(Decoder(config, rngs=nnx.Rngs(0)), folder, source=ROOT / "tokenizer")
    loaded = load(folder, jnp.float32, "xla")
    alone = Engine(loaded.model, EngineOptions(num_pages=40, page_size=8, max_requests=2, max_step_tokens=48))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with start(folder, address, 0) as first, start(folder, address, 1) as second:
        try:
            assert first.stdout is not None
            lines = iter(first.stdout.readline, "")
            found = next(filter(None, (re.match(r"Serving two_heads at (\S+)", line) for line in lines)), None)
            assert found is not None, (folder / "errors0").read_text()
            client = Client(alone, PROMPT, max_tokens=20, penalties=Penalties(logit_bias=((7, -100.0), (200, 5.0))))
            run(alone)
            body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "n": 2}
            body |= {"logit_bias": {"7": -100, "200": 5}}
            answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=300).json()
            right = loaded.tokenizer.decode(client.tokens)
            assert [choice["text"] for choice in answer["choices"]] == [right] * 2
            first.send_signal(signal.SIGTERM)
            assert (first.wait(120), second.wait(120)) in ((0, 0), (-signal.SIGTERM, 0))
        finally:
            first.kill()
            second.kill()
    assert "Traceback" not in (folder / "errors1").read_text()
