"""Context parallel attention on the GPUs of this host beside one of them: ``python -m benchmarks context``.

Each strategy computes the same attention as one GPU, in a balanced order of the tokens and in the natural one. The
programs of a mask and an order are compiled first; then each is compared with one GPU and timed.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Deadline
from benchmarks.run.timing import describe_error, failures

if TYPE_CHECKING:
    import jax

    from benchmarks.run.several_devices import Times

MASKS = ("causal", "documents")
ORDERS = ("balanced", "natural")
STRATEGIES = ("ring", "all_gather", "ulysses")
DIRECTIONS = ("forward", "forward and backward")
RUNS = 3
_COLLECTIVES = {"ring": "collective-permute", "all_gather": "all-gather", "ulysses": "all-to-all"}
_SAMPLES = 509  # rows that are compared; a prime, so that no block is left out
_ERROR = 0.02  # relative, of bfloat16 results that were summed in another order
_LONG, _LEAST = 2.0, 2  # seconds of a long call, and its repetitions
_CONTEXT = (None, "context")  # axes of batch and tokens


class Sizes(NamedTuple):
    """Sizes of the attention, in bfloat16."""

    length: int = 262144
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    documents: int = 32
    chunks: int = 16  # of a device in the balanced order of documents

    @property
    def title(self) -> str:
        return (
            f"causal attention and {self.documents} packed causal documents of uneven lengths on several GPUs of one "
            f"host beside one of them; B 1, S {self.length}, H {self.heads}/{self.kv_heads}, D {self.head_size}, "
            "bfloat16. Time: of the GPU that works longest; a wait for another one is communication. Hidden: the share "
            "of the time of collectives in which other kernels ran on the same GPU"
        )


class Case(NamedTuple):
    """One program."""

    mask: str
    direction: str
    strategy: str = ""  # "" for one device
    order: str = ""

    def name(self, count: int) -> str:
        """Prefix of its records.

        >>> Case("causal", "forward").name(2), Case("causal", "forward", "ring", "balanced").name(2)
        ('causal, forward, one GPU', 'causal, forward, 2 GPUs, ring, balanced')
        """
        where = f"{count} GPUs, {self.strategy}, {self.order}" if self.strategy else "one GPU"
        return f"{self.mask}, {self.direction}, {where}"


def groups(masks: Sequence[str], strategies: Sequence[str], orders: Sequence[str]) -> list[list[Case]]:
    """The cases that are compiled and measured together: the balanced orders first, beside one device."""
    several = lambda mask, order: [Case(mask, *x, order) for x in itertools.product(DIRECTIONS, strategies)]
    alone = lambda mask, order: [Case(mask, x) for x in DIRECTIONS] if order == orders[0] else []
    return [[*alone(mask, order), *several(mask, order)] for order in orders for mask in masks]


class Bench:
    """The inputs and programs of all cases; without an `implementation`, that which jflex takes."""

    def __init__(self, sizes: Sizes, devices: Sequence[jax.Device], implementation: str | None) -> None:
        import jax

        self.sizes, self.devices, self.implementation = sizes, devices, implementation
        kinds = (jax.sharding.AxisType.Auto,)
        self._mesh = jax.make_mesh((len(devices),), ("context",), kinds, devices=devices)

    def shapes(self, case: Case) -> list[jax.ShapeDtypeStruct]:
        """Query, key, value and the cotangent of the output, on the devices of a case."""
        import jax
        import jax.numpy as jnp

        length, heads, kv_heads, head_size, *_ = self.sizes
        shapes = [(1, length, H, head_size) for H in (heads, kv_heads, kv_heads, heads)]
        return [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=self._sharding(case)) for x in shapes]

    @functools.cached_property
    def _inputs(self) -> list[jax.Array]:
        """In the natural order, on the first device."""
        import jax

        with jax.default_device(self.devices[0]):
            keys, shapes = jax.random.split(jax.random.key(0), 4), self.shapes(Case("", ""))
            return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]

    def _sharding(self, case: Case) -> jax.sharding.Sharding:
        import jax

        if not case.strategy:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.NamedSharding(self._mesh, jax.P(*_CONTEXT))

    @functools.cached_property
    def masks(self) -> dict[str, Any]:
        """The BlockMask of each name."""
        import jflex

        length = self.sizes.length
        inside = np.random.default_rng(0).choice(np.arange(1, length), self.sizes.documents - 1, replace=False)
        ids = np.searchsorted(np.sort(inside), np.arange(length), side="right").astype(np.int32)
        mods = (jflex.masks.causal(), jflex.and_masks(jflex.masks.causal(), jflex.masks.document(ids)))
        masks = (jflex.create_block_mask(mod, None, None, length, length) for mod in mods)
        return dict(zip(MASKS, masks, strict=True))

    def order(self, mask: str, order: str) -> np.ndarray | None:
        """A permutation of chunks; None for the natural order."""
        from jflex import context_parallel

        count = len(self.devices)
        if order != "balanced":
            return None
        if mask == "causal":
            return context_parallel.zigzag_order(count)
        blocks = self.masks[mask].kv_num_blocks.shape[-1] // (count * self.sizes.chunks)
        return context_parallel.balanced_order(self.masks[mask], count, chunk_blocks=max(1, blocks))

    def program(self, case: Case) -> jax.stages.Wrapped:
        """A jitted function of the inputs; the mask is a part of it."""
        import jax

        import jflex
        from benchmarks.peers.jax.attention import forward_and_backward

        options: dict[str, Any] = {"block_mask": self.masks[case.mask], "implementation": self.implementation}
        if case.strategy:
            order = self.order(case.mask, case.order)
            options |= {"mesh": self._mesh, "strategy": case.strategy, "order": order}
        call: Callable[..., Any] = jflex.context_parallel_attention if case.strategy else jflex.flex_attention
        attend = lambda q, k, v: call(q, k, v, **options)
        forward = lambda q, k, v, d_out: (attend(q, k, v), ())
        return jax.jit(forward if case.direction == "forward" else forward_and_backward(attend))

    def placed(self, case: Case) -> list[jax.Array]:
        """The inputs of a case, in its order, on its devices."""
        import jax

        from jflex import context_parallel

        order = self.order(case.mask, case.order)
        arrays = self._inputs if order is None else [context_parallel.reorder(x, order) for x in self._inputs]
        return jax.block_until_ready([jax.device_put(x, self._sharding(case)) for x in arrays])

    def samples(self, case: Case, results: object) -> list[np.ndarray]:
        """Some rows of results, the same ones for each order."""
        import jax

        from jflex import context_parallel

        order, length = self.order(case.mask, case.order), self.sizes.length
        rows = np.arange(0, length, max(1, length // _SAMPLES) | 1)
        if order is not None:
            rows = np.argsort(context_parallel.positions(order, length))[rows]
        return [np.asarray(x[:, rows]).astype(np.float32) for x in jax.tree.leaves(results)]

    def collective(self, strategy: str) -> tuple[Callable[[], jax.Array], int]:
        """A call that only sends keys and values, and the bytes that a device sends."""
        import jax
        import jax.numpy as jnp

        n, size, mesh, axes = len(self.devices), self.sizes, self._mesh, jax.P(*_CONTEXT)
        shape = (2, size.length, size.kv_heads, size.head_size)
        x = jax.device_put(jnp.ones(shape, jnp.bfloat16), jax.NamedSharding(mesh, axes))
        shard, ring = x.nbytes // n, [(i, (i + 1) % n) for i in range(n)]
        send, out, sent = {
            "ring": (lambda x: jax.lax.ppermute(x, "context", ring), axes, shard),
            "all_gather": (lambda x: jax.lax.all_gather(x, "context", axis=1, tiled=True), jax.P(), (n - 1) * shard),
            "ulysses": (
                lambda x: jax.lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True),
                jax.P(None, None, "context"),
                (n - 1) * shard // n,
            ),
        }[strategy]
        program = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=axes, out_specs=out, check_vma=False))
        return functools.partial(program, x), sent


def compiled(bench: Bench, cases: Sequence[Case]) -> dict[Case, Future[Any]]:
    """The programs of all cases, which are compiled side by side while others are traced."""
    programs: dict[Case, Future[Any]] = {}
    with ThreadPoolExecutor() as pool:
        for case in cases:
            try:
                programs[case] = pool.submit(bench.program(case).lower(*bench.shapes(case)).compile)
            except failures() as error:
                programs[case] = Future()
                programs[case].set_exception(error)
    return programs


class _Result(NamedTuple):
    records: list[Record]
    remarks: list[str]
    samples: list[np.ndarray]


def _measure(bench: Bench, case: Case, program: Any, runs: int, alone: _Result | None) -> _Result:
    """Compares a case with one device and times it."""
    import jax

    from benchmarks.run.several_devices import measure

    name, arrays, remarks = case.name(len(bench.devices)), bench.placed(case), []
    started = time.perf_counter()
    results = jax.block_until_ready(program(*arrays))
    runs = runs if time.perf_counter() - started < _LONG else min(runs, _LEAST)
    samples = bench.samples(case, results)
    del results
    if alone is not None:
        worst = max(map(_relative_error, samples, alone.samples))
        if not worst <= _ERROR:
            return _Result([], [f"{name}: wrong, a relative error of {worst:.3g}; not timed"], samples)
    devices = bench.devices if case.strategy else bench.devices[:1]
    times = measure(lambda: program(*arrays), devices, runs)
    if times.method.count(":"):
        remarks.append(f"{name}: {times.method}")
    records = _records(name, times, program.memory_analysis())
    if alone is not None and alone.records:
        ratio = alone.records[0].value.median / records[0].value.median
        records.append(Record.from_values(f"{name}: speed-up", [ratio], "x"))
    return _Result(records, remarks, samples)


def _relative_error(array: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(array - expected) / max(1e-30, float(np.linalg.norm(expected))))


def _records(name: str, times: Times, memory: Any) -> list[Record]:
    """Records of a case, the time first."""
    records = [
        Record.from_values(f"{name}: time", times.seconds, "s"),
        Record.from_values(f"{name}: wall time", times.wall, "s"),
    ]
    if memory is not None:
        sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
        records.append(Record.single(f"{name}: memory of a GPU, planned by XLA", round(sum(sizes) / 1e6, 1), "MB"))
    if times.communication and any(x.seconds for x in times.communication):
        spent = [1e3 * x.seconds for x in times.communication]
        records.append(Record.from_values(f"{name}: communication and waits", spent, "ms"))
        records.append(Record.from_values(f"{name}: hidden", [100 * x.hidden for x in times.communication], "%"))
    return records


def rates(bench: Bench, strategies: Sequence[str], runs: int) -> Measured:
    """The rate of each collective alone."""
    import jax

    from benchmarks.run.several_devices import measure

    records = []
    try:
        for strategy in strategies:
            send, sent = bench.collective(strategy)
            jax.block_until_ready(send())
            times = measure(send, bench.devices, runs)
            name = f"{len(bench.devices)} GPUs, {_COLLECTIVES[strategy]} alone: sent by each"
            records.append(Record.from_values(name, [sent / x / 1e9 for x in times.seconds], "GB/s"))
    except failures() as error:
        return Measured(records, [f"collectives alone: {describe_error(error)}"], "collectives alone: ")
    return Measured(records, [], "collectives alone: ")


def work(bench: Bench, masks: Sequence[str], orders: Sequence[str]) -> Measured:
    """Balance of the visited blocks in each order."""
    from jflex import context_parallel

    records, n = [], len(bench.devices)
    for mask, order in itertools.product(masks, orders):
        costs = context_parallel.device_costs(bench.masks[mask], n, bench.order(mask, order))
        name = f"{mask}, {n} GPUs, {order}: blocks of the GPU with most over the mean"
        records.append(Record.from_values(name, [float(costs.max() / costs.mean())], "x"))
    return Measured(records)


def context(
    masks: Sequence[str],
    strategies: Sequence[str],
    orders: Sequence[str],
    devices: int | None,
    implementation: str | None,
    runs: int,
    limit: float | None,
    **sizes: int,
) -> Iterator[Measured]:
    """Speed-up of several GPUs over one, and hidden communication."""
    import jax

    local = jax.local_devices()[:devices]
    if len(local) < 2:
        raise SystemExit(f"python -m benchmarks context: it needs two GPUs of one host. JAX found {local}.")
    bench, deadline, done = Bench(Sizes(**sizes), local, implementation), Deadline(limit), {}
    shared = {"about": {"title": bench.sizes.title}, "machine": {"devices": len(local)}}
    yield work(bench, masks, orders)._replace(**shared)
    yield rates(bench, strategies, runs)._replace(**shared)
    for cases in groups(masks, strategies, orders):
        programs = {} if deadline.over else compiled(bench, cases)
        for case in cases:
            result = _Result([], [f"{case.name(len(local))}: not measured, the time was over"], [])
            if case in programs and not deadline.over:
                try:
                    alone = done.get(Case(case.mask, case.direction)) if case.strategy else None
                    result = done[case] = _measure(bench, case, programs.pop(case).result(), runs, alone)
                except failures() as error:
                    result = _Result([], [f"{case.name(len(local))}: {describe_error(error)}"], [])
            yield Measured(result.records, result.remarks, f"{case.name(len(local))}: ", **shared)
