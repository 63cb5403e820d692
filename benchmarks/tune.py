"""Searches tiles on a GPU and writes them to a table: ``python -m benchmarks.tune``.

Every head size has a process of its own, which compiles all configurations at once and then waits for the GPU; they are
timed one after another. A time is that of a call: for dkv and dq with the forward pass before it, the same for all.

On a machine without a GPU, ``--prune FILE`` compiles the configurations for an H200 and writes those whose registers
spill little; ``--candidates FILE`` then searches only these.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import candidates, gpu_compile, timing
from benchmarks.children import called
from benchmarks.environment import ROOT, describe, gpu_facts
from pallas_kernels.setting import Tiles
from pallas_kernels.tuning.tables import HEAD_SIZES, KERNELS, table_name

TABLES = ROOT / "pallas_kernels" / "tuning" / "tables"
MOST_SPILLED = 512  # bytes of a thread; 128 x 64 at head size 128 spills 230 and is the fastest forward kernel there
_LOCK = pathlib.Path(tempfile.gettempdir()) / "jflex-tune.lock"
_RUNS = 5
_REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="*", default=HEAD_SIZES[:-1], choices=HEAD_SIZES, help="head sizes")
    parser.add_argument("--kernels", nargs="*", default=KERNELS, choices=KERNELS)
    parser.add_argument("--prune", type=pathlib.Path, help="compile for an H200, write what may be searched, stop")
    parser.add_argument("--candidates", type=pathlib.Path, help="what --prune wrote")
    parser.add_argument("--out", type=pathlib.Path, default=TABLES, help="folder of the table")
    options = parser.parse_args()
    if options.prune:
        options.prune.write_text(json.dumps(prune(options.heads, options.kernels), indent=1) + "\n")
        return
    facts = gpu_facts()
    if "device" not in facts:
        parser.error("no GPU was found; `--prune FILE` works without one")
    allowed = json.loads(options.candidates.read_text()) if options.candidates else None
    tune(options.heads, options.kernels, allowed, facts, options.out)


def tune(
    heads: Sequence[int], kernels: Sequence[str], allowed: dict[str, Any] | None, facts: dict[str, str],
    folder: pathlib.Path,
) -> None:  # fmt: skip
    """Searches all, and writes the table anew after each head size; entries that are not searched are kept."""
    path = folder / f"{table_name(facts['device'])}.json"
    old = json.loads(path.read_text())["entries"] if path.exists() else []
    found = {json.dumps(entry["key"]): entry for entry in old}
    about = describe()
    about["machine"] |= facts
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with concurrent.futures.ThreadPoolExecutor(len(heads)) as pool:
        waiting = {
            pool.submit(called, "benchmarks.tune", "search", {"head_size": D, "kernels": kernels, "allowed": allowed},
                        variables): D for D in heads
        }  # fmt: skip
        for done in tqdm(concurrent.futures.as_completed(waiting), total=len(heads), unit="head size"):
            for entry in done.result():
                found[json.dumps(entry["key"])] = entry
                tqdm.write(_line(entry))
            write(path, about, list(found.values()))
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
    return f"{words}: {best}" + (
        f", then {tuple(second['tiles'].values())} {second['microseconds']} us" if second else ""
    )


def search(head_size: int, kernels: Sequence[str], allowed: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The entries of one head size; runs in a process of its own."""
    conditions = [(kernel, *condition) for kernel in kernels for condition in candidates.conditions(head_size)]
    prepared = {x: _compiled(head_size, *x, allowed) for x in conditions}
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return [_entry(head_size, condition, calls) for condition, calls in prepared.items() if calls]


def _compiled(
    head_size: int, kernel: str, mods: str, length: str, allowed: dict[str, Any] | None
) -> dict[Tiles, list[Any]]:
    """For each configuration a call for each attention of a condition; without those that the compiler refuses."""
    tiles = list(candidates.configurations(kernel, head_size))
    if allowed is not None:
        kept = {tuple(x) for x in allowed[_name(kernel, head_size, mods)]}
        tiles = [x for x in tiles if tuple(x) in kept]
    attentions = candidates.attentions(head_size, mods, length)
    arrays = [candidates.inputs(attention) for attention in attentions]

    def compiled(lowered: list[Any]) -> list[Any] | None:
        try:
            return [x.compile() for x in lowered]
        except _REFUSALS:
            return None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {}
        for x in tiles:
            programs = [candidates.program(attention, kernel, x) for attention in attentions]
            lowered = [jax.jit(run).lower(*a) for run, a in zip(programs, arrays, strict=True)]
            futures[x] = pool.submit(compiled, lowered)
    found = {x: future.result() for x, future in futures.items()}
    bind = lambda run, a: lambda: run(*a)
    return {x: [bind(run, a) for run, a in zip(runs, arrays, strict=True)] for x, runs in found.items() if runs}


def _entry(head_size: int, condition: tuple[str, str, str], calls: dict[Tiles, list[Any]]) -> dict[str, Any]:
    kernel, mods, length = condition
    by_attention = zip(*(_seconds(attention) for attention in zip(*calls.values(), strict=True)), strict=True)
    times = best_first(dict(zip(calls, map(list, by_attention), strict=True)))
    as_json = lambda tiles, seconds: {"tiles": tiles._asdict(), "microseconds": round(seconds * 1e6, 1)}
    key = candidates.key(kernel, head_size, mods, length)._asdict()
    second = as_json(*times[1]) if len(times) > 1 else None
    return {"key": key, **as_json(*times[0]), "runner_up": second, "searched": len(times)}


def _seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Median time of each call; they take turns in one profile, since to start one costs as much as all of them."""
    made = 0

    def next_call() -> Any:
        nonlocal made
        made += 1
        return calls[(made - 1) % len(calls)]()

    runs = _RUNS * len(calls)
    seconds = timing.device_seconds(next_call, runs, warmup=len(calls))
    first = (made - runs) % len(calls)  # whose turn it was when measuring began
    return [statistics.median(seconds[(i - first) % len(calls) :: len(calls)]) for i in range(len(calls))]


def best_first(times: dict[Tiles, list[float]]) -> list[tuple[Tiles, float]]:
    """Configurations by the geometric mean of their times."""
    means = {tiles: statistics.geometric_mean(seconds) for tiles, seconds in times.items()}
    return sorted(means.items(), key=lambda item: item[1])


def _name(kernel: str, head_size: int, mods: str) -> str:
    return f"{kernel} {head_size} {mods}"


def prune(heads: Sequence[int], kernels: Sequence[str]) -> dict[str, list[list[int]]]:
    """Configurations whose registers spill little when they are compiled for an H200, without a GPU."""
    found: dict[str, list[list[int]]] = {}
    wanted = [(kernel, D, mods) for D in heads for kernel in kernels
              for mods in dict.fromkeys(mods for mods, _ in candidates.conditions(D))]  # fmt: skip
    for kernel, D, mods in tqdm(wanted, unit="condition"):
        attention = candidates.attentions(D, mods, "short")[0]
        arrays = jax.eval_shape(lambda attention=attention: candidates.inputs(attention))
        fine = []
        for tiles in candidates.configurations(kernel, D):
            try:
                kernels_found = gpu_compile.compile_kernels(candidates.program(attention, kernel, tiles), *arrays)
            except _REFUSALS:
                continue
            if all(x.spill <= MOST_SPILLED for x in kernels_found if x.name.endswith(kernel)):
                fine.append(list(tiles))
        found[_name(kernel, D, mods)] = fine
    return found


if __name__ == "__main__":
    main()
