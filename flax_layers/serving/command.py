"""The command line of the server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import logging
import pathlib
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jflex
from flax_layers.attention.streaming import Streaming
from flax_layers.generate.command import DTYPES
from flax_layers.generate.folder import load
from flax_layers.models import Decoder
from flax_layers.models.cache_dtype import CACHE_DTYPES, check_cache_dtype
from flax_layers.models.checkpoint.folders import read_optional_json
from flax_layers.models.checkpoint.optional import check_installed
from flax_layers.models.eight_bit_weights import WEIGHT_DTYPES, quantize_weights
from flax_layers.sampling import Sampling
from flax_layers.serving.api.answers import ServedTokenizer
from flax_layers.serving.demo_model import FILE, ByteTokenizer, demo_model
from flax_layers.serving.device.options import EngineOptions
from flax_layers.serving.device.penalties import Penalties
from flax_layers.serving.engine.constraints import Guides
from flax_layers.serving.engine.engine import Engine
from flax_layers.serving.processes import LeadingExecutor, connect, follow

PACKAGES = ("jinja2", "prometheus_client", "pydantic", "starlette", "tqdm", "uvicorn")
DEMO_CONTEXT = 2048
SHARE_OF_MEMORY = 0.85
CPU_MEMORY = 1 << 30
LOG_LEVELS = ("debug", "info", "warning", "error")
STEP_TOKENS = (2048, 128)
"""Tokens of a step, at least `--max-requests`: on a GPU, and on a CPU."""

INVARIANT_TOKENS = (256, 32)
"""The same with `--batch-invariant`, whose steps are all as large. By the rates of an H200, reading weights takes as
long as the GEMMs of 190 tokens: 808 TFLOP/s over 4.28 TB/s (`benchmarks/results/h200/batch_invariant.json`)."""


class Model(NamedTuple):
    """A model to serve: its name for clients, and the tokens that end a text."""

    name: str
    decoder: Decoder
    tokenizer: ServedTokenizer
    stop_tokens: tuple[int, ...]
    sampling: Mapping[str, float]  # defaults of `generation_config.json`


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the options."""
    reader = argparse.ArgumentParser(
        prog="python -m flax_layers.serve",
        description="Serves a model to clients of OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models. "
        "A page to try it is at /, metrics for Prometheus are at /metrics.",
    )
    add = reader.add_argument
    add("--model", type=pathlib.Path, metavar="FOLDER", help="folder of a checkpoint; default: the demo's model")
    add("--name", help="model name that clients send; default: the name of the folder")
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1; 0.0.0.0: all networks")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free one; default: 8000")
    add("--api-key-file", type=pathlib.Path, metavar="FILE", help="API keys, one a line; clients must send one")
    _add_access(add)
    add("--max-requests", type=int, metavar="N", help="concurrent requests; default: 64, on a CPU 16")
    add("--max-waiting", type=int, default=1024, metavar="N", help="queued requests; more get a 429; default: 1024")
    add("--max-step-tokens", type=int, metavar="N", help="tokens in a step; default: 2048, on a CPU 128")
    room = reader.add_mutually_exclusive_group()
    room.add_argument(
        "--memory", type=float, metavar="GIB", help="cache size on all devices; default: free memory, on a CPU 1"
    )
    room.add_argument("--num-pages", type=int, metavar="N", help="number of pages in the cache, instead of --memory")
    add("--page-size", type=int, default=64, metavar="N", help="tokens in a page; default: 64")
    _add_dtypes(add)
    add("--context", type=int, metavar="N", help=f"tokens in a text; default: the model's, of the demo {DEMO_CONTEXT}")
    add("--streaming-window", type=int, metavar="W", help="attend to the last W tokens and --sinks first ones alone")
    add("--sinks", type=int, metavar="N", help="first tokens that stay visible with --streaming-window; default: 4")
    add("--draft-tokens", type=int, default=0, metavar="N", help="drafts of a request in a step; default: 0")
    add("--batch-invariant", action="store_true", help="give a request the same bits whatever else runs; slower")
    add("--max-body", type=float, default=4.0, metavar="MIB", help="largest request; default: 4")
    add("--grace", type=float, default=30.0, metavar="S", help="seconds for running requests at the end; default: 30")
    add("--implementation", metavar="NAME", help="jflex implementation; default: the first that can run here")
    add("--openai-defaults", action="store_true", help="sample by OpenAI's defaults, not by generation_config.json")
    add("--no-constraints", action="store_true", help="refuse JSON schemas and other constraints, without llguidance")
    add("--devices", type=int, default=1, metavar="N", help="devices that divide the heads of the model; default: 1")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, for devices on several hosts")
    add("--processes", type=int, metavar="N", help="number of processes, with --coordinator")
    add("--process", type=int, metavar="N", help="number of this process, from 0; process 0 takes the requests")
    add("--no-warm-up", action="store_true", help="compile programs at their first use")
    add("--compilation-cache", type=pathlib.Path, metavar="FOLDER", help="keep compiled programs for the next start")
    return reader


