"""The serving engine under load, beside `transformers`: ``python -m benchmarks engine``.

The model has the shape of Llama 3 8B and random weights in bfloat16. Clients of a closed loop send 1024 tokens and get
256; so do Poisson arrivals, at shares of the closed loop's rate. The part `http` puts the same loops on a server in the
process of the engine, too: what it costs is the share of the output that is lost, with tokenizer and JSON. Then 64
users share a prompt of 4096 tokens: without the prefix cache, with it, and with a cascade. All programs are compiled
before, and a run of the same load warms the GPU.

The least time of a step is the longer of two: that of reading all weights but the embeddings, and the keys and values
of its requests, at the rate of a copy in that process (bytes read and written); and that of its products at the rate of
a GEMM. The share of the roof is the sum of these times over all steps, over the wall time. Keys that requests share
count for each of them; a cascade, and in part the L2 cache, read them once, so that their share may pass 100 %. The
device is idle when no kernel runs, by the profiler, in the middle of a closed loop; the same profile tells which share
of the kernels XLA launched in command buffers (CUDA graphs). The part `launches` runs the closed loops again without
them. With `--cache-dtype` or `--weight-dtype` the cache or the projections have eight bits, and names of records say
so; the products of such projections have half the least time. The peers are `generate` with a static cache, which gets
all prompts of a batch at once, and `generate_batch`, the continuous batching of `transformers`.
"""

import dataclasses
import gc
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from benchmarks.questions.generation import Shape, jax_model
from benchmarks.questions.question import Measured, one_of
from benchmarks.questions.serving import Load, Timing, records_of
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Job, RunJob, run_job, run_jobs
from benchmarks.run.timing import busy_seconds

PARTS = ("clients", "http", "launches", "users", "transformers")
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
OPTIONS = {
    "parts": {"nargs": "*", "type": one_of(*PARTS), "help": f"parts to run, by default all: {', '.join(PARTS)}"},
    "clients": {"help": "clients of each closed loop"},
    "prompt": {"help": "tokens of each prompt"},
    "output": {"help": "tokens of each answer"},
    "turns": {"help": "requests of each client, one after the other"},
    "pages": {"type": int, "help": "pages of the cache, at most; default: what all requests fill"},
    "step_tokens": {"help": "tokens in a step, at most"},
    "shares": {"nargs": "*", "help": "shares of the closed loop's rate for Poisson arrivals"},
    "cache_dtype": {"choices": CACHE_DTYPES, "help": "dtype of the cache; default: the model's"},
    "weight_dtype": {"choices": ("float8_e4m3fn",), "help": "dtype of the projections; default: the model's"},
    "limit": {"help": "seconds for each part"},
}
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="
_PROFILED = 2.0  # seconds of a profile that are counted
_PROFILED_TOKENS = 1 << 18  # of the answers of a load, at most: a profile holds each of its kernels


