"""Searches tiles on a GPU and writes them to a table: ``python -m benchmarks tune``.

Every head size has a process of its own, which compiles all configurations of a condition at once and then waits for
the GPU; they run one after another. A time is that of a call: for dkv and dq including the forward, the same for all.

The kernels of Mosaic GPU are searched where `--kernels` names them: ``--kernels forward_sm90 one_pass_sm90``. Their
outputs are compared with those of Triton's, and tiles whose outputs differ are left out.

On a machine without a GPU, ``--prune FILE`` compiles Triton's configurations for an H200 and writes those whose
registers spill little; ``--candidates FILE`` then searches only these. ``--dry-run`` lists what would be searched.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from benchmarks import search_space
from benchmarks.environment import ROOT, describe, gpu_facts
from benchmarks.run.check_outputs import mismatch
from benchmarks.run.jax_runner import samples, timer
from benchmarks.run.jobs import Job, exclusive, run_job
from benchmarks.run.timing import failures
from benchmarks.search_space import (
    HEAD_SIZES,
    HOPPER_KERNELS,
    KERNELS,
    LENGTHS,
    MODS,
    OFFICIAL_KERNELS,
    Tiles,
    table_name,
)

TABLES = ROOT / "pallas_kernels" / "tuning" / "tables"
MAX_SPILLED = 512  # bytes of a thread; 128 x 64 at head size 128 spills 230 and is the fastest forward kernel there
_RUNS = 5
_JOB_SECONDS = 24 * 3600.0
# Names of the kernels; dK and dV of large heads have one each.
_NAMES = {
    "forward_sm90": ("jflex_forward_sm90",),
    "one_pass_sm90": ("jflex_backward_sm90",),
    "dkv_sm90": ("jflex_backward_dkv_sm90", "jflex_backward_dk_sm90"),
    "dq_sm90": ("jflex_backward_dq_sm90",),
}
Calls = dict[Tiles, list[Callable[[], Any]]]  # one for each attention of a condition


class Scope(NamedTuple):
    """The conditions to search."""

    kernels: Sequence[str] = KERNELS
    mods: Sequence[str] = MODS
    lengths: Sequence[str] = LENGTHS
    allowed: dict[str, Any] | None = None  # what `--prune` wrote, or None for all configurations
    deadline: float = float("inf")  # since 1970; conditions that are not begun keep their old entries

    def conditions(self, head_size: int) -> list[tuple[str, str, str]]:
        """Kernels, buckets of mods and lengths."""
        chosen = [(x, y) for x, y in search_space.conditions(head_size) if x in self.mods and y in self.lengths]
        return [(kernel, *condition) for kernel in self.kernels for condition in chosen]

    def configurations(self, head_size: int, kernel: str, mods: str) -> list[Tiles]:
        """Configurations that are compiled and timed."""
        tiles = list(search_space.configurations(kernel, head_size))
        if self.allowed is None or kernel not in KERNELS:
            return tiles
        kept = {tuple(x) for x in self.allowed[_name(kernel, head_size, mods)]}
        return [x for x in tiles if dataclasses.astuple(x) in kept]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--heads", type=int, nargs="+", default=HEAD_SIZES[:-1], choices=HEAD_SIZES, help="head sizes")
    every = (*KERNELS, *OFFICIAL_KERNELS, *HOPPER_KERNELS)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=every, help="default: Triton's")
    parser.add_argument("--mods", nargs="+", default=MODS, choices=MODS)
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--dry-run", action="store_true", help="list what would be searched, and stop")
    parser.add_argument("--prune", type=pathlib.Path, help="compile for an H200, write what may be searched, stop")
    parser.add_argument("--candidates", type=pathlib.Path, help="a file that --prune wrote")
    parser.add_argument("--out", type=pathlib.Path, default=TABLES, help="folder of the table")


def run(options: argparse.Namespace) -> None:
    """Searches, prunes or lists what the options name."""
    allowed = json.loads(options.candidates.read_text()) if options.candidates else None
    scope = Scope(options.kernels, options.mods, options.lengths, allowed, time.time() + options.budget)
    if options.dry_run:
        print(plan(options.heads, scope))
        return
    if options.prune and not set(options.kernels) <= set(KERNELS):
        raise SystemExit(f"`--prune` compiles kernels of Triton by Pallas: {', '.join(KERNELS)}")
    if options.prune:
        options.prune.write_text(json.dumps(prune(options.heads, scope), indent=1) + "\n")
        return
    facts = gpu_facts()
    if "device" not in facts:
        raise SystemExit("no GPU was found; `--prune FILE` and `--dry-run` work without one")
    tune(options.heads, scope, facts, options.out)


def plan(heads: Sequence[int], scope: Scope) -> str:
    """The configurations of each condition."""
    lines, total = [], 0
    for head_size in heads:
        for kernel, mods, length in scope.conditions(head_size):
            tiles = scope.configurations(head_size, kernel, mods)
            total += len(tiles) * len(search_space.attentions(head_size, mods, length))
            words = ", ".join(str(dataclasses.astuple(x)) for x in tiles)
            lines.append(f"{kernel} {head_size} {mods} {length}: {words}")
    return "\n".join([*lines, f"{total} programs"])


def tune(heads: Sequence[int], scope: Scope, facts: dict[str, str], folder: pathlib.Path) -> None:
    """Searches all, and writes the table anew after each head size; entries that are not searched are kept."""
    path = folder / f"{table_name(facts['device'])}.json"
    old = json.loads(path.read_text()) if path.exists() else {"entries": []}
    table = {json.dumps(entry["key"]): {"date": old["date"], **entry} for entry in old["entries"]}
    about = describe()
    about["machine"] |= facts
    arguments = [{"head_size": D, "scope": scope._asdict()} for D in heads]
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
                tqdm.write(_line(entry))
            write(path, about, list(table.values()))
    print(path)


def write(path: pathlib.Path, about: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Writes a table: one line for each entry."""
    order = sorted(entries, key=lambda entry: tuple(entry["key"].values()))
    lines = ",\n".join("  " + json.dumps(entry) for entry in order)
    head = json.dumps(about, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "entries": [\n{lines}\n ]\n}}\n')


