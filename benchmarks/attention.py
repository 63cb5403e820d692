"""Measures suites of attention problems beside their peers: ``python -m benchmarks.attention --suite main``.

torch and JAX have a process each, which are compiled for a problem at the same time and then measured in turns, so that
both see the same clocks. The backward is measured alone, from what one forward has left. A result file is written after
each problem.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import agreement, ahead, hopper_bars, records, roofline, tables
from benchmarks.clocks import Watch
from benchmarks.deadline import Deadline
from benchmarks.environment import gpu_facts, results_folder
from benchmarks.peers import PEERS, Peer, asked, peers_of
from benchmarks.problems import SERVED, SUITES, TITLES, Problem, suite
from benchmarks.records import Record
from benchmarks.results import FOLDER
from benchmarks.side import DIRECTIONS, as_message
from benchmarks.summary import Summary
from benchmarks.team import Team

_TURNS = 2
_MEASURE_SECONDS = 90.0
_SHARE = 0.25  # of the time that is left, which one question may take


class Run:
    """One measurement of a suite; `records` and `remarks` grow with each problem.

    Args:
      team: The workers.
      peers: Whom to ask.
      directions: Of `DIRECTIONS`.
      runs: Repetitions of each figure.
      queue: Also measure the wall time of a queue of calls.
      patience: Seconds that a library has to compile and warm up a problem; then its process is ended.
    """

    def __init__(
        self, team: Team, peers: Sequence[Peer], directions: Sequence[str], runs: int, queue: bool,
        patience: float = 300.0,
    ) -> None:  # fmt: skip
        self._team, self._peers, self._directions, self._runs, self._queue = team, peers, directions, runs, queue
        self._patience = patience
        self.records: list[Record] = []
        self.remarks: dict[str, list[str]] = {}

    def measure_rates(self) -> dict[str, dict[str, float]]:
        """Of the matrix units and of the memory, by each library."""
        rates = {}
        for library, answer in self._team.ask_all("rates", _MEASURE_SECONDS).items():
            self.keep_failure(library, answer, "the rates")
            if "failed" not in answer:
                rates[library] = {name: float(f"{x:.4g}") for name, x in answer.items()}
        return rates

    def measure(self, problem: Problem) -> None:
        """All peers, in turns."""
        ready, work, backends = self._prepare(problem)
        if work is None:
            return
        for direction in self._directions:
            times = self._in_turns(ready[direction], direction, problem)
            done = (work[f"{direction}_flops"], work[f"{direction}_bytes"])
            self.records += [_record(problem, name, direction, answers, done, backends.get(name, ""))
                             for name, answers in times.items()]  # fmt: skip
        self._team.ask_all("release", _MEASURE_SECONDS)

    def _in_turns(self, ready: Sequence[str], direction: str, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        times: dict[str, list[dict[str, Any]]] = {name: [] for name in ready}
        more = {"direction": direction, "runs": -(-self._runs // _TURNS), "queue": self._queue}
        silent: set[str] = set()
        for _ in range(_TURNS):
            for name in (name for name in times if name not in silent):
                answer = self._team.ask(PEERS[name].library, "measure", _MEASURE_SECONDS, peer=name, **more)
                if "failed" in answer:
                    self.keep_failure(name, answer, f"{direction}: {problem.name}")
                    library = PEERS[name].library
                    silent |= {x for x in times if PEERS[x].library == library} if "lost" in answer else {name}
                else:
                    times[name].append(answer)
        return {name: answers for name, answers in times.items() if answers}

    def _prepare(self, problem: Problem) -> tuple[dict[str, list[str]], dict[str, Any] | None, dict[str, str]]:
        """Who is ready, by direction; the work that a JAX side counted; and which backends jflex runs."""
        names = {"jax": []} | asked(problem, self._peers)
        more = {"problem": as_message(problem), "directions": list(self._directions)}
        every = {library: {"peers": found, **more} for library, found in names.items()}
        answers = self._team.ask_each("prepare", self._patience, every)
        ready, unable, samples, told = set(), {}, {}, {}
        for library, answer in answers.items():
            self.keep_failure(library, answer, problem.name)
            told |= answer
            if "lost" not in answer:
                ready |= answer["ready"].keys()
            for found, name in ((unable, "unable"), (samples, "samples")):
                found |= answer.get(name, {})
        for name, reasons in agreement.doubts(samples).items():
            unable[name] = unable.get(name, {}) | reasons
        for name, reasons in unable.items():
            self._keep_reasons(name, reasons, problem)
        # In the order of the peers, so that turns do not depend on the libraries.
        able = {direction: [peer.name for peer in self._peers
                            if peer.name in ready and direction not in unable.get(peer.name, {})]
                for direction in self._directions}  # fmt: skip
        work = dataclasses.asdict(roofline.served_work(problem)) if problem.served else told.get("work")
        return able, work, told.get("backends", {})

    def _keep_reasons(self, name: str, reasons: dict[str, str], problem: Problem) -> None:
        """Makes a remark of what a peer cannot: one, if it is the same in every direction."""
        for reason in dict.fromkeys(reasons.values()):
            where = [direction for direction, x in reasons.items() if x == reason]
            prefix = "" if len(where) == len(self._directions) else f"{', '.join(where)}: "
            self.keep_failure(name, {"failed": reason}, f"{prefix}{problem.name}")

    def keep_failure(self, who: str, answer: dict[str, Any], where: str) -> None:
        """Makes a remark of an answer that tells of one."""
        if "failed" in answer:
            self.remarks.setdefault(f"{who}: {answer['failed']}", []).append(where)

    def told(self) -> list[str]:
        """The remarks, each with where it holds."""
        return [f"{remark} [{'; '.join(where)}]" for remark, where in self.remarks.items()]


def _record(
    problem: Problem, peer: str, direction: str, answers: Sequence[dict[str, Any]], work: tuple[float, float],
    backend: str,
) -> Record:  # fmt: skip
    every = lambda name: [x for answer in answers for x in answer[name]]
    method = "; ".join(dict.fromkeys(answer["method"] for answer in answers))
    queue = Summary.of(every("queue")) if every("queue") else None
    return Record(problem, peer, direction, Summary.of(every("seconds")), method, *work, queue, backend)


class Plan(NamedTuple):
    """What to measure of a suite."""

    suite: str
    problems: list[Problem]
    peers: tuple[Peer, ...]
    directions: tuple[str, ...]


def _plan(name: str, options: argparse.Namespace) -> Plan:
    problems = [problem for problem in suite(name)
                if (not options.variants or problem.variant in options.variants)
                and (not options.lengths or problem.S in options.lengths)
                and (not options.head_sizes or problem.D in options.head_sizes)
                and (not options.batches or problem.B in options.batches)]  # fmt: skip
    asked_for = DIRECTIONS if options.direction == "both" else (options.direction,)
    return Plan(name, problems, peers_of(name, options.peers), ("forward",) if name in SERVED else asked_for)


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, nargs="+", metavar="NAME", default=["quick"],
                        help=f"one or more, in this order: {', '.join(SUITES)}")  # fmt: skip
    parser.add_argument("--pass", dest="direction", choices=(*DIRECTIONS, "both"), default="both",
                        help=f"{', '.join(SERVED)} have a forward alone")  # fmt: skip
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="of the suite's problems; all without")
    parser.add_argument("--lengths", nargs="*", type=int, metavar="S", help="of the suite's problems; all without")
    parser.add_argument("--head-sizes", nargs="*", type=int, metavar="D", help="of the suite's problems; all without")
    parser.add_argument("--batches", nargs="*", type=int, metavar="B", help="of the suite's problems; all without")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), metavar="NAME", default=(), help=", ".join(PEERS))
    parser.add_argument("--runs", type=int, default=10, help="repetitions of each figure")
    parser.add_argument("--patience", type=float, metavar="SECONDS", default=300.0,
                        help="that a library has to compile a problem; then its process is started anew")  # fmt: skip
    parser.add_argument("--limit", type=float, metavar="SECONDS",
                        help="begin no problem after so long, and wait for no peer beyond it")  # fmt: skip
    parser.add_argument("--compile-workers", type=int, default=0, metavar="N",
                        help="first let N processes of each library fill the compilation caches")  # fmt: skip
    parser.add_argument("--cache", type=pathlib.Path, help="keep these caches here; a temporary folder without")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--add", action="store_true", help="keep what the committed file has of other problems")
    parser.add_argument("--check-timing", action="store_true", help="only compare the profiler with the wall")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = _options(words)
    with contextlib.ExitStack() as stack:
        cache = options.cache or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache.mkdir(parents=True, exist_ok=True)
        plans = [_plan(name, options) for name in options.suite]
        libraries = sorted({"jax", *(peer.library for plan in plans for peer in plan.peers)})
        deadline = Deadline(options.limit, _SHARE)
        team = Team(libraries, cache, deadline)
        if options.check_timing:
            print(json.dumps(stack.enter_context(team).ask_all("check", _MEASURE_SECONDS), indent=1))
            return
        compiling = _compile_ahead(plans, options, cache, stack)
        stack.enter_context(team)  # its processes start while others compile
        compiling.result()
        watch = stack.enter_context(Watch())
        rates: dict[str, dict[str, float]] = {}
        paths = {plan.suite: _measure(plan, team, options, watch, rates, deadline) for plan in plans}
    for name, path in paths.items():
        if path is not None:
            _show(name, path)
    if None in paths.values():
        raise SystemExit(f"Nothing was measured of {', '.join(name for name in paths if paths[name] is None)}.")


def _compile_ahead(
    plans: Sequence[Plan], options: argparse.Namespace, cache: pathlib.Path, stack: contextlib.ExitStack
) -> Future[None]:
    """Runs beside; of a limited time it takes half at most."""
    tasks = [ahead.Task(problem, plan.peers, plan.directions) for plan in plans for problem in plan.problems]
    deadline = Deadline(None if options.limit is None else options.limit / 2)
    pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
    workers = options.compile_workers
    return pool.submit(ahead.compile_all, tasks, workers, cache, deadline) if workers else pool.submit(lambda: None)


def _measure(
    plan: Plan, team: Team, options: argparse.Namespace, watch: Watch, rates: dict[str, dict[str, float]],
    deadline: Deadline,
) -> pathlib.Path | None:  # fmt: skip
    """Measures a suite, and writes its file after each problem; None if nothing was measured."""
    machine = gpu_facts()
    device = results_folder(machine.get("device", "cpu"))
    old = records.read(device, plan.suite) if options.add else None
    run = Run(team, plan.peers, plan.directions, options.runs, plan.suite in ("short", "tiny"),
              options.patience)  # fmt: skip
    if not rates:
        rates |= run.measure_rates()

    def save() -> pathlib.Path:
        about = {"title": TITLES[plan.suite], "machine": machine, "rates": rates, "clocks": watch.seen(),
                 "remarks": [*(old.about["remarks"] if old else []), *run.told()]}  # fmt: skip
        if old:
            about["before"] = [*old.about.get("before", []), {x: old.about[x] for x in ("date", "command", "commit")}]
        return records.write(options.out / device, plan.suite, records.merged(old, run.records), about)

    with tqdm(plan.problems, unit="problem", dynamic_ncols=True, mininterval=2.0, disable=None) as bar:
        for problem in bar:
            bar.set_postfix_str(problem.name)
            if deadline.over:
                run.keep_failure("not measured", {"failed": "the time was over"}, problem.name)
            else:
                run.measure(problem)
            if run.records:
                save()
    if run.records:
        return save()
    print("\n".join(run.told()))
    return None


def _show(name: str, path: pathlib.Path) -> None:
    result = records.read(path.parent.name, name, path.parent.parent)
    print(f"{path}: {result.about['title']}\nrates: {result.about['rates']}\nclocks: {result.about['clocks']}")
    if name in SERVED:
        print(tables.plain([tables.served_header(result), *tables.served_rows(result)]))
    else:
        print("TFLOP/s (how many times faster jflex is)")
        for direction in tables.directions_of(result):
            print(tables.plain([tables.header(result, direction), *tables.rows(result, direction)]))
    if name == "hopper" and (targets := hopper_bars.table(result)):
        print(tables.plain(targets))
    if queued := tables.queue_rows(result):
        print(tables.plain([tables.queue_header(result), *queued]))
    print("\n".join(f"method: {method}" for method in sorted({record.method for record in result.records})))
    print("\n".join([*tables.sentences(result), *(remark[:300] for remark in result.about["remarks"])]))
    if name not in SERVED:
        with contextlib.suppress(ImportError):
            from benchmarks import plots

            print("\n".join(str(drawn) for drawn in plots.draw(result, path.parent)))


if __name__ == "__main__":
    main()
