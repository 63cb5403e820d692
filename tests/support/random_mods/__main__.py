"""Runs random mods: ``python -m tests.support.random_mods --implementation xla --seeds 0:1000``."""

from __future__ import annotations

import argparse
import collections
import os
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.random_mods", description=__doc__)
    parser.add_argument("--implementation", default="xla", help="as in the call, or of the CPU as in `run`")
    parser.add_argument("--seeds", default="0:100", help="one seed, or first:last, the last not included")
    parser.add_argument("--profile", help="what is drawn, by default what fits: quick, small, wide or hopper")
    args = parser.parse_args()
    if args.implementation in ("xla", "reference") or "-" in args.implementation:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.support.random_mods.run import run

    first, _, last = args.seeds.partition(":")
    count: collections.Counter[str] = collections.Counter()
    for seed in range(int(first), int(last or int(first) + 1)):
        result = run(seed, args.implementation, args.profile)
        count[result["verdict"]] += 1
        if result["verdict"] in ("wrong", "error") or not last:
            print(f"--- seed {seed}: {result['verdict']}\n{result['message']}\n{result['report']}", flush=True)
    print(f"{args.implementation}: {sum(count.values())} mods, {dict(count)}")
    return bool(count["wrong"] + count["error"])


if __name__ == "__main__":
    sys.exit(main())