class Sizes(NamedTuple):
    """Sizes of the loads."""

    prompt: int = 1024
    output: int = 256
    clients: tuple[int, ...] = (1, 64, 256)
    turns: int = 2
    pages: int | None = None
    users: int = 64
    shared: int = 4096
    suffix: int = 128  # tokens of a user after the shared ones, and of an answer
    page_size: int = 64
    step_tokens: int = 2048
    shares: tuple[float, ...] = (0.5, 0.8)  # of the rate of the last closed loop, at which requests then arrive
    cache_dtype: str | None = None  # that of the model
    weight_dtype: str | None = None

    def cases(self, part: str) -> Iterator[tuple[str, Load, Any]]:
        """Name, load and `EngineOptions` of each load of a part."""
        cache = "" if self.cache_dtype is None else f", {self.cache_dtype} cache"
        cache += "" if self.weight_dtype is None else f", {self.weight_dtype} weights"
        if part == "users":
            load = Load(2 * self.users, self.users, None, ((self.shared + self.suffix, self.suffix),), self.shared, 0)
            for kind, more in {
                "no prefix cache": {"prefix_cache": False},
                "prefix cache": {"cascade_bytes": None},
                "prefix cache and cascade": {"cascade_bytes": 1},
            }.items():
                yield f"{self.users} users share {self.shared} tokens, {kind}{cache}", load, self._options(load, **more)
        else:
            kind = ", no command buffers" if part == "launches" else ""
            lengths, usual = (self.prompt, self.output, self.turns), Sizes._field_defaults
            if lengths != (usual["prompt"], usual["output"], usual["turns"]):
                kind = f", {self.prompt}/{self.output} tokens, {self.turns} turns{kind}"
            for clients in self.clients:
                requests = max(4, self.turns * clients)
                load = Load(requests, clients, None, ((self.prompt, self.output),), 0, 0)
                yield f"{clients} clients{kind}{cache}", load, self._options(load, prefix_cache=False)

    def _options(self, load: Load, **more: Any) -> Any:
        from flax_layers.serving import EngineOptions

        requests, length = load.concurrency, sum(load.lengths[0])
        pages = 1 + (requests + 1) * -(-length // self.page_size)
        return EngineOptions(
            max_requests=requests, max_step_tokens=max(requests, self.step_tokens), page_size=self.page_size,
            num_pages=min(pages, self.pages or pages), cache_dtype=self.cache_dtype, context=length, **more,
        )  # fmt: skip


class Step(NamedTuple):
    """Work of a step: tokens, pairs of a query and a key, and keys in the caches of its requests."""

    tokens: int
    pairs: int
    keys: int


class Roof(NamedTuple):
    """Bounds of a step."""

    weight_bytes: int
    key_bytes: int
    token_flops: int
    pair_flops: int
    bytes_rate: float
    flops_rate: float

    @classmethod
    def from_shape(cls, shape: Shape, bytes_rate: float, flops_rate: float, cache_dtype: str | None = None) -> Self:
        """Roof of a model: a weight of two bytes makes two operations of a token, one of a byte at twice the rate."""
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
    parts: Sequence[str] = (),
    clients: Sequence[int] = Sizes().clients,
    prompt: int = Sizes().prompt,
    output: int = Sizes().output,
    turns: int = Sizes().turns,
    pages: int | None = None,
    step_tokens: int = Sizes().step_tokens,
    shares: Sequence[float] = Sizes().shares,
    cache_dtype: str | None = None,
    weight_dtype: str | None = None,
    limit: float = 560.0,
) -> Iterator[Measured]:
    """Tokens a second, latencies, and the share of the roof, beside peers."""
    has_peer = cache_dtype is None and weight_dtype is None
    if not has_peer and PARTS[-1] in parts:
        raise SystemExit(f"--cache-dtype and --weight-dtype are for jflex: leave out them or the part {PARTS[-1]}")
    sizes = Sizes(
        prompt, output, (*clients,), turns, pages, step_tokens=step_tokens, shares=(*shares,),
        cache_dtype=cache_dtype, weight_dtype=weight_dtype,
    )  # fmt: skip
    for part in parts or PARTS[: len(PARTS) - (not has_peer)]:
        yield measured_part(Shape() if weight_dtype is None else Shape(item=1), sizes, part, limit)


def measured_part(shape: Shape, sizes: Sizes, part: str, limit: float = 560.0, run: RunJob = run_job) -> Measured:
    """Runs a part in a process of its own, of at most `limit` seconds."""
    arguments: dict[str, Any] = {"shape": shape, "sizes": sizes}
    variables: dict[str, str] = {}  # JAX preallocates: a pool that grows has no room for two arrays of 50 GiB
    target = __name__, "jax_loads", {**arguments, "part": part}
    if part == "transformers":
        target = "benchmarks.peers.torch.serving", "torch_serving", arguments
    elif part == "http":
        target = "benchmarks.questions.http_cost", "http_loads", arguments
    elif part == "launches":
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_NO_GRAPHS}".strip()
    answers, remarks = run_jobs([Job(part, *target, variables, limit)], run)
    return answers.get(part, Measured([], remarks))


