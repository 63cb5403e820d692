"""The serving engine under load, beside `transformers`: ``python -m benchmarks engine``.

The model has the shape of Llama 3 8B and random weights in bfloat16; there is no HTTP. Clients of a closed loop send
1024 tokens and get 256; so do Poisson arrivals, at shares of the closed loop's rate. Then 64 users share a prompt of
4096 tokens: without the prefix cache, with it, and with a cascade. All programs are compiled before, and a run of the
same load warms the GPU.

The least time of a step is the longer of two: that of reading all weights but the embeddings, and the keys and values
of its requests, at the rate of a copy in that process (bytes read and written); and that of its products at the rate of
a GEMM. The share of the roof is the sum of these times over all steps, over the wall time. Keys that requests share
count for each of them; a cascade, and in part the L2 cache, read them once, so that their share may pass 100 %. The
device is idle when no kernel runs, by the profiler, in the middle of a closed loop; the same profile tells which share
of the kernels XLA launched in command buffers (CUDA graphs). The part `launches` runs the closed loops again without
them. With `--cache-dtype` the cache has eight bits, and names of records say so. The peers are `generate` with a static
cache, which gets all prompts of a batch at once, and `generate_batch`, the continuous batching of `transformers`.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.questions import generation
from benchmarks.questions.generation import Shape, jax_model
from benchmarks.questions.load import Load, Timing, records_of
from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs
from benchmarks.run.timing import busy_seconds

_HERE, _PEER = "benchmarks.questions.engine", "benchmarks.peers.torch.serving"
_PEERS = "transformers"  # the part that runs them
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="


class Part(NamedTuple):
    """A function that a process of its own runs."""

    module: str
    function: str
    flags: str = ""  # for XLA


PARTS = {
    "clients": Part(_HERE, "jax_clients"),
    "launches": Part(_HERE, "jax_launches", _NO_GRAPHS),
    "users": Part(_HERE, "jax_users"),
    _PEERS: Part(_PEER, "torch_serving"),
}
_PROFILED = 2.0  # seconds of a profile that are counted


class Sizes(NamedTuple):
    """Sizes of the loads."""

    prompt: int = 1024
    output: int = 256
    clients: tuple[int, ...] = (1, 64, 256)
    users: int = 64
    shared: int = 4096
    suffix: int = 128  # tokens of a user after the shared ones, and of an answer
    page_size: int = 64
    step_tokens: int = 2048
    gemm: int = 8192  # side of its matrices
    shares: tuple[float, ...] = (0.5, 0.8)  # of the rate of the last closed loop, at which requests then arrive
    cache_dtype: str | None = None  # that of the model

    @property
    def cache_name(self) -> str:
        """Suffix of names of records."""
        return "" if self.cache_dtype is None else f", {self.cache_dtype} cache"


class Step(NamedTuple):
    """Work of a step: tokens, pairs of a query and a key, and keys in the caches of its requests."""

    tokens: int
    pairs: int
    keys: int


class Roof(NamedTuple):
    """Bounds of a step.

    >>> Roof(100, 1, 50, 1, bytes_rate=10.0, flops_rate=100.0).seconds([Step(1, 20, 20), Step(40, 0, 0)])
    32.0
    """

    weight_bytes: int
    key_bytes: int
    token_flops: int
    pair_flops: int
    bytes_rate: float
    flops_rate: float

    @classmethod
    def from_shape(cls, shape: Shape, bytes_rate: float, flops_rate: float, cache_dtype: str | None = None) -> Roof:
        """Roof of a model; its weights have two bytes, and each makes two operations of a token."""
        pair = 4 * shape.layers * shape.heads * shape.head_size
        weights, keys = shape.weight_bytes, shape.key_bytes
        if cache_dtype is not None:  # a byte, and for each vector a scale of four
            keys = shape.layers * 2 * shape.kv_heads * (shape.head_size + 4)
        return cls(weights, keys, weights, pair, bytes_rate, flops_rate)

    def seconds(self, steps: Iterable[Step]) -> float:
        """The least time of steps."""
        reading = lambda step: (self.weight_bytes + step.keys * self.key_bytes) / self.bytes_rate
        computing = lambda step: (step.tokens * self.token_flops + step.pairs * self.pair_flops) / self.flops_rate
        return sum(max(reading(step), computing(step)) for step in steps)


def engine(
    parts: Sequence[str],
    clients: Sequence[int],
    step_tokens: int,
    shares: Sequence[float],
    cache_dtype: str | None,
    limit: float,
) -> Iterator[Measured]:
    """Tokens a second, latencies, and the share of the roof, beside peers."""
    if cache_dtype is not None and _PEERS in parts:
        raise SystemExit(f"--cache-dtype is for jflex: leave out the part {_PEERS}, or the option")
    sizes = Sizes(clients=(*clients,), step_tokens=step_tokens, shares=(*shares,), cache_dtype=cache_dtype)
    for part in parts or [part for part in PARTS if cache_dtype is None or part != _PEERS]:
        yield measured_part(Shape(), sizes, part, limit)


def measured_part(shape: Shape, sizes: Sizes, name: str, limit: float = 560.0, run: RunJob = run_job) -> Measured:
    """Runs a part of `PARTS` in a process of its own, of at most `limit` seconds."""
    part, variables = PARTS[name], dict(SHARED_GPU)
    if part.flags:
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip()
    arguments = {"shape": list(shape), "sizes": list(sizes)}
    answers, remarks = run_jobs([Job(name, part.module, part.function, arguments, variables, limit)], run)
    records = [Record.from_json(record) for answer in answers.values() for record in answer["records"]]
    return Measured(records, [*remarks, *(remark for answer in answers.values() for remark in answer["remarks"])])


class Results:
    """Records and remarks, for JSON."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.remarks: list[str] = []

    def add(self, name: str, value: float, unit: str) -> None:
        """Keeps a single figure."""
        self.keep(Record.single(name, float(f"{value:.4g}"), unit))

    def keep(self, record: Record) -> None:
        """Adds a figure; it is printed, so that a process that is ended leaves it."""
        self.records.append(record)
        print(f"{record.name}: {record.value.median:.4g} {record.unit}", flush=True)

    def to_json(self) -> dict[str, Any]:
        """The answer of a job."""
        return {"records": [record.to_json() for record in self.records], "remarks": self.remarks}


