"""Measures a suite of attention problems beside its peers: ``python -m benchmarks.attention --suite main``.

torch and JAX have a process each, which are compiled for a problem at the same time and then measured in turns, so that
both see the same clocks. The backward is measured alone, from what one forward has left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import ahead, records, tables
from benchmarks.clocks import Watch
from benchmarks.environment import gpu_facts, results_folder
from benchmarks.peers import PEERS, Peer, asked, peers_of
from benchmarks.problems import SUITES, TITLES, Problem, suite
from benchmarks.records import Record
from benchmarks.results import FOLDER
from benchmarks.side import DIRECTIONS, as_message
from benchmarks.summary import Summary
from benchmarks.team import Team

_TURNS = 2
_PREPARE_SECONDS = 300.0
_MEASURE_SECONDS = 90.0


class Run:
    """One measurement of a suite; `records` and `remarks` grow with each problem.

    Args:
      team: The workers.
      peers: Whom to ask.
      directions: Of `DIRECTIONS`.
      runs: Repetitions of each figure.
      queue: Also measure the wall time of a queue of calls.
    """

    def __init__(self, team: Team, peers: Sequence[Peer], directions: Sequence[str], runs: int, queue: bool) -> None:
        self._team, self._peers, self._directions, self._runs, self._queue = team, peers, directions, runs, queue
        self.records: list[Record] = []
        self.remarks: dict[str, list[str]] = {}
        self.rates: dict[str, dict[str, float]] = {}

    def measure_rates(self) -> None:
        """Of the matrix units and of the memory, by each library."""
        for library, answer in self._team.ask_all("rates", _MEASURE_SECONDS).items():
            self._keep_failure(library, answer, "the rates")
            if "failed" not in answer:
                self.rates[library] = {name: float(f"{x:.4g}") for name, x in answer.items()}

    def measure(self, problem: Problem) -> None:
        """All peers, in turns."""
        ready, work = self._prepare(problem)
        if work is None:
            return
        for direction in self._directions:
            times = self._in_turns(ready, direction, problem)
            flops = work["forward_flops"] * (2.5 if direction == "backward" else 1.0)
            self.records += [_record(problem, name, direction, answers, (flops, work[f"{direction}_bytes"]))
                             for name, answers in times.items()]  # fmt: skip
        self._team.ask_all("release", _MEASURE_SECONDS)

    def _in_turns(self, ready: Sequence[str], direction: str, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        times: dict[str, list[dict[str, Any]]] = {name: [] for name in ready}
        more = {"direction": direction, "runs": -(-self._runs // _TURNS), "queue": self._queue}
        for _ in range(_TURNS):
            for name in list(times):
                answer = self._team.ask(PEERS[name].library, "measure", _MEASURE_SECONDS, peer=name, **more)
                if "failed" in answer:
                    self._keep_failure(name, answer, f"{direction}: {problem.name}")
                    del times[name]
                else:
                    times[name].append(answer)
        return times

    def _prepare(self, problem: Problem) -> tuple[list[str], dict[str, Any] | None]:
        """Who is ready, and the work that the JAX side counted."""
        names = {"jax": []} | asked(problem, self._peers)
        more = {"problem": as_message(problem), "directions": list(self._directions)}
        every = {library: {"peers": found, **more} for library, found in names.items()}
        answers = self._team.ask_each("prepare", _PREPARE_SECONDS, every)
        ready: list[str] = []
        for library, answer in answers.items():
            self._keep_failure(library, answer, problem.name)
            for name, reason in answer.get("unable", {}).items():
                self._keep_failure(name, {"failed": reason}, problem.name)
            ready += answer.get("ready", {})
        # In the order of the peers, so that turns do not depend on the libraries.
        return [peer.name for peer in self._peers if peer.name in ready], answers["jax"].get("work")

    def _keep_failure(self, who: str, answer: dict[str, Any], where: str) -> None:
        if "failed" in answer:
            self.remarks.setdefault(f"{who}: {answer['failed']}", []).append(where)

    def told(self) -> list[str]:
        """The remarks, each with where it holds."""
        return [f"{remark} [{'; '.join(where)}]" for remark, where in self.remarks.items()]


def _record(
    problem: Problem, peer: str, direction: str, answers: Sequence[dict[str, Any]], work: tuple[float, float]
) -> Record:
    every = lambda name: [x for answer in answers for x in answer[name]]
    method = "; ".join(dict.fromkeys(answer["method"] for answer in answers))
    queue = Summary.of(every("queue")) if every("queue") else None
    return Record(problem, peer, direction, Summary.of(every("seconds")), method, *work, queue)


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--pass", dest="direction", choices=(*DIRECTIONS, "both"), default="both")
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="of the suite's problems; all without")
    parser.add_argument("--lengths", nargs="*", type=int, metavar="S", help="of the suite's problems; all without")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), metavar="NAME", default=(), help=", ".join(PEERS))
    parser.add_argument("--runs", type=int, default=10, help="repetitions of each figure")
    parser.add_argument("--compile-workers", type=int, default=0, metavar="N",
                        help="first let N processes of each library fill the compilation caches")  # fmt: skip
    parser.add_argument("--cache", type=pathlib.Path, help="keep these caches here; a temporary folder without")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--add", action="store_true", help="keep what the committed file has of other problems")
    parser.add_argument("--check-timing", action="store_true", help="only compare the profiler with the wall")
    return parser.parse_args(words)


def _problems(options: argparse.Namespace) -> list[Problem]:
    return [problem for problem in suite(options.suite)
            if (not options.variants or problem.variant in options.variants)
            and (not options.lengths or problem.S in options.lengths)]  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    options = _options(words)
    with contextlib.ExitStack() as stack:
        cache = options.cache or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache.mkdir(parents=True, exist_ok=True)
        peers = peers_of(options.suite, options.peers)
        libraries = sorted({"jax", *(peer.library for peer in peers)})
        if options.check_timing:
            team = stack.enter_context(Team(libraries, cache))
            print(json.dumps(team.ask_all("check", _MEASURE_SECONDS), indent=1))
            return
        problems = _problems(options)
        directions = DIRECTIONS if options.direction == "both" else (options.direction,)
        if options.compile_workers:
            ahead.compile_all(problems, peers, directions, options.compile_workers, cache)
        team = stack.enter_context(Team(libraries, cache))
        run = Run(team, peers, directions, options.runs, options.suite in ("short", "tiny"))
        _measure(run, problems, options, stack.enter_context(Watch()))


def _measure(run: Run, problems: Sequence[Problem], options: argparse.Namespace, watch: Watch) -> None:
    device = results_folder(gpu_facts().get("device", "cpu"))
    old = records.read(device, options.suite) if options.add else None
    run.measure_rates()

    def save() -> pathlib.Path:
        about = {"title": TITLES[options.suite], "machine": gpu_facts(), "rates": run.rates, "clocks": watch.seen(),
                 "remarks": [*(old.about["remarks"] if old else []), *run.told()]}  # fmt: skip
        if old:
            about["before"] = [*old.about.get("before", []), {x: old.about[x] for x in ("date", "command", "commit")}]
        return records.write(options.out / device, options.suite, records.merged(old, run.records), about)

    path = None
    with tqdm(problems, unit="problem", dynamic_ncols=True, mininterval=2.0) as bar:
        for problem in bar:
            bar.set_postfix_str(problem.name)
            run.measure(problem)
            path = save()
    if path is None or not run.records:
        raise SystemExit("\n".join(["Nothing was measured.", *run.told()]))
    _show(device, options, path)


def _show(device: str, options: argparse.Namespace, path: pathlib.Path) -> None:
    result = records.read(device, options.suite, options.out)
    print(f"{path}: {result.about['title']}; TFLOP/s (how many times faster jflex is)\nrates: {result.about['rates']}\n"
          f"clocks: {result.about['clocks']}")  # fmt: skip
    for direction in tables.directions_of(result):
        print(tables.plain([tables.header(result, direction), *tables.rows(result, direction)]))
    if queued := tables.queue_rows(result):
        print(tables.plain([tables.queue_header(result), *queued]))
    print("\n".join(f"method: {method}" for method in sorted({record.method for record in result.records})))
    print("\n".join([*tables.sentences(result), *(remark[:300] for remark in result.about["remarks"])]))
    with contextlib.suppress(ImportError):
        from benchmarks import plots

        print("\n".join(str(drawn) for drawn in plots.draw(result, path.parent)))


if __name__ == "__main__":
    main()
