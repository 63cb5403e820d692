"""`python -m flax_layers.serve`: its options, a real server with the official client, and signals."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from flax import nnx

import jflex
from flax_layers.demo.model import Sizes, load_model
from flax_layers.models import Decoder, LayerConfig, ModelConfig, save_pretrained
from flax_layers.serving import Engine, EngineOptions, Streaming
from flax_layers.serving.api.http import Served, create_app
from flax_layers.serving.command import (
    begin,
    create_engine,
    engine_options,
    guides_of,
    load_served,
    main,
    parser,
    serve,
)
from flax_layers.serving.demo_model import FILE
from flax_layers.serving.server import Launch, Server, bind, url_of
from tests.support import served
from tests.support.golden_models import ROOT

CONFIG = ModelConfig(
    vocabulary=280, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8, layers=(LayerConfig(),),
    max_positions=256, initializer_range=0.5, eos_token_ids=(1,),
)  # fmt: skip
SMALL = Sizes(width=16, layers=1, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A checkpoint of a random model, with a tokenizer and a chat template, beside an adapter."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    (path.parent / "adapter").mkdir()
    (path.parent / "adapter/adapter_config.json").write_text("{}")
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(0)), path, source=ROOT / "tokenizer")
    (path / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": 1}')
    return path


def read(*arguments: str):
    return parser().parse_args(arguments)


ERRORS = {
    "an adapter": (("--model", "adapter"), "adapter holds an adapter, adapter_config.json, .* `merge_and_unload`"),
    "no folder": (("--model", "/nowhere"), "`--model` must be the folder of a checkpoint, .* no folder /nowhere"),
    "port": (("--port", "65536"), "`--port` must be from 0 to 65535. Got 65536"),
    "host": (("--host", "256.0.0.1"), "`--host` must be an address of this machine. Got '256.0.0.1'"),
    "memory": (("--memory", "0"), "`--memory` must be greater than 0. Got 0.0"),
    "little memory": (("--memory", "1e-6"), "`--memory` must hold 2 pages, .* Raise it"),
    "both": (("--memory", "1", "--num-pages", "9"), "argument --num-pages: not allowed with argument --memory"),
    "pages": (("--num-pages", "1"), "`num_pages` must be at least 2. Got 1"),
    "sinks": (("--sinks", "4"), "`--sinks` needs `--streaming-window`, the last tokens. Got 4"),
    "streaming": (("--streaming-window", "253"), "at most the 256 positions .* Got 4 and 253"),
    "invariant devices": (("--batch-invariant", "--devices", "2"), "`--batch-invariant` needs one device: .* Got 2"),
    "grace": (("--grace", "-1"), "`--grace` must be finite and at least 0. Got -1.0"),
    "no keys": (("--api-key-file", os.devnull), "`--api-key-file` must hold a key .* /dev/null holds none"),
    "no text": (("--api-key-file", sys.executable), "`--api-key-file` must be a text file .*: It is not UTF-8"),
    "cache dtype": (("--cache-dtype", "fp8"), "argument --cache-dtype: invalid choice: 'fp8' .*int8.*float8_e5m2"),
    "weight dtype": (
        ("--weight-dtype", "float8_e4m3fn", "--devices", "2"),
        "`--weight-dtype` needs one device: .* Got 2",
    ),
    "devices": (("--devices", "9"), "`--devices` must be from 1 to 8, the devices that JAX finds. Got 9"),
    "one of three": (("--processes", "2"), "`--coordinator`, `--processes` and `--process` must be passed together"),
    "process": (
        ("--coordinator", "localhost:1", "--processes", "2", "--process", "2"),
        "`--process` must be from 0 to 1, one of `--processes`. Got 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_options(name, folder, capsys, monkeypatch):
    """One sentence on the standard error, and nothing else."""
    monkeypatch.chdir(folder.parent)
    arguments, message = ERRORS[name]
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(folder), "--port", "0", "--implementation", "xla", *arguments])
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    [line] = [line for line in written.err.splitlines() if "error: " in line]
    assert re.search(message, line), line


def test_a_port_that_is_taken(folder, capsys):
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        for arguments in (["--model", str(folder), "--port", str(taken.getsockname()[1])], ["--devices", "2"]):
            with pytest.raises(SystemExit):
                main(arguments)
    error = capsys.readouterr().err
    assert "`--port` must be free at 127.0.0.1" in error
    assert "`--devices` must be 1 for the demo's model" in error


def test_a_missing_package(capsys, monkeypatch):
    for package in ("llguidance", "uvicorn"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SystemExit):
            main([] if package == "llguidance" else ["--no-constraints"])
        error = capsys.readouterr().err
        assert f"`flax_layers.serve` needs {package}: in a checkout, pip install -e '.[serve]'" in error


def test_constraints_can_be_left_out(folder, tmp_path):
    """The tokenizer of a model may be one that llguidance cannot read; then an option says so."""
    options = read("--model", str(folder))
    model = load_served(options)
    made = guides_of(options, model)
    assert made is not None
    assert made.vocabulary == 280
    shutil.copytree(folder, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": None}))
    options = read("--model", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"`--no-constraints` must be given for this model\. `tokenizer` must be one"):
        guides_of(options, load_served(options))
    options.no_constraints = True
    assert guides_of(options, load_served(options)) is None


def test_defaults(folder):
    """Only this machine is served, the name is that of the folder, and the cache holds what all requests can use."""
    options = read("--model", str(folder), "--port", "0")
    keys, bound = begin(options)
    with bound:
        assert (keys, bound.getsockname()[0]) == ((), "127.0.0.1")
        assert re.fullmatch(r"http://127.0.0.1:\d+", url_of(bound))
    model = load_served(options)
    assert (model.name, model.stop_tokens) == ("tiny", (1,))
    sizes = engine_options(options, model.decoder)
    assert (sizes.max_requests, sizes.num_pages) == (16, 1 + 16 * 4)


@pytest.mark.parametrize(("name", "bytes_of_number"), [(None, 4 * 8), ("int8", 8 + 4), ("float8_e5m2", 8 + 4)])
def test_sizes_of_the_cache(name, bytes_of_number, folder):
    """Scales count: a key of 8 features takes 12 bytes, not 32. The engine gets the dtype."""
    page = 2 * 1 * bytes_of_number * 64  # keys and values, a head, 64 tokens
    more = () if name is None else ("--cache-dtype", name)
    options = read("--model", str(folder), "--memory", str(100 * page / (1 << 30)), *more)
    model = load_served(options)
    assert engine_options(options, model.decoder).num_pages == 100
    engine = create_engine(options, model)
    assert engine.options.cache_dtype == name
    assert engine._executor._state.cache.k.dtype == (name or "float32")
    assert engine_options(read("--num-pages", "7"), model.decoder).num_pages == 7


@pytest.mark.full
def test_weights_of_eight_bits(folder, small_demo):
    """Of a checkpoint and of the demo's model."""
    for words in (("--model", str(folder)), ()):
        decoder = load_served(read(*words, "--weight-dtype", "float8_e4m3fn")).decoder
        assert decoder.blocks[0].attention.out.kernel[...].dtype == "float8_e4m3fn"