def metered(model: Any, options: Any) -> Any:
    """An engine that keeps what its steps computed, as `computed`."""
    from flax_layers.serving import Engine

    class Metered(Engine):
        def __init__(self) -> None:
            super().__init__(model, options)
            self.computed: list[Step] = []

        def _dispatch(self, chunks: Any) -> Any:
            pairs = sum(x.count * x.first + x.count * (x.count + 1) // 2 for x in chunks)
            tokens, keys = sum(x.count for x in chunks), sum(x.first + x.count for x in chunks)
            self.computed.append(Step(tokens, pairs, keys))
            return super()._dispatch(chunks)

    return Metered()


def drive(engine: Any, load: Load, vocabulary: int) -> list[Timing]:
    """Puts a load on an engine that is running: a closed loop, or Poisson arrivals if the load has a rate."""
    from flax_layers.serving import Request

    prompts = load.prompts(vocabulary)[load.warm_up :]
    timings, waiting, lock = [Timing(0.0) for _ in prompts], iter(range(len(prompts))), threading.Lock()
    ended = threading.Semaphore(0)

    def submit(number: int) -> None:
        def deliver(event: Any) -> None:
            timing = timings[number]
            if event.tokens:
                timing.arrivals.append(time.perf_counter())
                timing.tokens += len(event.tokens)
            if event.finish_reason is not None:
                timing.error = event.error
                if load.rate is None:
                    send_next()
                ended.release()

        prompt, output = prompts[number]
        timings[number].sent = time.perf_counter()
        engine.submit(Request(tuple(prompt), max_tokens=output), deliver)

    def send_next() -> None:
        with lock:
            number = next(waiting, None)
        if number is not None:
            submit(number)

    draw = random.Random(load.seed + 1)
    for _ in range(load.concurrency if load.rate is None else len(prompts)):
        if load.rate is not None:
            time.sleep(draw.expovariate(load.rate))
        send_next()
    for _ in prompts:
        ended.acquire()
    return timings


def measured(engine: Any, name: str, load: Load, shape: Shape, roof: Roof, results: Results) -> float:
    """Runs a load, and records rates, latencies and the share of the roof; returns requests per second."""
    engine.computed.clear()
    timings = drive(engine, load, shape.vocabulary)
    records, remarks, *_ = records_of(timings, load)
    seconds = max(x.arrivals[-1] for x in timings) - min(x.sent for x in timings)
    for record in records:
        results.keep(dataclasses.replace(record, name=f"{name}: {record.name.partition(': ')[2]}"))
    results.remarks += remarks
    results.add(f"{name}: share of the roof", 100 * roof.seconds(engine.computed) / seconds, "%")
    return len(timings) / seconds


def rates(side: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written; and operations a second of a GEMM: of the kernels, as in suites."""
    import jax
    import jax.numpy as jnp

    from benchmarks.run.jax_runner import timer

    copied, copy = jnp.arange(generation.COPIED_BYTES // 4, dtype=jnp.uint32), jax.jit(jnp.invert)
    first, second = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    seconds = lambda call: statistics.median(timer().device_seconds(call, 20))
    bytes_rate = 2 * generation.COPIED_BYTES / seconds(lambda: copy(copied))
    return bytes_rate, 2 * side**3 / seconds(lambda: multiply(first, second))


def record_launches(engine: Any, name: str, load: Load, vocabulary: int, results: Results) -> None:
    """Records in how much of the middle of a load no kernel runs on the GPU, and how many kernels CUDA graphs launch.

    Ends the engine. Nothing may run on the GPU when the profile begins and ends, so the whole load is profiled: 2 of 10
    profiles that ended while graphs ran left CUDA_ERROR_LAUNCH_FAILED, one with a cache of bfloat16 and one of
    float8_e4m3fn (H100, driver 580.159). See https://github.com/jax-ml/jax/issues/40260.
    """
    from benchmarks.run.jax_runner import gpu_spans, profile_of

    spans = sorted(gpu_spans(profile_of(lambda: [drive(engine, load, vocabulary), engine.stop()])))
    if not spans:
        raise ValueError("The profiler saw no kernel.")
    ended = max(x.start + x.seconds for x in spans)
    middle = (spans[0].start + ended) / 2
    spans = [x for x in spans if abs(x.start - middle) <= _PROFILED / 2]
    seconds = max(x.start + x.seconds for x in spans) - spans[0].start
    idle = max(0.0, 1 - busy_seconds(spans) / seconds)  # overlaps below the clock's unit count twice
    results.add(f"{name}: idle GPU", 100 * idle, "%")
    results.add(f"{name}: kernels in CUDA graphs", 100 * sum(x.in_graph for x in spans) / len(spans), "%")


def closed_loops(
    shape: Shape, sizes: Sizes, results: Results, kind: str = "", shares: Sequence[float] = ()
) -> dict[str, Any]:
    """Records closed loops, and after the last of them Poisson arrivals at shares of its rate."""
    import jax

    model, roof = jax_model(shape), Roof.from_shape(shape, *rates(sizes.gemm), sizes.cache_dtype)
    kind += sizes.cache_name
    results.add(f"copy rate{kind}", roof.bytes_rate / 1e12, "TB/s")
    results.add(f"GEMM rate{kind}", roof.flops_rate / 1e12, "TFLOP/s")
    for clients in sizes.clients:
        name, load = f"{clients} clients{kind}", _load(clients, sizes)
        running = metered(model, _options(clients, sizes))
        started = time.perf_counter()
        running.warm_up()
        results.add(f"{name}: warm-up", time.perf_counter() - started, "s")
        running.start()
        drive(running, dataclasses.replace(load, requests=clients), shape.vocabulary)
        rate = measured(running, name, load, shape, roof, results)
        for share in shares if clients == sizes.clients[-1] else ():
            arrivals = dataclasses.replace(load, requests=load.requests // 2, rate=share * rate)
            measured(running, f"Poisson arrivals at {share:.0%} of {name}", arrivals, shape, roof, results)
        if jax.default_backend() == "gpu":
            record_launches(running, name, load, shape.vocabulary, results)
        else:
            running.stop()
        del running
        gc.collect()  # its cache, which cycles keep
    return results.to_json()


def _load(clients: int, sizes: Sizes) -> Load:
    return Load(max(4, 2 * clients), clients, None, ((sizes.prompt, sizes.output),), 0, 0)


def _options(clients: int, sizes: Sizes) -> Any:
    from flax_layers.serving import EngineOptions

    length = sizes.prompt + sizes.output
    pages = (clients + 1) * -(-length // sizes.page_size)
    return EngineOptions(
        max_requests=clients, max_step_tokens=max(clients, sizes.step_tokens), page_size=sizes.page_size,
        num_pages=1 + pages, cache_dtype=sizes.cache_dtype, context=length, prefix_cache=False,
    )  # fmt: skip


def jax_clients(shape: Sequence[int], sizes: Sequence[Any]) -> dict[str, Any]:
    """Closed loops and Poisson arrivals; a job."""
    load = Sizes(*sizes)
    return closed_loops(Shape(*shape), load, Results(), shares=load.shares)


def jax_launches(shape: Sequence[int], sizes: Sequence[Any]) -> dict[str, Any]:
    """The closed loops where XLA makes no command buffers; a job, whose process has `_NO_GRAPHS`."""
    return closed_loops(Shape(*shape), Sizes(*sizes), Results(), kind=", no command buffers")


def jax_users(shape: Sequence[int], sizes: Sequence[Any]) -> dict[str, Any]:
    """Users that share a prompt; a job."""
    from flax_layers.serving import EngineOptions

    shape, sizes, results = Shape(*shape), Sizes(*sizes), Results()
    model, roof = jax_model(shape), Roof.from_shape(shape, *rates(sizes.gemm), sizes.cache_dtype)
    prompt, users = sizes.shared + sizes.suffix, sizes.users
    pages = -(-(prompt + sizes.suffix) // sizes.page_size)
    kinds = {
        "no prefix cache": {"prefix_cache": False},
        "prefix cache": {"cascade_bytes": None},
        "prefix cache and cascade": {"cascade_bytes": 1},
    }
    for kind, more in kinds.items():
        options = EngineOptions(
            max_requests=users, max_step_tokens=max(users, sizes.step_tokens), page_size=sizes.page_size,
            num_pages=1 + (users + 1) * pages, cache_dtype=sizes.cache_dtype, context=prompt + sizes.suffix, **more,
        )  # fmt: skip
        load = Load(2 * users, users, None, ((prompt, sizes.suffix),), sizes.shared, 0)
        running = metered(model, options)
        running.warm_up()
        running.start()
        drive(running, dataclasses.replace(load, requests=users, seed=1), shape.vocabulary)
        name = f"{kind}{sizes.cache_name}"
        measured(running, f"{users} users share {sizes.shared} tokens, {name}", load, shape, roof, results)
        steps, cascades = running.stats().steps, running.stats().cascade_steps
        results.remarks.append(f"{name}: {cascades} of {steps} steps were cascades")
        running.stop()
        del running
        gc.collect()  # its cache, which cycles keep
    return results.to_json()
