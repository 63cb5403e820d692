"""Context parallel attention on the GPUs of this host beside one of them: ``python -m benchmarks context``.

Each strategy computes the same attention as one GPU, in a balanced order of the tokens and in the natural one. The
programs of a mask and an order are compiled first; then each is compared with one GPU and timed. The file is written
after each of them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.results import schema
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Deadline
from benchmarks.run.timing import describe_error, failures

if TYPE_CHECKING:
    from benchmarks.run.several_devices import Times

MASKS = ("causal", "documents")
ORDERS = ("balanced", "natural")
STRATEGIES = ("ring", "all_gather", "ulysses")
DIRECTIONS = ("forward", "forward and backward")
COLLECTIVES = {"ring": "collective-permute", "all_gather": "all-gather", "ulysses": "all-to-all"}
_SAMPLES = 509  # rows that are compared; a prime, so that no block is left out
_ERROR = 0.02  # relative, of bfloat16 results that were summed in another order
_RUNS, _LEAST = 3, 2  # repetitions, and those of a call that takes longer than `_LONG`
_LONG = 2.0  # seconds


class Sizes(NamedTuple):
    """Of the attention, in bfloat16."""

    length: int = 262144
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    documents: int = 32
    chunks: int = 16  # of a device in the balanced order of documents

    @property
    def title(self) -> str:
        """In words."""
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
        """Of its records.

        >>> Case("causal", "forward").name(2), Case("causal", "forward", "ring", "balanced").name(2)
        ('causal, forward, one GPU', 'causal, forward, 2 GPUs, ring, balanced')
        """
        where = f"{count} GPUs, {self.strategy}, {self.order}" if self.strategy else "one GPU"
        return f"{self.mask}, {self.direction}, {where}"

    @property
    def alone(self) -> Case:
        """The same on one device."""
        return Case(self.mask, self.direction)


def groups(masks: Sequence[str], strategies: Sequence[str], orders: Sequence[str]) -> list[list[Case]]:
    """The cases that are compiled and measured together: the balanced orders first, beside one device."""
    several = lambda mask, order: [Case(mask, *x, order) for x in itertools.product(DIRECTIONS, strategies)]
    alone = lambda mask, order: [Case(mask, x) for x in DIRECTIONS] if order == orders[0] else []
    return [[*alone(mask, order), *several(mask, order)] for order in orders for mask in masks]


class Bench:
    """The inputs and programs of all cases.

    Args:
      sizes: Of the attention.
      devices: All of them.
      implementation: Of the kernels; None for that which jflex takes.
    """

    def __init__(self, sizes: Sizes, devices: Sequence[Any], implementation: str | None) -> None:
        import jax

        self.sizes, self.devices, self.implementation = sizes, devices, implementation
        kinds = (jax.sharding.AxisType.Auto,)
        self._mesh = jax.make_mesh((len(devices),), ("context",), kinds, devices=devices)

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """Query, key, value and the cotangent of the output, on the first device, in the natural order."""
        import jax
        import jax.numpy as jnp

        with jax.default_device(self.devices[0]):
            keys = jax.random.split(jax.random.key(0), 4)
            return [jax.random.normal(key, x.shape, jnp.bfloat16) for key, x in zip(keys, self.shapes(), strict=True)]

    def shapes(self, case: Case | None = None) -> list[Any]:
        """Of the inputs; of a case, on its devices."""
        import jax
        import jax.numpy as jnp

        place = None if case is None else self.place(case)
        size = self.sizes
        shape = lambda heads: (1, size.length, heads, size.head_size)
        each = (size.heads, size.kv_heads, size.kv_heads, size.heads)
        return [jax.ShapeDtypeStruct(shape(heads), jnp.bfloat16, sharding=place) for heads in each]

    def place(self, case: Case) -> Any:
        """How the tokens lie on the devices of a case."""
        import jax

        if not case.strategy:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.NamedSharding(self._mesh, jax.P(None, "context"))

    def devices_of(self, case: Case) -> Sequence[Any]:
        """The devices of a case."""
        return self.devices if case.strategy else self.devices[:1]

    @functools.cached_property
    def masks(self) -> dict[str, Any]:
        """The BlockMask of each name."""
        import jflex

        length = self.sizes.length
        inside = np.random.default_rng(0).choice(np.arange(1, length), self.sizes.documents - 1, replace=False)
        ids = np.searchsorted(np.sort(inside), np.arange(length), side="right").astype(np.int32)
        mods = (jflex.masks.causal(), jflex.and_masks(jflex.masks.causal(), jflex.masks.document(ids)))
        made = (jflex.create_block_mask(mod, None, None, length, length) for mod in mods)
        return dict(zip(MASKS, made, strict=True))

    def order(self, mask: str, order: str) -> np.ndarray | None:
        """A permutation of chunks; None for the natural order."""
        from jflex import context_parallel

        count = len(self.devices)
        if order == "natural":
            return None
        if mask == "causal":
            return context_parallel.zigzag_order(count)
        blocks = self.masks[mask].kv_num_blocks.shape[-1] // (count * self.sizes.chunks)
        return context_parallel.balanced_order(self.masks[mask], count, chunk_blocks=max(1, blocks))

    def program(self, case: Case) -> Any:
        """A jitted function of the inputs; the mask is a part of it."""
        import jax

        import jflex
        from benchmarks.peers.jax_peers import forward_and_backward

        options: dict[str, Any] = {"block_mask": self.masks[case.mask], "implementation": self.implementation}
        if case.strategy:
            options |= {"mesh": self._mesh, "strategy": case.strategy}
            options |= {"order": self.order(case.mask, case.order)}
        call: Callable[..., Any] = jflex.context_parallel_attention if case.strategy else jflex.flex_attention
        attend = lambda q, k, v: call(q, k, v, **options)
        forward = lambda q, k, v, d_out: (attend(q, k, v), ())
        return jax.jit(forward if case.direction == "forward" else forward_and_backward(attend))

    def placed(self, case: Case) -> list[Any]:
        """The inputs of a case, in its order, on its devices."""
        import jax

        from jflex import context_parallel

        order = self.order(case.mask, case.order) if case.strategy else None
        arrays = self.inputs if order is None else [context_parallel.reorder(x, order) for x in self.inputs]
        return jax.block_until_ready([jax.device_put(x, self.place(case)) for x in arrays])

    def samples(self, case: Case, results: Any) -> list[np.ndarray]:
        """Some rows of results, the same ones for each order."""
        import jax

        from jflex import context_parallel

        order, length = self.order(case.mask, case.order) if case.strategy else None, self.sizes.length
        rows = np.arange(0, length, max(1, length // _SAMPLES) | 1)
        if order is not None:
            rows = np.argsort(context_parallel.positions(order, length))[rows]
        return [np.asarray(x[:, rows]).astype(np.float32) for x in jax.tree.leaves(results)]

    def collective(self, strategy: str) -> tuple[Any, list[Any], int]:
        """A program that only sends keys and values, its arguments, and the bytes that a device sends."""
        import jax
        import jax.numpy as jnp

        n, size, mesh = len(self.devices), self.sizes, self._mesh
        shape = (2, size.length, size.kv_heads, size.head_size)
        x = jax.device_put(jnp.ones(shape, jnp.bfloat16), jax.NamedSharding(mesh, jax.P(None, "context")))
        ring = [(i, (i + 1) % n) for i in range(n)]
        send = {
            "ring": lambda x: jax.lax.ppermute(x, "context", ring),
            "all_gather": lambda x: jax.lax.all_gather(x, "context", axis=1, tiled=True),
            "ulysses": lambda x: jax.lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True),
        }[strategy]
        heads = "context" if strategy == "ulysses" else None
        spec = jax.P(None, "context") if strategy == "ring" else jax.P(None, None, heads)
        mapped = jax.shard_map(send, mesh=mesh, in_specs=jax.P(None, "context"), out_specs=spec, check_vma=False)
        own = x.nbytes // n
        return jax.jit(mapped), [x], {"ring": own, "all_gather": (n - 1) * own, "ulysses": (n - 1) * own // n}[strategy]


def compiled(bench: Bench, chosen: Sequence[Case]) -> dict[Case, Future[Any]]:
    """The programs of all cases, which are compiled side by side while others are traced."""
    found: dict[Case, Future[Any]] = {}
    with ThreadPoolExecutor() as pool:
        for case in chosen:
            try:
                found[case] = pool.submit(bench.program(case).lower(*bench.shapes(case)).compile)
            except failures() as error:
                found[case] = Future()
                found[case].set_exception(error)
    return found


class Measured(NamedTuple):
    """Of one case."""

    records: list[Record]
    samples: list[np.ndarray]
    seconds: float


def measured(bench: Bench, case: Case, program: Any, runs: int, alone: Measured | None) -> tuple[Measured, list[str]]:
    """Compares a case with one device and times it.

    Returns:
      The records, and remarks.
    """
    import jax

    from benchmarks.run.several_devices import measure

    name, arrays, remarks = case.name(len(bench.devices)), bench.placed(case), []
    started = time.perf_counter()
    results = jax.block_until_ready(program(*arrays))
    runs = runs if time.perf_counter() - started < _LONG else min(runs, _LEAST)
    samples = bench.samples(case, results)
    del results
    if alone is not None:
        errors = map(_relative_error, samples, alone.samples)
        if (worst := max(errors)) > _ERROR or not np.isfinite(worst):
            return Measured([], samples, 0.0), [f"{name}: wrong, a relative error of {worst:.3g}; not timed"]
    times = measure(lambda: program(*arrays), bench.devices_of(case), runs)
    if times.method.count(":"):
        remarks.append(f"{name}: {times.method}")
    records = _records(name, times, program.memory_analysis())
    seconds = records[0].value.median
    if alone is not None and alone.seconds:
        records.append(Record.of(f"{name}: speed-up", [alone.seconds / seconds], "x"))
    return Measured(records, samples, seconds), remarks


def _relative_error(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(found - right) / max(1e-30, float(np.linalg.norm(right))))


def _records(name: str, times: Times, memory: Any) -> list[Record]:
    """The first one is the time."""
    records = [Record.of(f"{name}: time", times.seconds, "s"), Record.of(f"{name}: wall time", times.wall, "s")]
    if memory is not None:
        sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
        records.append(Record.single(f"{name}: memory of a GPU, planned by XLA", round(sum(sizes) / 1e6, 1), "MB"))
    if times.communication and any(x.seconds for x in times.communication):
        spent = [1e3 * x.seconds for x in times.communication]
        records.append(Record.of(f"{name}: communication and waits", spent, "ms"))
        records.append(Record.of(f"{name}: hidden", [100 * x.hidden for x in times.communication], "%"))
    return records


def rates(bench: Bench, strategies: Sequence[str], runs: int) -> list[Record]:
    """What the links give to each collective alone."""
    import jax

    from benchmarks.run.several_devices import measure

    records, n = [], len(bench.devices)
    for strategy in strategies:
        program, arguments, sent = bench.collective(strategy)
        send = functools.partial(program, *arguments)
        jax.block_until_ready(send())
        times = measure(send, bench.devices, runs)
        name = f"{n} GPUs, {COLLECTIVES[strategy]} alone: sent by each"
        records.append(Record.of(name, [sent / x / 1e9 for x in times.seconds], "GB/s"))
    return records


def work(bench: Bench, masks: Sequence[str], orders: Sequence[str]) -> list[Record]:
    """How evenly the orders divide the visited blocks."""
    from jflex import context_parallel

    records, n = [], len(bench.devices)
    for mask, order in itertools.product(masks, orders):
        costs = context_parallel.device_costs(bench.masks[mask], n, bench.order(mask, order))
        name = f"{mask}, {n} GPUs, {order}: blocks of the GPU with most over the mean"
        records.append(Record.of(name, [float(costs.max() / costs.mean())], "x"))
    return records


Write = Callable[[list[Record], list[str]], object]


def run(bench: Bench, chosen: Sequence[Sequence[Case]], runs: int, deadline: Deadline, write: Write) -> None:
    """Measures all cases, and writes the records and remarks after each."""
    of = lambda field: list(dict.fromkeys(getattr(x, field) for group in chosen for x in group if x.strategy))
    remarks, done = [], {}
    records = work(bench, of("mask"), of("order"))
    try:
        records += rates(bench, of("strategy"), runs)
    except failures() as error:
        remarks.append(f"collectives alone: {describe_error(error)}")
    write(records, remarks)
    for group in chosen:
        started = time.perf_counter()
        programs = {} if deadline.over else compiled(bench, group)
        print(f"{len(programs)} programs compiled in {time.perf_counter() - started:.1f} s", flush=True)
        for case in group:
            name = case.name(len(bench.devices))
            if case not in programs or deadline.over:
                remarks.append(f"{name}: not measured, the time was over")
                continue
            try:
                alone = done.get(case.alone) if case.strategy else None
                done[case], more = measured(bench, case, programs.pop(case).result(), runs, alone)
                records, remarks = records + done[case].records, remarks + more
            except failures() as error:
                remarks.append(f"{name}: {describe_error(error)}")
            write(records, remarks)
    write(records, remarks)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    options = _parsed(words)
    import jax

    devices = jax.local_devices()[: options.devices]
    if len(devices) < 2:
        raise SystemExit(f"python -m benchmarks context: it needs two GPUs of one host. JAX found {devices}.")
    machine: dict[str, Any] = gpu_facts() if devices[0].platform == "gpu" else {}
    path = (options.out or schema.FOLDER / results_folder(machine.get("device", "cpu"))) / "context.json"
    sizes = Sizes(options.length, options.heads, options.kv_heads, options.head_size, options.documents, options.chunks)
    bench = Bench(sizes, devices, options.implementation)
    old = schema.read(path) if options.add else None

    def write(records: list[Record], remarks: list[str]) -> None:
        about = {"title": sizes.title, "machine": machine | {"devices": len(devices)}, "remarks": remarks}
        about |= {"before": schema.runs_of(old)} if old is not None else {}
        schema.write(path, schema.merged(old, records), about)
        lines = [*(f"{x.name}: {x.value.median:g} {x.unit}" for x in records), *remarks]
        print("\n".join(line for line in lines if line not in shown), flush=True)
        shown.update(lines)

    shown: set[str] = set()
    chosen = groups(options.masks, options.strategies, options.orders)
    run(bench, chosen, options.runs, Deadline(options.limit), write)
    print(path)


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks context", description=__doc__)
    for name, known in (("masks", MASKS), ("strategies", STRATEGIES), ("orders", ORDERS)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=list(known))
    for field, default in Sizes._field_defaults.items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--devices", type=int, help="so many of the host's; default: all")
    parser.add_argument("--implementation", help="default: that which jflex takes")
    parser.add_argument("--runs", type=int, default=_RUNS, help=f"repetitions; default: {_RUNS}, two of a long call")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin nothing after so many; default: no limit")
    parser.add_argument("--add", action="store_true", help="keep earlier records that are not measured again")
    where = "write DIR/context.json; default: benchmarks/results/<device>"
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help=where)
    return parser.parse_args(words)
