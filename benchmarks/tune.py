"""Searches tiles on a GPU and writes them to a table: ``python -m benchmarks tune``.

Every head size has a process of its own, which compiles all configurations of a condition at once and then waits for
the GPU; they run one after another. A time is that of a call: for dkv and dq including the forward, the same for all.

The kernels of Mosaic GPU are searched where `--kernels` names them: ``--kernels forward_sm90 one_pass_sm90``. Their
outputs are compared with those of Triton's, and tiles whose outputs differ are left out. This module alone of the
benchmarks imports internals of kernels.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jflex
from benchmarks.environment import ROOT, describe, gpu_facts
from benchmarks.peers.jax import attention as jax_attention
from benchmarks.problems import Problem, square
from benchmarks.run.check_outputs import mismatch
from benchmarks.run.jax_runner import samples, timer
from benchmarks.run.jobs import Job, exclusive, run_job
from benchmarks.run.timing import failures
from benchmarks.variants import VARIANTS
from pallas_kernels.config import Tiles
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import AttentionSpec, Blocks, Dense, Device, Numerics, Sizes
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.plan import plan as triton_plan
from pallas_kernels.tuning import tables
from pallas_kernels.tuning.tables import HEAD_SIZES, HOPPER_KERNELS, KERNELS, LENGTHS, MODS, OFFICIAL_KERNELS

TABLES = ROOT / "pallas_kernels" / "tuning" / "tables"
EVERY_MOD = (64, 128)  # head sizes that are tuned for every bucket of mods and both lengths
BOTH_LENGTHS = (32, *EVERY_MOD)
# The variants that represent each bucket of mods; where there is none, a mask and no mask.
REPRESENTATIVES = {
    "none": ("causal", "noop"),
    "arithmetic": ("alibi",),
    "functions": ("softcap",),
    "elements": ("pair_bias",),
}
# Names of the kernels; dK and dV of large heads have one each.
_NAMES = {
    "forward_sm90": ("jflex_forward_sm90",),
    "one_pass_sm90": ("jflex_backward_sm90",),
    "dkv_sm90": ("jflex_backward_dkv_sm90", "jflex_backward_dk_sm90"),
    "dq_sm90": ("jflex_backward_dq_sm90",),
}
_RUNS = 5
# Register budget for values live through the mainloop. A thread has 255, and some values are rounded to 16 bits early.
MAX_REGISTERS = 272
_JOB_SECONDS = 24 * 3600.0
_REGISTERS = 240  # of a thread, for what a Hopper kernel holds of a tile; a few of them may spill
_MAX_STAGES = 4
Calls = dict[Tiles, list[Callable[[], Any]]]  # one for each attention of a condition


class Condition(NamedTuple):
    """A kernel, a head size, and buckets of mods and lengths."""

    kernel: str
    head_size: int
    mods: str
    length: str


class Scope(NamedTuple):
    """The conditions to search."""

    kernels: Sequence[str] = KERNELS
    mods: Sequence[str] = MODS
    lengths: Sequence[str] = LENGTHS
    deadline: float = float("inf")  # since 1970; conditions that are not begun keep their old entries

    def conditions(self, head_size: int) -> list[Condition]:
        """Those of a head size."""
        mods = ("none", "arithmetic", "functions", "elements") if head_size in EVERY_MOD else ("none", "elements")
        lengths = ("short", "long") if head_size in BOTH_LENGTHS else ("long",)
        chosen = [x for x in itertools.product(mods, lengths) if x[0] in self.mods and x[1] in self.lengths]
        return [Condition(kernel, head_size, *x) for kernel in self.kernels for x in chosen]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--heads", type=int, nargs="+", default=HEAD_SIZES[:-1], choices=HEAD_SIZES, help="head sizes")
    every = (*KERNELS, *OFFICIAL_KERNELS, *HOPPER_KERNELS)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=every, help="default: Triton's")
    parser.add_argument("--mods", nargs="+", default=MODS, choices=MODS)
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--out", type=pathlib.Path, default=TABLES, help="folder of the table")


def run(options: argparse.Namespace) -> None:
    """Searches what the options name."""
    scope = Scope(options.kernels, options.mods, options.lengths, time.time() + options.budget)
    facts = gpu_facts()
    if "device" not in facts:
        raise SystemExit("`nvidia-smi` finds no GPU.")
    tune(options.heads, scope, facts, options.out)


def tune(heads: Sequence[int], scope: Scope, facts: dict[str, str], folder: pathlib.Path) -> None:
    """Searches all, and writes the table anew after each head size; entries that are not searched are kept."""
    path = folder / f"{tables.table_name(facts['device'])}.json"
    old = json.loads(path.read_text()) if path.exists() else {"entries": []}
    table = {json.dumps(entry["key"]): {"date": old["date"], **entry} for entry in old["entries"]}
    about = describe()
    about["machine"] |= facts
    arguments = [{"head_size": D, "scope": scope} for D in heads]
    jobs = [Job(f"head size {x['head_size']}", __name__, "search", x, seconds=_JOB_SECONDS) for x in arguments]
    with concurrent.futures.ThreadPoolExecutor(len(heads)) as pool:
        waiting = [pool.submit(run_job, job) for job in jobs]
        for done in tqdm(concurrent.futures.as_completed(waiting), total=len(heads), unit="head size", disable=None):
            try:
                entries = done.result()
            except RuntimeError as error:  # the process of this head size failed; the others go on
                tqdm.write(str(error))
                continue
            for entry in entries:
                table[json.dumps(entry["key"])] = entry | {"date": about["date"]}
                tqdm.write(json.dumps(entry))
            write(path, about, list(table.values()))
    print(path)


def write(path: pathlib.Path, about: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Writes a table: one line for each entry."""
    order = sorted(entries, key=lambda entry: tuple(entry["key"].values()))
    lines = ",\n".join("  " + json.dumps(entry) for entry in order)
    head = json.dumps(about, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "entries": [\n{lines}\n ]\n}}\n')