class Results(list[Record]):
    """Records of a job, with remarks."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def add(self, record: Record) -> None:
        """Adds a figure; it is printed, so that a process that is ended leaves it."""
        self.append(record)
        print(f"{record.name}: {record.value.median:.4g} {record.unit}", flush=True)

    def measured(self) -> Measured:
        """The answer of the job."""
        return Measured(list(self), self.remarks)


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

    def send_next() -> None:
        with lock:
            number = next(waiting, None)
        if number is None:
            return
        timing, (prompt, output) = timings[number], prompts[number]

        def deliver(event: Any) -> None:
            if event.tokens:
                timing.arrivals.append(time.perf_counter())
                timing.tokens += len(event.tokens)
            if event.finish_reason is not None:
                timing.error = event.error
                if load.rate is None:
                    send_next()
                ended.release()

        timing.sent = time.perf_counter()
        engine.submit(Request(tuple(prompt), max_tokens=output), deliver)

    draw = random.Random(load.seed + 1)
    for _ in range(load.concurrency if load.rate is None else len(prompts)):
        if load.rate is not None:
            time.sleep(draw.expovariate(load.rate))
        send_next()
    for _ in prompts:
        ended.acquire()
    return timings


def record_load(engine: Any, name: str, load: Load, shape: Shape, roof: Roof, results: Results) -> float:
    """Records rates, latencies and the share of the roof of a load; returns requests per second."""
    engine.computed.clear()
    timings = drive(engine, load, shape.vocabulary)
    records, remarks, *_ = records_of(timings, load)
    seconds = max(x.arrivals[-1] for x in timings) - min(x.sent for x in timings)
    for record in records:
        results.add(dataclasses.replace(record, name=f"{name}: {record.name.partition(': ')[2]}"))
    results.remarks += remarks
    results.add(Record.single(f"{name}: share of the roof", 100 * roof.seconds(engine.computed) / seconds, "%"))
    return len(timings) / seconds


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
    results.add(Record.single(f"{name}: idle GPU", 100 * idle, "%"))
    results.add(
        Record.single(f"{name}: kernels in CUDA graphs", 100 * sum(x.in_graph for x in spans) / len(spans), "%")
    )


def jax_loads(shape: Shape, sizes: Sizes, part: str) -> Measured:
    """The loads of a part, and after the last closed loop Poisson arrivals at shares of its rate; a job."""
    import jax

    from benchmarks.run.jax_runner import JaxRunner

    model, rates, cases, results = jax_model(shape), JaxRunner().rates(), list(sizes.cases(part)), Results()
    roof = Roof.from_shape(shape, rates["copy_bytes"], rates["matmul_flops"], sizes.cache_dtype)
    if part != "users":
        kind = cases[0][0].partition(" clients")[2]
        results.add(Record.single(f"copy rate{kind}", roof.bytes_rate / 1e12, "TB/s"))
        results.add(Record.single(f"GEMM rate{kind}", roof.flops_rate / 1e12, "TFLOP/s"))
    for name, load, options in cases:
        running = metered(model, options)
        started = time.perf_counter()
        running.warm_up()
        results.add(Record.single(f"{name}: warm-up", time.perf_counter() - started, "s"))
        running.start()
        drive(running, dataclasses.replace(load, requests=load.concurrency, seed=1), shape.vocabulary)
        rate = record_load(running, name, load, shape, roof, results)
        for share in sizes.shares if part == "clients" and name == cases[-1][0] else ():
            arrivals = dataclasses.replace(load, requests=load.requests // 2, rate=share * rate)
            record_load(running, f"Poisson arrivals at {share:.0%} of {name}", arrivals, shape, roof, results)
        if part == "users":
            stats = running.stats()
            results.remarks.append(f"{name}: {stats.cascade_steps} of {stats.steps} steps were cascades")
        answers = load.requests * load.lengths[0][1]
        if jax.default_backend() == "gpu" and part != "users" and answers <= _PROFILED_TOKENS:
            record_launches(running, name, load, shape.vocabulary, results)
        else:
            running.stop()
        del running
        gc.collect()  # its cache, which cycles keep
    return results.measured()