def _line(entry: dict[str, Any]) -> str:
    words = " ".join(str(x) for x in entry["key"].values())
    second = entry["runner_up"]
    best = f"{tuple(entry['tiles'].values())} {entry['microseconds']} us"
    then = f", then {tuple(second['tiles'].values())} {second['microseconds']} us" if second else ""
    return f"{words}: {best}{then}"


def search(head_size: int, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of one head size; runs in a process of its own, with the fields of a `Scope`."""
    searched = Scope(**scope)
    entries = []
    for condition in searched.conditions(head_size):
        if time.time() >= searched.deadline:
            break
        calls = _compiled(head_size, condition, searched)
        with exclusive():
            right = _correct(head_size, condition, calls) if condition[0] in HOPPER_KERNELS else calls
            if right:
                entries.append(_entry(head_size, condition, right))
    return entries


def _compiled(head_size: int, condition: tuple[str, str, str], scope: Scope) -> Calls:
    """For each configuration a call for each attention of a condition; without those that the compiler refuses."""
    kernel, mods, length = condition
    tiles = scope.configurations(head_size, kernel, mods)
    attentions = search_space.attentions(head_size, mods, length)
    arrays = [search_space.inputs(attention) for attention in attentions]

    def compiled(lowered: list[Any]) -> list[Any] | None:
        try:
            return [x.compile() for x in lowered]
        except failures():  # each stage of a compiler has errors of its own
            return None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {}
        for x in tiles:
            programs = [search_space.program(attention, kernel, x) for attention in attentions]
            try:
                lowered = [jax.jit(run).lower(*a) for run, a in zip(programs, arrays, strict=True)]
            except failures():
                continue
            if not all(_runs(kernel, program.as_text()) for program in lowered):
                continue  # jflex would take kernels of Triton instead
            futures[x] = pool.submit(compiled, lowered)
    programs = {x: future.result() for x, future in futures.items()}
    bind = lambda run, a: lambda: run(*a)
    return {x: [bind(run, a) for run, a in zip(runs, arrays, strict=True)] for x, runs in programs.items() if runs}


def _runs(kernel: str, text: str) -> bool:
    """A lowered program runs the Hopper kernel that it is to measure; Triton's always run."""
    return kernel not in _NAMES or any(name in text for name in _NAMES[kernel])


def _correct(head_size: int, condition: tuple[str, str, str], calls: Calls) -> Calls:
    """The configurations whose outputs are those of Triton's kernel: a broken kernel may be fast."""
    kernel, mods, length = condition
    expected = []
    for attention in search_space.attentions(head_size, mods, length):
        run = jax.jit(search_space.program(attention, kernel.removesuffix("_sm90"), None))
        expected.append(samples(run(*search_space.inputs(attention))))
    agrees = lambda run, right: mismatch(samples(run()), right, "triton") is None
    return {tiles: runs for tiles, runs in calls.items() if all(map(agrees, runs, expected))}


def _entry(head_size: int, condition: tuple[str, str, str], calls: Calls) -> dict[str, Any]:
    kernel, mods, length = condition
    by_attention = zip(*(_seconds(attention) for attention in zip(*calls.values(), strict=True)), strict=True)
    times = best_first(dict(zip(calls, map(list, by_attention), strict=True)))
    as_json = lambda tiles, seconds: {"tiles": dataclasses.asdict(tiles), "microseconds": round(seconds * 1e6, 1)}
    key = search_space.key(kernel, head_size, mods, length)._asdict()
    second = as_json(*times[1]) if len(times) > 1 else None
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


def _name(kernel: str, head_size: int, mods: str) -> str:
    return f"{kernel} {head_size} {mods}"


def prune(heads: Sequence[int], scope: Scope) -> dict[str, list[list[int]]]:
    """Configurations whose registers spill little when they are compiled for an H200, without a GPU."""
    from tests.support import gpu_compile  # which needs what no benchmark does

    if reason := gpu_compile.missing():
        raise SystemExit(reason)
    kept: dict[str, list[list[int]]] = {}
    searched = dict.fromkeys((kernel, D, mods) for D in heads for kernel, mods, _ in scope.conditions(D))
    for kernel, D, mods in tqdm(searched, unit="condition", disable=None):
        attention = search_space.attentions(D, mods, "short")[0]
        arrays = jax.eval_shape(lambda attention=attention: search_space.inputs(attention))
        fine = []
        for tiles in scope.configurations(D, kernel, mods):
            try:
                compiled = gpu_compile.compile_kernels(search_space.program(attention, kernel, tiles), *arrays)
            except failures():
                continue
            if all(x.spill <= MAX_SPILLED for x in compiled if x.name.endswith(kernel)):
                fine.append(list(dataclasses.astuple(tiles)))
        kept[_name(kernel, D, mods)] = fine
    return kept