def _add_dtypes(add: Callable[..., object]) -> None:
    add("--dtype", choices=DTYPES, help="dtype of the model; default: bfloat16, on a CPU float32")
    add(
        "--weight-dtype",
        choices=WEIGHT_DTYPES,
        help="dtype of the layers' projections; default: as --dtype. Eight bits halve the bytes that a decoding step "
        "reads; see the docs for their error",
    )
    add(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="dtype of the KV cache, as vLLM's --kv-cache-dtype; default: the model's. Eight bits hold about "
        "twice the tokens of bfloat16; see the docs for their error",
    )


def _add_access(add: Callable[..., object]) -> None:
    add("--share-prefixes", action="store_true", help="share cached prefixes between API keys")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that requests may name; *: any; checked on a loopback address without keys; repeatable",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may call, as http://localhost:3000; *: any; repeatable",
    )
    add("--log-level", choices=LOG_LEVELS, default="info", help="log level; default: info, which logs each request")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command, by default with the arguments of the process."""
    reader = parser()
    options = reader.parse_args(arguments)
    with contextlib.ExitStack() as opened:
        try:
            check_installed(*PACKAGES, *([] if options.no_constraints else ["llguidance"]), extra="serve")
            mesh = connect(options)
            if options.process:
                return follow(load_served(options, mesh).decoder)
            keys, bound = begin(options)
            opened.enter_context(bound)
            model = load_served(options, mesh)
            engine = create_engine(options, model)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            reader.error(str(error))
        serve(options, model, engine, keys, bound)


def create_engine(options: argparse.Namespace, model: Model) -> Engine:
    """Creates the engine, which runs in all processes. Raises ValueError for sizes or a tokenizer that do not fit."""
    sizes, guides, executor = engine_options(options, model.decoder), guides_of(options, model), None
    if options.coordinator is not None:
        executor = LeadingExecutor(model.decoder, sizes, options.coordinator.rpartition(":")[0])
    return Engine(model.decoder, sizes, guides, executor)


def begin(options: argparse.Namespace) -> tuple[tuple[str, ...], socket.socket]:
    """Checks options before a model of many gigabytes is read; returns the API keys and the bound socket.

    Raises ValueError if an option is out of its range, or the file of keys cannot be read.
    """
    from flax_layers.serving.api.access import read_keys
    from flax_layers.serving.server import bind

    for name, value in (("memory", options.memory), ("max-body", options.max_body)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"`--{name}` must be greater than 0. Got {value}.")
    if not 0 <= options.grace < float("inf"):
        raise ValueError(f"`--grace` must be finite and at least 0. Got {options.grace}.")
    if not 0 <= options.port < 1 << 16:
        raise ValueError(f"`--port` must be from 0 to 65535. Got {options.port}.")
    if options.batch_invariant and options.devices > 1:
        raise ValueError(
            "`--batch-invariant` needs one device: the order in which an all-reduce adds may depend on the place of a "
            f"token. Got {options.devices}. Leave one of them out."
        )
    if options.weight_dtype is not None and options.devices > 1:
        raise ValueError(
            f"`--weight-dtype` needs one device: shards of a projection have no scales. Got {options.devices}. Leave "
            "one of them out."
        )
    if options.sinks is not None and options.streaming_window is None:
        raise ValueError(f"`--sinks` needs `--streaming-window`, the last tokens. Got {options.sinks}. Set both.")
    _sizes(options, num_pages=2 if options.num_pages is None else options.num_pages)
    keys = () if options.api_key_file is None else read_keys(options.api_key_file)
    return keys, bind(options.host, options.port)


def load_served(options: argparse.Namespace, mesh: Mesh | None = None) -> Model:
    """Loads the model, sharded over the mesh if there is one.

    Raises ValueError, OSError or ModuleNotFoundError if an option, the folder or a missing package prevents it.
    """
    say = lambda text: print(text, file=sys.stderr, flush=True)
    attention = jflex.Config(batch_invariant=True) if options.batch_invariant else None
    if options.model is None:
        if options.dtype not in (None, "float32"):
            raise ValueError(f"`--dtype` must be float32 for the demo's model. Got {options.dtype}. Leave it out.")
        model = demo_model(FILE, options.implementation, say, attention)
        if options.weight_dtype is not None:
            quantize_weights(model, options.weight_dtype)
        options.context = DEMO_CONTEXT if options.context is None else options.context
        return Model(options.name or "jflex-demo", model, ByteTokenizer(), (), {})
    sampling = {} if options.openai_defaults else sampling_defaults(options.model)
    dtype = options.dtype and jnp.dtype(options.dtype)
    loaded = load(options.model, dtype, options.implementation, mesh, attention, options.weight_dtype)
    name = options.name or options.model.resolve().name
    return Model(name, loaded.model, loaded.tokenizer, loaded.stop_tokens, sampling)


def sampling_defaults(folder: pathlib.Path) -> dict[str, float]:
    """The sampling parameters in `generation_config.json`. Raises ValueError if one is out of range."""
    path = folder / "generation_config.json"
    config, names = read_optional_json(path), ("temperature", "top_k", "top_p", "min_p")
    known = {name: config[name] for name in (*names, "repetition_penalty") if config.get(name) is not None}
    try:
        Sampling(**{name: known[name] for name in names if name in known})
        Penalties(repetition_penalty=known.get("repetition_penalty", 1.0))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold valid parameters. {error} Correct it, or pass `--openai-defaults`."
        ) from error
    return known


def guides_of(options: argparse.Namespace, model: Model) -> Guides | None:
    """The compiler of constraints; None with `--no-constraints`. Raises ValueError if it cannot use the tokenizer."""
    if options.no_constraints:
        return None
    try:
        return Guides(model.tokenizer, model.decoder.config.vocabulary)
    except ValueError as error:
        raise ValueError(f"`--no-constraints` must be given for this model. {error}") from error


def engine_options(options: argparse.Namespace, model: Decoder) -> EngineOptions:
    """The sizes of the engine. Raises ValueError if one is out of its range, or no page fits into the memory."""
    sizes = _sizes(options, num_pages=2)
    check_cache_dtype(sizes.cache_dtype, model)
    if options.num_pages is not None:
        return dataclasses.replace(sizes, num_pages=options.num_pages)
    page = jax.eval_shape(lambda: model.init_paged_cache(2, sizes.page_size, dtype=sizes.cache_dtype))
    page_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page)) // 2
    memory = int(options.memory * (1 << 30)) if options.memory is not None else options.devices * _free_memory()
    all_requests = 1 + sizes.max_requests * sizes.most_pages(model.config)
    if memory < 2 * page_bytes:
        raise ValueError(
            f"`--memory` must hold 2 pages, {2 * page_bytes / (1 << 30):.3g} GiB. Got {memory / (1 << 30):.3g}. Raise "
            "it, or lower `--page-size`."
        )
    # On a CPU the default is no more than all requests can use.
    most = all_requests if options.memory is None and jax.default_backend() == "cpu" else memory // page_bytes
    return dataclasses.replace(sizes, num_pages=min(most, memory // page_bytes))


def _sizes(options: argparse.Namespace, num_pages: int) -> EngineOptions:
    on_cpu = jax.default_backend() == "cpu"
    default = lambda value, other: other if value is None else value
    requests = default(options.max_requests, 16 if on_cpu else 64)
    usual = (INVARIANT_TOKENS if options.batch_invariant else STEP_TOKENS)[on_cpu]
    step_tokens = default(options.max_step_tokens, max(requests, usual))
    window, sinks = options.streaming_window, default(options.sinks, Streaming.sinks)
    streaming = None if window is None else Streaming(sinks, window)
    names = ("page_size", "cache_dtype", "context", "max_waiting", "draft_tokens", "batch_invariant")
    common = {name: getattr(options, name) for name in names}
    return EngineOptions(requests, step_tokens, num_pages, streaming=streaming, **common)


def _free_memory() -> int:
    """Bytes of a device for the cache: a share of its free memory, so that steps have room."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return CPU_MEMORY
    return int(SHARE_OF_MEMORY * (stats["bytes_limit"] - stats["bytes_in_use"]))


