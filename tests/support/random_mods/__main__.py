"""Runs random mods: ``python -m tests.support.random_mods --implementation xla --seeds 0:1000 --processes 1``."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import traceback


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.random_mods", description=__doc__)
    parser.add_argument("--implementation", default="xla", help="as in the call; -interpret or -compile: on the CPU")
    parser.add_argument("--seeds", default="0:100", help="first:last, the last not included, or numbers with commas")
    parser.add_argument("--processes", type=int, default=1, help="share the seeds among so many processes")
    parser.add_argument(
        "--profile", choices=("quick", "small", "wide", "hopper"), help="what is drawn; by default what fits"
    )
    parser.add_argument("--shrink", action="store_true", help="make failing mods smaller")
    parser.add_argument("--time", type=float, default=float("inf"), help="start no mod after so many seconds")
    parser.add_argument("--optimised", action="store_true", help="compile with XLA's optimisations on a CPU, too")
    parser.add_argument("--without", default="", help="leave out mods whose source holds one of these words")
    parser.add_argument("--verbose", action="store_true", help="print each seed before it is run")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each mod")
    args = parser.parse_args()
    results = _run_here(args) if args.processes == 1 else _run_in_processes(args)
    if not args.json:
        _print_summary(args, results)
    return any(result["verdict"] in ("wrong", "error") for result in results)


def _seeds(text: str) -> list[int]:
    if ":" in text:
        first, last = text.split(":")
        return list(range(int(first), int(last)))
    return [int(x) for x in text.split(",")]


def _run_here(args: argparse.Namespace) -> list[dict]:
    import jax

    if args.implementation in ("xla", "reference") or "-" in args.implementation:
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        if jax.__version_info__ < (0, 11):  # half the time to compile, as in conftest.py
            flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    from tests.support.random_mods.run import run

    words = tuple(word for word in args.without.split(",") if word)
    begun, results = time.monotonic(), []
    for count, seed in enumerate(_seeds(args.seeds)):
        if time.monotonic() - begun > args.time:
            break
        at = time.monotonic()
        if args.verbose:
            print(f"seed {seed}", file=sys.stderr, flush=True)
        result = run(
            seed, args.implementation, args.profile, shrink=args.shrink, optimised=args.optimised, without=words
        )
        results.append(result | {"seconds": round(time.monotonic() - at, 2)})
        if args.json:
            print(json.dumps(results[-1]), flush=True)
        else:
            _print_failure(result)
        if count % 25 == 24:
            jax.clear_caches()
    return results


def _run_in_processes(args: argparse.Namespace) -> list[dict]:
    """Each process takes every n-th seed."""
    seeds, command = _seeds(args.seeds), [sys.executable, "-m", "tests.support.random_mods", "--json"]
    command += ["--implementation", args.implementation, "--time", str(args.time)]
    command += ["--profile", args.profile] if args.profile else []
    command += ["--without", args.without] if args.without else []
    command += [f"--{name}" for name in ("shrink", "optimised") if getattr(args, name)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    start = lambda own: subprocess.Popen(
        [*command, "--seeds", ",".join(map(str, own))], stdout=subprocess.PIPE, text=True, env=environment
    )
    running = [start(own) for own in (seeds[i :: args.processes] for i in range(args.processes)) if own]
    results: list[dict] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with concurrent.futures.ThreadPoolExecutor(len(running)) as pool:
        try:
            list(pool.map(lambda process: _take_results(process, results), running))
        except KeyboardInterrupt:
            print("ended before its time; these mods had ended:")
            return sorted(results, key=lambda result: result["seed"])
        finally:
            for process in running:
                process.kill()
    return sorted(results, key=lambda result: result["seed"])


def _take_results(process: subprocess.Popen[str], results: list[dict]) -> None:
    """Reads results as they come, so that a failure is printed even if the run is ended before its time."""
    for line in process.stdout or ():
        if line.startswith("{"):
            result = json.loads(line)
            results.append(result)
            _print_failure(result)
    if process.wait() not in (0, 1):
        results.append({"seed": -1, "verdict": "error", "message": f"a process ended with {process.returncode}"})


def _print_failure(result: dict) -> None:
    if result["verdict"] in ("wrong", "error"):
        print(
            f"--- seed {result['seed']}: {result['verdict']}\n{result['message']}\n{result.get('report', '')}",
            flush=True,
        )


def _print_summary(args: argparse.Namespace, results: list[dict]) -> None:
    count = collections.Counter(result["verdict"] for result in results)
    seconds = sum(result.get("seconds", 0) for result in results)
    print(f"{args.implementation}: {len(results)} mods, {dict(count)}, {seconds:.0f} s")
    for verdict in ("refused", "wrong", "error"):
        reasons = collections.defaultdict(list)
        for result in results:
            if result["verdict"] == verdict:
                reasons[result["reason"] if verdict == "refused" else result["message"].splitlines()[-1][:160]].append(
                    result["seed"]
                )
        for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"  {verdict} {len(seeds)}: {reason} (seeds {', '.join(map(str, seeds[:12]))})")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.exit(2)