def search(head_size: int, scope: Scope) -> list[dict[str, Any]]:
    """The entries of one head size; runs in a process of its own."""
    entries = []
    for condition in scope.conditions(head_size):
        if time.time() >= scope.deadline:
            break
        calls = _compiled(condition)
        with exclusive():
            right = _correct(condition, calls) if condition.kernel in HOPPER_KERNELS else calls
            if right:
                entries.append(_entry(condition, right))
    return entries


def _compiled(condition: Condition) -> Calls:
    """For each configuration a call for each attention of a condition; without those that the compiler refuses."""
    problems = attentions(condition)
    arrays = [inputs(attention) for attention in problems]

    def compiled(lowered: list[Any]) -> list[Any] | None:
        try:
            return [x.compile() for x in lowered]
        except failures():  # each stage of a compiler has errors of its own
            return None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {}
        for x in configurations(condition.kernel, condition.head_size):
            programs = [program(attention, condition.kernel, x) for attention in problems]
            try:
                lowered = [jax.jit(run).lower(*a) for run, a in zip(programs, arrays, strict=True)]
            except failures():
                continue
            names = _NAMES.get(condition.kernel, ("",))
            if all(any(name in text for name in names) for text in (x.as_text() for x in lowered)):
                futures[x] = pool.submit(compiled, lowered)  # else jflex would take kernels of Triton instead
    programs = {x: future.result() for x, future in futures.items()}
    bind = lambda run, a: lambda: run(*a)
    return {x: [bind(run, a) for run, a in zip(runs, arrays, strict=True)] for x, runs in programs.items() if runs}


def _correct(condition: Condition, calls: Calls) -> Calls:
    """The configurations whose outputs are those of Triton's kernel: a broken kernel may be fast."""
    expected = []
    for attention in attentions(condition):
        run = jax.jit(program(attention, condition.kernel.removesuffix("_sm90"), None))
        expected.append(samples(run(*inputs(attention))))
    agrees = lambda run, right: mismatch(samples(run()), right, "triton") is None
    return {tiles: runs for tiles, runs in calls.items() if all(map(agrees, runs, expected))}


def _entry(condition: Condition, calls: Calls) -> dict[str, Any]:
    by_attention = zip(*(_seconds(attention) for attention in zip(*calls.values(), strict=True)), strict=True)
    times = best_first(dict(zip(calls, map(list, by_attention), strict=True)))
    as_json = lambda tiles, seconds: {"tiles": dataclasses.asdict(tiles), "microseconds": round(seconds * 1e6, 1)}
    kernel, head_size, mods, length = condition
    second = as_json(*times[1]) if len(times) > 1 else None
    key = tables.Key(kernel, head_size, 2, mods, length)._asdict()
    return {"key": key, **as_json(*times[0]), "runner_up": second, "searched": len(times)}