def serve(
    options: argparse.Namespace, model: Model, engine: Engine, keys: tuple[str, ...], bound: socket.socket
) -> None:
    """Serves until a signal. Without `keys`, no key is required."""
    from flax_layers.serving.api.access import Access
    from flax_layers.serving.api.http import Limits, Served, create_app
    from flax_layers.serving.server import Launch, Server, url_of

    log_to_stderr(options.log_level)
    url = url_of(bound)
    ready = lambda: print(f"Serving {model.name} at {url}", flush=True)
    launch = Launch(engine, None if options.no_warm_up else _progress_bar(), ready)
    limits = Limits(body_bytes=int(options.max_body * (1 << 20)))
    is_open = not keys and ipaddress.ip_address(bound.getsockname()[0]).is_loopback
    access = Access((options.host, *options.allow_host) if is_open else None, tuple(options.allow_origin))
    starting, shares = launch.is_starting, options.share_prefixes
    served = Served(model.name, model.stop_tokens, keys, limits, starting, shares, access, model.sampling)
    app = create_app(engine, model.tokenizer, served)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again, after it has shut down
        Server(app, launch, options.grace, limits).run(sockets=[bound])
    if launch.failure is not None:
        raise launch.failure


def log_to_stderr(level: str) -> None:
    """Writes the logs of the server and of uvicorn to the standard error.

    Polls of `/health`, `/metrics` and `/stats` are logged with `debug`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("flax_layers", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


def _progress_bar() -> Callable[[int, int], None]:
    from tqdm import tqdm

    bar = tqdm(unit="program", desc="compiling", dynamic_ncols=True, file=sys.stderr)

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return report
