"""Context parallel attention on the GPUs of this host beside one of them: ``python -m benchmarks context``.

Each strategy computes the same attention as one GPU, in a balanced order of the tokens and in the natural one. The
programs of a mask and an order are compiled first; then each is compared with one GPU and timed.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax.attention import forward_and_backward
from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jax_runner import Times, time_devices
from benchmarks.run.jobs import Deadline
from benchmarks.run.timing import describe_error, failures
from jflex import context_parallel

MASKS = ("causal", "documents")
ORDERS = ("balanced", "natural")
STRATEGIES = ("ring", "all_gather", "ulysses")
DIRECTIONS = ("forward", "forward and backward")
Result = tuple[list[Record], list[str], list[np.ndarray]]  # of a case: records, remarks and samples
OPTIONS = {
    "masks": {"choices": MASKS},
    "strategies": {"choices": STRATEGIES},
    "orders": {"choices": ORDERS},
    "devices": {"type": int, "help": "number of devices; default: all of the host"},
    "implementation": {"help": "implementation of jflex; default: the first that can run"},
    "runs": {"help": "repetitions, two of a long call"},
    "limit": {"type": float, "metavar": "SECONDS", "help": "start no measurement after this time"},
}
_SAMPLES = 509  # rows that are compared; a prime, so that no block is left out
_ERROR = 0.02  # relative, of bfloat16 results that were summed in another order
_LONG, _LEAST = 2.0, 2  # seconds of a long call, and its repetitions
_CHUNKS = 16  # of a device in the balanced order of documents
_AXES = jax.P(None, "context")  # of batch and tokens
_TITLE = (
    "causal attention and {documents} packed causal documents of uneven lengths on several GPUs of one host beside one "
    "of them; B 1, S {length}, H {heads}/{kv_heads}, D {head_size}, bfloat16. Time: of the GPU that works longest; a "
    "wait for another one is communication. Hidden: the share of the time of collectives in which other kernels ran on "
    "the same GPU"
)


class Case(NamedTuple):
    """One program."""

    mask: str
    direction: str
    strategy: str = ""  # "" for one device
    order: str = ""

    def name(self, count: int) -> str:
        """Prefix of its records."""
        where = f"{count} GPUs, {self.strategy}, {self.order}" if self.strategy else "one GPU"
        return f"{self.mask}, {self.direction}, {where}"


def groups(masks: Sequence[str], strategies: Sequence[str], orders: Sequence[str]) -> list[list[Case]]:
    """The cases that are compiled and measured together: the balanced orders first, beside one device."""
    several = lambda mask, order: [Case(mask, *x, order) for x in itertools.product(DIRECTIONS, strategies)]
    alone = lambda mask, order: [Case(mask, x) for x in DIRECTIONS] if order == orders[0] else []
    return [[*alone(mask, order), *several(mask, order)] for order in orders for mask in masks]


class Bench:
    """The inputs and programs of all cases; without an `implementation`, that which jflex takes."""

    def __init__(self, sizes: dict[str, int], devices: Sequence[jax.Device], implementation: str | None) -> None:
        self.length, self.devices, self.implementation = sizes["length"], devices, implementation
        heads = (sizes[x] for x in ("heads", "kv_heads", "kv_heads", "heads"))
        self._shapes = [(1, self.length, H, sizes["head_size"]) for H in heads]
        self._mesh = jax.make_mesh((len(devices),), ("context",), (jax.sharding.AxisType.Auto,), devices=devices)
        inside = np.random.default_rng(0).choice(np.arange(1, self.length), sizes["documents"] - 1, replace=False)
        ids = np.searchsorted(np.sort(inside), np.arange(self.length), side="right").astype(np.int32)
        mods = (jflex.masks.causal(), jflex.and_masks(jflex.masks.causal(), jflex.masks.document(ids)))
        create = lambda mod: jflex.create_block_mask(mod, None, None, self.length, self.length)
        self.masks = dict(zip(MASKS, map(create, mods), strict=True))

    def shapes(self, case: Case) -> list[jax.ShapeDtypeStruct]:
        """Query, key, value and the cotangent of the output, on the devices of a case."""
        sharding = self._sharding(case)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in self._shapes]

    @functools.cached_property
    def _inputs(self) -> list[jax.Array]:
        """In the natural order, on the first device."""
        with jax.default_device(self.devices[0]):
            keys = jax.random.split(jax.random.key(0), 4)
            return [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, self._shapes, strict=True)]

    def _sharding(self, case: Case) -> jax.sharding.Sharding:
        alone = jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.NamedSharding(self._mesh, _AXES) if case.strategy else alone

    def order(self, mask: str, order: str) -> np.ndarray | None:
        """A permutation of chunks; None for the natural order."""
        count = len(self.devices)
        if order != "balanced":
            return None
        if mask == "causal":
            return context_parallel.zigzag_order(count)
        blocks = self.masks[mask].kv_num_blocks.shape[-1] // (count * _CHUNKS)
        return context_parallel.balanced_order(self.masks[mask], count, chunk_blocks=max(1, blocks))

    def program(self, case: Case) -> jax.stages.Wrapped:
        """A jitted function of the inputs; the mask is a part of it."""
        options: dict[str, Any] = {"block_mask": self.masks[case.mask], "implementation": self.implementation}
        if case.strategy:
            order = self.order(case.mask, case.order)
            options |= {"mesh": self._mesh, "strategy": case.strategy, "order": order}
        call: Callable[..., Any] = jflex.context_parallel_attention if case.strategy else jflex.flex_attention
        attend = lambda q, k, v: call(q, k, v, **options)
        forward = lambda q, k, v, d_out: (attend(q, k, v), ())
        return jax.jit(forward if case.direction == "forward" else forward_and_backward(attend))

    def compiled(self, cases: Sequence[Case]) -> dict[Case, Future[Any]]:
        """The programs of all cases, which are compiled side by side while others are traced."""
        programs: dict[Case, Future[Any]] = {}
        with ThreadPoolExecutor() as pool:
            for case in cases:
                try:
                    programs[case] = pool.submit(self.program(case).lower(*self.shapes(case)).compile)
                except failures() as error:
                    programs[case] = Future()
                    programs[case].set_exception(error)
        return programs

    def placed(self, case: Case) -> list[jax.Array]:
        """The inputs of a case, in its order, on its devices."""
        order = self.order(case.mask, case.order)
        arrays = self._inputs if order is None else [context_parallel.reorder(x, order) for x in self._inputs]
        return jax.block_until_ready([jax.device_put(x, self._sharding(case)) for x in arrays])

    def samples(self, case: Case, results: object) -> list[np.ndarray]:
        """Some rows of results, the same ones for each order."""
        order, rows = self.order(case.mask, case.order), np.arange(0, self.length, max(1, self.length // _SAMPLES) | 1)
        if order is not None:
            rows = np.argsort(context_parallel.positions(order, self.length))[rows]
        return [np.asarray(x[:, rows]).astype(np.float32) for x in jax.tree.leaves(results)]


def _measure(bench: Bench, case: Case, program: Any, runs: int, alone: Result | None) -> Result:
    """Compares a case with one device and times it."""
    name, arrays = case.name(len(bench.devices)), bench.placed(case)
    started = time.perf_counter()
    results = jax.block_until_ready(program(*arrays))
    runs = runs if time.perf_counter() - started < _LONG else min(runs, _LEAST)
    samples = bench.samples(case, results)
    del results
    if alone is not None:
        norms = lambda x, right: np.linalg.norm(x - right) / max(1e-30, float(np.linalg.norm(right)))
        worst = max(map(norms, samples, alone[2]))
        if not worst <= _ERROR:
            return [], [f"{name}: wrong, a relative error of {worst:.3g}; not timed"], samples
    times = time_devices(lambda: program(*arrays), bench.devices if case.strategy else bench.devices[:1], runs)
    remarks = [f"{name}: {times.method}"] * (":" in times.method)
    records = _records(name, times, program.memory_analysis())
    if alone is not None and alone[0]:
        records.append(Record.single(f"{name}: speed-up", alone[0][0].seconds / records[0].seconds, "x"))
    return records, remarks, samples


def _records(name: str, times: Times, memory: Any) -> list[Record]:
    """Records of a case, the time first."""
    records = [
        Record.from_values(f"{name}: time", times.seconds, "s"),
        Record.from_values(f"{name}: wall time", times.wall, "s"),
    ]
    if memory is not None:
        sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
        records.append(Record.single(f"{name}: memory of a GPU, planned by XLA", sum(sizes) / 1e6, "MB"))
    if times.communication and any(x.seconds for x in times.communication):
        spent = [1e3 * x.seconds for x in times.communication]
        records.append(Record.from_values(f"{name}: communication and waits", spent, "ms"))
        records.append(Record.from_values(f"{name}: hidden", [100 * x.hidden for x in times.communication], "%"))
    return records


def context(
    masks: Sequence[str] = MASKS,
    strategies: Sequence[str] = STRATEGIES,
    orders: Sequence[str] = ORDERS,
    length: int = 262144,
    heads: int = 32,
    kv_heads: int = 8,
    head_size: int = 128,
    documents: int = 32,
    devices: int | None = None,
    implementation: str | None = None,
    runs: int = 3,
    limit: float | None = None,
) -> Iterator[Measured]:
    """Speed-up of several GPUs over one, and hidden communication."""
    local, deadline, done = jax.local_devices()[:devices], Deadline(limit), {}
    if len(local) < 2:
        raise SystemExit(f"python -m benchmarks context: it needs two GPUs of one host. JAX found {local}.")
    sizes = {"length": length, "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "documents": documents}
    bench = Bench(sizes, local, implementation)
    shared = {"about": {"title": _TITLE.format(**sizes)}, "machine": {"devices": len(local)}}
    for cases in groups(masks, strategies, orders):
        programs = {} if deadline.over else bench.compiled(cases)
        for case in cases:
            label = f"{case.name(len(local))}: "
            result: Result = [], [f"{label}not measured, the time was over"], []
            if case in programs and not deadline.over:
                try:
                    alone = done.get(Case(case.mask, case.direction)) if case.strategy else None
                    result = done[case] = _measure(bench, case, programs.pop(case).result(), runs, alone)
                except failures() as error:
                    result = [], [f"{label}{describe_error(error)}"], []
            yield Measured(*result[:2], label, **shared)