def test_the_cache_of_streaming(folder):
    decoder = load_served(read("--model", str(folder))).decoder
    words = ("--streaming-window", "124", "--context", "100000", "--page-size", "16", "--max-step-tokens", "64")
    sizes = engine_options(read(*words), decoder)
    assert (sizes.streaming, sizes.context_of(decoder.config)) == (Streaming(4, 124), 100_000)
    assert sizes.num_pages == 1 + 16 * (128 // 16 + 12 + 1)  # a shared prefix, and the windows of 64 tokens


def test_a_batch_invariant_server(folder):
    """Model and engine promise it; a step has few tokens, since all are as large."""
    options = read("--model", str(folder), "--batch-invariant", "--num-pages", "40")
    model = load_served(options)
    engine = create_engine(options, model)
    assert model.decoder.attention_config == jflex.Config(batch_invariant=True)
    assert (engine.options.batch_invariant, engine.options.max_step_tokens) == (True, 32)


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ((), ("127.0.0.1",)),
        (("--host", "localhost", "--allow-host", "a.example", "--allow-host", "b"), ("localhost", "a.example", "b")),
        (("--host", "0.0.0.0"), None),
        (("--api-key-file", "keys"), None),
    ],
)
def test_whose_requests_are_answered(words, hosts, folder, tmp_path, monkeypatch):
    """On a loopback address without keys, hosts and origins are checked."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("keys").write_text("one\n\n two \n")
    made = []
    monkeypatch.setattr(
        "flax_layers.serving.api.http.create_app", lambda engine, tokenizer, served: made.append(served)
    )
    monkeypatch.setattr(Server, "run", lambda self, sockets: None)
    monkeypatch.setattr("flax_layers.serving.command.log_to_stderr", lambda level: made.append(level))
    options = read("--port", "0", "--allow-origin", "http://page.example", "--log-level", "error", *words)
    keys, bound = begin(options)
    assert keys == (("one", "two") if "keys" in words else ())
    with bound:
        model = load_served(read("--model", str(folder)))
        serve(options, model, Engine(model.decoder, EngineOptions(num_pages=9)), keys, bound)
    level, served = made
    assert (served.access.hosts, served.access.origins) == (hosts, ("http://page.example",))
    assert (level, served.keys, served.shares_prefixes) == ("error", keys, False)


@pytest.fixture(scope="module")
def running(folder) -> Iterator[tuple[Engine, str]]:
    """An engine of the checkpoint, and the address of its server."""
    loaded = load_served(read("--model", str(folder), "--implementation", "xla"))
    engine = Engine(loaded.decoder, EngineOptions(max_requests=4, max_step_tokens=64, num_pages=65, page_size=16))
    app = create_app(engine, loaded.tokenizer, Served(loaded.name, loaded.stop_tokens, sampling=loaded.sampling))
    with served.listening(app, engine=engine) as (host, port):
        yield engine, f"http://{host}:{port}"
    engine.check()
    assert engine.stats().used_pages == 0


@pytest.mark.full
def test_the_official_client(running):
    import openai

    _, url = running
    short: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "temperature": 0}
    hello = [{"role": "user", "content": "Hello"}]
    hot: dict[str, Any] = {"model": "tiny", "messages": hello, "temperature": -1}
    chat: dict[str, Any] = {**short, "messages": hello, "logprobs": True, "top_logprobs": 2, "n": 2}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(prompt="Hello", **short)
        stream = client.completions.create(prompt="Hello", stream=True, **short)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        sampled = lambda **more: client.completions.create(**{**short, "prompt": "Hello", "seed": 1, **more})
        by_default, hotter = (sampled(temperature=x).choices[0].text for x in (openai.omit, 1.0))
        assert by_default == whole.choices[0].text != hotter

        said = client.chat.completions.create(**chat)
        assert said.choices[0].message.role == "assistant"
        assert len(said.choices[0].logprobs.content[0].top_logprobs) == 2
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **chat))
        texts = ["", ""]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in said.choices]
        assert said.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == said.usage.completion_tokens

        with pytest.raises(openai.BadRequestError, match="`temperature` must be") as wrong:
            client.chat.completions.create(**hot)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError, match=r"refuses `messages`: unknown role system"):
            client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": "a"}])


def test_a_launch_that_fails_ends_the_server(folder, monkeypatch):
    loaded = load_served(read("--model", str(folder), "--implementation", "xla"))
    engine = Engine(loaded.decoder, EngineOptions(max_requests=4, max_step_tokens=64, num_pages=65, page_size=16))
    monkeypatch.setattr(engine, "warm_up", lambda report: 1 / 0)
    launch = Launch(engine, lambda done, total: None)
    server = Server(create_app(engine, loaded.tokenizer, Served("tiny")), launch, grace=1)
    asyncio.run(server.serve(sockets=[bind("127.0.0.1", 0)]))
    assert isinstance(launch.failure, ZeroDivisionError)
    assert not engine.is_running


def test_garbage_collection_skips_objects_older_than_the_engine():
    with served.listening():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


@pytest.mark.long
def test_a_signal_ends_the_command(folder, tmp_path):
    """It answers while it compiles; a signal lets the requests end that run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    sizes = ("--max-requests", "2", "--max-step-tokens", "16", "--page-size", "64", "--num-pages", "9")
    more = ("--implementation", "xla", "--compilation-cache", str(tmp_path / "cache"), *sizes)
    command = [sys.executable, "-m", "flax_layers.serve", "--model", str(folder), "--port", port, *more]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
    errors = tmp_path / "errors"
    with (
        errors.open("w") as log,
        subprocess.Popen(
            command, cwd=ROOT.parent.parent, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        url, states, ends = f"http://127.0.0.1:{port}", [], time.monotonic() + 120
        while not states and time.monotonic() < ends:
            try:
                states.append(httpx.get(f"{url}/health", timeout=5).json()["status"])
            except httpx.ConnectError:
                time.sleep(0.02)
        assert states[0] in ("compiling", "running")
        assert process.stdout is not None
        assert process.stdout.readline() == f"Serving tiny at {url}\n", errors.read_text()
        for headers, status in (({"x-request-id": "mine"}, 200), ({"host": "evil.example", "x-request-id": "2"}, 403)):
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, headers["x-request-id"])
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            process.send_signal(signal.SIGTERM)
            events = [line for line in answer.iter_lines() if line]
        assert process.wait(120) in (0, -signal.SIGTERM)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    written = errors.read_text()
    assert "compiling" in written
    assert list(tmp_path.glob("cache/*"))
    assert "Traceback" not in written
    lines = re.findall(r' INFO 127\.0\.0\.1 "(\S+ \S+)" (\d+) \S+ s (\S+)\n', written)
    lines = [line for line in lines if "/health" not in line[0]]
    assert lines[:2] == [("GET /v1/models", "200", "mine"), ("GET /v1/models", "403", "2")]
    assert lines[2][:2] == ("POST /v1/completions", "200")


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    """A demo that trains a small model for two steps."""
    from flax_layers.serving import demo_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_model, "SIZES", SMALL)
    monkeypatch.setattr(demo_model.TRAINING, "steps", 2)


@pytest.mark.full
def test_the_demo_is_trained_once(small_demo, capsys):
    for said in ("trained on the Python standard library for 2 steps", "the byte-level model of the demo, from"):
        served = load_served(read("--implementation", "xla"))
        assert said in capsys.readouterr().err
        assert (served.name, served.decoder.config.width) == ("jflex-demo", 16)
    np.savez(FILE, other=np.zeros(1))
    with pytest.raises(ValueError, match="holds no model of the demo"):
        load_model(FILE)