def _seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Median time of each call; they take turns in one profile, since to start one costs as much as all of them."""
    count = 0

    def next_call() -> Any:
        nonlocal count
        count += 1
        return calls[(count - 1) % len(calls)]()

    runs = _RUNS * len(calls)
    seconds = timer().device_seconds(next_call, runs, warmup=len(calls))
    first = (count - runs) % len(calls)  # whose turn it was when measuring began
    return [statistics.median(seconds[(i - first) % len(calls) :: len(calls)]) for i in range(len(calls))]


def best_first(times: dict[Tiles, list[float]]) -> list[tuple[Tiles, float]]:
    """Configurations by the geometric mean of their times."""
    means = {tiles: statistics.geometric_mean(seconds) for tiles, seconds in times.items()}
    return sorted(means.items(), key=lambda item: item[1])


def attentions(condition: Condition) -> list[Problem]:
    """The representatives of a condition; the best tiles have the least geometric mean of their times."""
    B, S = (32, 512) if condition.length == "short" else (4, 4096) if condition.mods == "elements" else (2, 8192)
    H, D = 16 if condition.head_size <= 128 else 8, condition.head_size
    return [square(B, S, H, D, variant) for variant in REPRESENTATIVES[condition.mods]]


def program(problem: Problem, kernel: str, tiles: Tiles | None, *, interpret: bool = False) -> Any:
    """``(query, key, value, d_out, captured, block_mask) -> arrays``: the kernel, after those that it depends on.

    Without tiles it takes those that jflex chooses.
    """
    pass_ = kernel.removesuffix("_sm90").removesuffix("_official")
    of_triton = "official_triton" if kernel in OFFICIAL_KERNELS else "triton"
    implementation = "mosaic_gpu" if kernel in HOPPER_KERNELS else of_triton
    config = jflex.Config(**_tiles_of(kernel, tiles), interpret=interpret)

    def run(query: Any, key: Any, value: Any, d_out: Any, captured: Any, block_mask: Any) -> Any:
        mod = VARIANTS[problem.variant].make(problem, captured, jax_attention.OPERATIONS).score
        attend = lambda query, key, value: jflex.flex_attention(
            query, key, value, mod, block_mask, implementation=implementation, config=config
        )
        if pass_ == "forward":
            return attend(query, key, value)
        if pass_ == "dq":
            return jax.vjp(lambda query: attend(query, key, value), query)[1](d_out)
        if pass_ == "one_pass":
            return jax.vjp(attend, query, key, value)[1](d_out)
        return jax.vjp(lambda *kv: attend(query, *kv), key, value)[1](d_out)

    return run


def _tiles_of(kernel: str, tiles: Tiles | None) -> dict[str, Any]:
    """Fields of `Config`; dkv and dq of Hopper are set together, and the one that is not measured gets any tiles."""
    if tiles is None:
        return {}
    if kernel in ("dkv_sm90", "dq_sm90"):
        idle = jflex.Tiles(64, 64, 4, 2)
        return {"dkv": idle, "dq": idle, kernel.removesuffix("_sm90"): tiles, "deterministic": True}
    return {"dkv" if kernel == "one_pass_sm90" else kernel.removesuffix("_sm90").removesuffix("_official"): tiles}


def inputs(problem: Problem) -> tuple[Any, ...]:
    """Random arrays, the captured ones, and the BlockMask; a bias is as large as the scores, and made on the device."""
    B, S, H, D = problem.B, problem.S, problem.Hq, problem.D
    arrays = jax.random.normal(jax.random.key(0), (4, B, S, H, D), jnp.bfloat16)
    if problem.variant == "pair_bias":
        captured = {"bias": jax.random.normal(jax.random.key(2), (H, S, S), jnp.bfloat16)}
    else:
        captured = jax_attention.mods_of(problem)[1]
    mask = VARIANTS[problem.variant].make(problem, captured, jax_attention.OPERATIONS).mask
    return (*arrays, captured, mask and jflex.create_block_mask(mask, None, None, S, S))


def configurations(kernel: str, head_size: int) -> Iterator[Tiles]:
    """Tiles that may work: 64 rows for wgmma, a second group of 4 warps where there are 64 rows for it."""
    if kernel in HOPPER_KERNELS:
        yield from _hopper_configurations(kernel, head_size)
        return
    kernel = kernel.removesuffix("_official")
    for rows, columns, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
        block_q, block_kv = (columns, rows) if kernel == "dkv" else (rows, columns)
        tiles = Tiles(block_q, block_kv, warps, stages)
        stages_are_right = stages == 1 if head_size > 192 else stages > 1
        needless = (warps == 8 and rows < 128) or (columns < 64 and head_size < 80)
        if stages_are_right and not needless and may_work(kernel, tiles, head_size, head_size, 2):
            yield tiles


def registers(kernel: str, tiles: Tiles, D: int, Dv: int) -> float:
    """Estimated registers of a thread for accumulators, scores and weights.

    >>> registers("forward", Tiles(128, 64, 4, 2), 128, 128)
    224.0
    """
    size, size_v = (sum(width for _, width in chunks(x)) for x in (D, Dv))
    scores = tiles.block_q * tiles.block_kv
    live = {
        "forward": tiles.block_q * size_v + 1.5 * scores,  # the weights live beside the scores, in 16 bits
        "dq": tiles.block_q * size + 2.5 * scores,
        "dkv": tiles.block_kv * (size + size_v) + 2.5 * scores,
    }
    return live[kernel] / (32 * tiles.num_warps)


def may_work(
    kernel: str, tiles: Tiles, D: int, Dv: int, itemsize: int, loads: triton_plan.LoadBytes = triton_plan.NO_LOADS
) -> bool:
    """True if a configuration may fit into the shared memory and registers of Hopper."""
    needed = triton_plan.shared_memory(kernel, tiles, D, Dv, itemsize, loads)
    return needed <= triton_plan.HOPPER_SHARED_MEMORY and registers(kernel, tiles, D, Dv) <= MAX_REGISTERS


def _hopper_configurations(kernel: str, head_size: int) -> Iterator[Tiles]:
    """One or two warp groups, each with 64 rows or 128, that fit into registers and shared memory.

    The backward in one pass takes more registers, so that not all of its tiles compile.
    """
    from pallas_kernels.mosaic_gpu import smem
    from pallas_kernels.mosaic_gpu.backward import dkv, dq, one_pass, walk
    from pallas_kernels.mosaic_gpu.forward import kernel as forward

    loads = LoadGroups((), (), (), (), ())
    by_keys, both_sums = kernel in ("one_pass_sm90", "dkv_sm90"), head_size <= dkv.MAX_HEAD_SIZE_BOTH_SUMS
    shares_keys = kernel == "dkv_sm90" and not both_sums  # two groups, with 64 keys in all
    declare: Callable[..., object] = {
        "forward_sm90": forward.declare,
        "dq_sm90": functools.partial(dq.declare, loads=loads),
        "one_pass_sm90": functools.partial(walk.declare, loads=loads, one_pass=True),
    }.get(kernel, functools.partial(walk.declare, loads=loads))
    sizes = Sizes(B=1, T=1024, S=1024, Hq=1, Hkv=1, D=head_size, Dv=head_size, Bkv=1)
    numerics, memory = Numerics(dtype="bfloat16", scale=1.0), Dense(blocks=Blocks((128, 128), 1, 1))
    spec = AttentionSpec(sizes=sizes, numerics=numerics, device=Device("gpu", "NVIDIA H200"), memory=memory)
    for groups, rows, columns in itertools.product((1, 2), (64, 128), (64, 128)):
        # In one pass a call with its forward pass took 1 to 84 % longer with one group than with two (H200, head sizes
        # 64 to 128), but where two left no room for bias tiles.
        needs_two = shares_keys or kernel == "one_pass_sm90"
        refused = (rows > 64 and kernel != "forward_sm90") or (groups == 1 and needs_two)
        # Registers of a thread for 64 rows: accumulators and scores of 32 bits, probabilities of 16.
        accumulators = head_size if by_keys and both_sums else head_size // 2
        registers = accumulators + (columns // 2 if kernel == "forward_sm90" else columns) + columns // 4
        if refused or groups * rows > 128 or rows // 64 * registers > _REGISTERS:
            continue
        block_q, block_kv = (columns, rows if shares_keys else groups * rows) if by_keys else (groups * rows, columns)
        for stages in range(2, _MAX_STAGES + 1):
            tiles = Tiles(block_q, block_kv, 4 * groups, stages)
            if kernel == "one_pass_sm90" and not (both_sums and one_pass.fits(spec, tiles)):
                continue
            if smem.bytes_of(jax.tree.leaves(declare(spec, tiles, jnp.bfloat16))) <= smem.LIMIT:
                yield tiles
