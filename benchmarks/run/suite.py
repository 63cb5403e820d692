"""Measures suites of attention problems: ``python -m benchmarks attention --suite main``.

JAX, Mosaic GPU's kernels and torch have a process each. They compile a problem at the same time and are then measured
in turns, so that all see the same clocks. The backward is measured alone, from the residuals of one forward. The result
file is written after each problem.
"""

import argparse
import collections
import contextlib
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import roofline
from benchmarks.environment import ClockWatch, gpu_facts, results_folder
from benchmarks.peers.table import PEERS, Peer, by_library, peers_of
from benchmarks.problems import Problem
from benchmarks.results import report, schema
from benchmarks.results.schema import Record, Summary
from benchmarks.run import check_outputs
from benchmarks.run.jobs import SHARED_GPU, Deadline, WorkerPool
from benchmarks.run.library_runner import DIRECTIONS
from benchmarks.suites import SUITES

_JAX = "benchmarks.run.jax_runner:JaxRunner"
RUNNERS = {"jax": _JAX, "mosaic": _JAX, "torch": "benchmarks.run.torch_runner:TorchRunner"}
_TURNS = 2
_NOT_MEASURED = "not measured"
_MEASURE_SECONDS = 90.0
_COMPILE_SECONDS = 240.0  # for a problem, beside others
_SHARE = 0.25  # of the remaining time, which one wait may take


class Plan(NamedTuple):
    """Problems, peers and directions of a suite."""

    suite: str
    problems: list[Problem]
    peers: tuple[Peer, ...]
    directions: tuple[str, ...]

    def requests(self, problem: Problem, always: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Arguments of `LibraryRunner.prepare`, by library: those with peers, and some without."""
        shared = {"problem": problem, "directions": self.directions}
        names = {**{library: [] for library in always}, **by_library(problem, self.peers)}
        return {library: {"peers": peers, **shared} for library, peers in names.items()}


class SuiteRun:
    """One measurement of a plan; `records` and `remarks()` grow with each problem."""

    def __init__(self, pool: WorkerPool, plan: Plan, runs: int, patience: float) -> None:
        self._pool, self._plan, self._runs, self._patience = pool, plan, runs, patience
        self.records: list[Record] = []
        self._remarks: dict[str, list[str]] = {}

    def measure_rates(self) -> dict[str, dict[str, float]]:
        """Rates of GEMMs and of copies, by library."""
        rates = {}
        for library, answer in self._pool.request_in_turn("rates", _MEASURE_SECONDS).items():
            self.remark_failure(library, answer, "the rates")
            if "failed" not in answer:
                rates[library] = {name: float(f"{x:.4g}") for name, x in answer.items()}
        return rates

    def measure(self, problem: Problem) -> None:
        """All peers, in turns."""
        ready, started = self._prepare(problem)
        work = roofline.served_work(problem) if problem.served else started.get("work")
        if work is None:
            return
        for direction in self._plan.directions:
            for name, answers in self._in_turns(ready[direction], direction, problem).items():
                backend = started.get("backends", {}).get(name, "")
                flops, moved = (getattr(work, f"{direction}_{x}") for x in ("flops", "bytes"))
                done = {"backend": backend, "flops": flops, "moved": moved, "visible": work.visible}
                self.records.append(_record(problem, name, direction, answers, **done))
        self._pool.request_in_turn("release", _MEASURE_SECONDS)

    def _in_turns(self, ready: Sequence[str], direction: str, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        times: dict[str, list[dict[str, Any]]] = {name: [] for name in ready}
        how = {"direction": direction, "runs": -(-self._runs // _TURNS), "queue": SUITES[self._plan.suite].queue}
        failed: set[str] = set()
        for name in (name for _ in range(_TURNS) for name in times):
            library = PEERS[name].library
            if name in failed:
                continue
            answer = self._pool.request(library, "measure", _MEASURE_SECONDS, peer=name, **how)
            if "failed" in answer:
                self.remark_failure(name, answer, f"{direction}: {problem.name}")
                failed |= {x for x in times if PEERS[x].library == library} if "lost" in answer else {name}
            else:
                times[name].append(answer)
        return {name: answers for name, answers in times.items() if answers}

    def _prepare(self, problem: Problem) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """The peers that are ready, by direction, and the answers of the libraries' ``start``."""
        ready, unable, samples, started = [], {}, {}, {}
        requests = self._plan.requests(problem, always=["jax"])  # which counts the work
        for library, answer in self._pool.request_each("prepare", self._patience, requests).items():
            self.remark_failure(library, answer, problem.name)
            started |= answer
            unable |= answer.get("unable", {})
            samples |= answer.get("samples", {})
            ready += [] if "lost" in answer else answer["ready"]
        tolerance = check_outputs.SERVED_TOLERANCE if problem.served else check_outputs.TOLERANCE
        for name, reasons in check_outputs.mismatches(samples, tolerance).items():
            unable[name] = unable.get(name, {}) | reasons
        for name, reasons in unable.items():
            for reason in dict.fromkeys(reasons.values()):  # one remark, if it is the same in every direction
                where = [direction for direction, x in reasons.items() if x == reason]
                prefix = "" if len(where) == len(self._plan.directions) else f"{', '.join(where)}: "
                self.remark_failure(name, {"failed": reason}, f"{prefix}{problem.name}")
        # In the order of the peers, so that turns do not depend on the libraries.
        able = {
            direction: [x.name for x in self._plan.peers if x.name in ready and direction not in unable.get(x.name, {})]
            for direction in self._plan.directions
        }
        return able, started

    def remark_failure(self, name: str, answer: dict[str, Any], where: str) -> None:
        """Makes a remark of an answer with ``"failed"``."""
        if "failed" in answer:
            self._remarks.setdefault(f"{name}: {answer['failed']}", []).append(where)

    def remarks(self) -> list[str]:
        """Remarks, each with the problems that it is about."""
        return [f"{remark} [{'; '.join(where)}]" for remark, where in self._remarks.items()]


def _record(problem: Problem, peer: str, direction: str, answers: Sequence[dict[str, Any]], **work: Any) -> Record:
    every = lambda name: [x for answer in answers for x in answer[name]]
    method = "; ".join(dict.fromkeys(answer["method"] for answer in answers))
    in_queue = Summary.from_values(every("queue")) if every("queue") else None
    seconds = Summary.from_values(every("seconds"))
    return Record("", seconds, "s", problem, peer, direction, method=method, queue=in_queue, **work)


def worker_variables(cache: pathlib.Path, threads: int = 4) -> dict[str, str]:
    """The environment of a worker that shares the GPU and keeps programs in a folder; inductor has `threads`."""
    return {
        **SHARED_GPU,
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache / "flash_attention"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
    }


def precompile(
    plans: Sequence[Plan], workers: int, cache: pathlib.Path, deadline: Deadline, runners: Mapping[str, str] = RUNNERS
) -> None:
    """Fills the compilation caches with so many processes of each library; failures recur in the measurement."""
    requests: dict[str, collections.deque[dict[str, Any]]] = collections.defaultdict(collections.deque)
    for plan in plans:
        for problem in plan.problems:
            for library, request in plan.requests(problem).items():
                requests[library].append(request)
    names = [(x, f"{x}-compiler-{i}") for x, waiting in requests.items() for i in range(min(workers, len(waiting)))]
    if not names:
        return
    variables = worker_variables(cache, threads=1)

    def work_off(library: str, name: str) -> None:
        with WorkerPool({name: runners[library]}, variables, cache, deadline) as pool:
            while requests[library] and not (deadline.over or pool.has_given_up(name)):
                with contextlib.suppress(IndexError):  # another has taken the last one
                    request = requests[library].popleft()
                    answer = pool.request(name, "prepare", _COMPILE_SECONDS, compile_only=True, **request)
                    if "failed" in answer:
                        print(f"{request['problem'].name}: {answer['failed']}", flush=True)

    with ThreadPoolExecutor(len(names)) as threads:
        for done in [threads.submit(work_off, *name) for name in names]:
            done.result()


def plan_of(name: str, options: argparse.Namespace) -> Plan:
    """The parts of a suite that the options choose."""
    chosen = {"variant": options.variants, "S": options.lengths, "D": options.head_sizes, "B": options.batches}
    selected = lambda problem: all(not values or getattr(problem, x) in values for x, values in chosen.items())
    possible = SUITES[name].directions
    directions = tuple(x for x in possible if options.direction in (x, "both")) or possible[:1]
    return Plan(name, list(filter(selected, SUITES[name].problems)), peers_of(name, options.peers), directions)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    suites = f"one or more, in this order: {', '.join(SUITES)}"
    add("--suite", choices=tuple(SUITES), nargs="+", metavar="NAME", default=["quick"], help=suites)
    served = ", ".join(name for name, x in SUITES.items() if len(x.directions) == 1)
    add("--pass", dest="direction", choices=(*DIRECTIONS, "both"), default="both", help=f"{served}: forward only")
    for name, kind, letter in (
        ("variants", str, "NAME"),
        ("lengths", int, "S"),
        ("head-sizes", int, "D"),
        ("batches", int, "B"),
    ):
        add(f"--{name}", nargs="*", type=kind, metavar=letter, help="of the suite's problems; default: all")
    add("--peers", nargs="*", choices=tuple(PEERS), metavar="NAME", default=(), help=", ".join(PEERS))
    add("--runs", type=int, default=10, help="repetitions of each figure")
    patience = "that a library has to compile a problem; then its process is restarted"
    add("--patience", type=float, default=300.0, metavar="SECONDS", help=patience)
    add("--limit", type=float, metavar="SECONDS", help="begin no problem after so long, and wait for no peer beyond it")
    workers = "first let N processes of each library fill the compilation caches"
    add("--compile-workers", type=int, default=0, metavar="N", help=workers)
    add("--cache", type=pathlib.Path, help="keep the compilation caches here; default: a temporary folder")
    add("--out", type=pathlib.Path, help="write <out>/<suite>.json; default: benchmarks/results/<device>")
    add("--add", action="store_true", help="keep other records of the file in --out, or else of the committed one")


def run(options: argparse.Namespace, runners: Mapping[str, str] = RUNNERS) -> None:
    """Measures the suites that the options name."""
    paths: dict[str, pathlib.Path | None] = {}
    with contextlib.ExitStack() as stack:
        cache = (options.cache or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        cache.mkdir(parents=True, exist_ok=True)
        plans = [plan_of(name, options) for name in options.suite]
        libraries = sorted({"jax", *(peer.library for plan in plans for peer in plan.peers)})
        targets, deadline = {library: runners[library] for library in libraries}, Deadline(options.limit, _SHARE)
        half = Deadline(None if options.limit is None else options.limit / 2)  # at most, for what compiles beside
        thread = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        compiling = thread.submit(precompile, plans, options.compile_workers, cache, half, runners)
        # Its processes start while others compile.
        pool = stack.enter_context(WorkerPool(targets, worker_variables(cache), cache, deadline))
        compiling.result()
        about: dict[str, Any] = {}
        watch = stack.enter_context(ClockWatch())
        for plan in plans:
            suite_run = SuiteRun(pool, plan, options.runs, options.patience)
            about = about or {"machine": gpu_facts(), "rates": suite_run.measure_rates()}
            paths[plan.suite] = _measure(suite_run, plan, options, about, watch, deadline)
    for path in filter(None, paths.values()):
        report.show(path)
    if None in paths.values():
        raise SystemExit(f"Nothing was measured of {', '.join(name for name in paths if paths[name] is None)}.")


def _measure(
    run: SuiteRun, plan: Plan, options: argparse.Namespace, about: dict[str, Any], watch: ClockWatch, deadline: Deadline
) -> pathlib.Path | None:
    """Measures a suite, and writes its file after each problem; None if nothing was measured."""
    committed = schema.FOLDER / results_folder(about["machine"].get("device", "cpu")) / f"{plan.suite}.json"
    path = committed if options.out is None else options.out / committed.name
    old = (schema.read(path) or schema.read(committed)) if options.add else None
    earlier = [] if old is None else [x for x in old.about["remarks"] if not x.startswith(_NOT_MEASURED)]
    with tqdm(plan.problems, unit="problem", dynamic_ncols=True, mininterval=2.0, disable=None) as bar:
        for problem in bar:
            bar.set_postfix_str(problem.name)
            if deadline.over:
                run.remark_failure(_NOT_MEASURED, {"failed": "the time was over"}, problem.name)
            else:
                run.measure(problem)
            if run.records:
                records = schema.merged([] if old is None else old.records, run.records)
                remarks = list(dict.fromkeys([*earlier, *run.remarks()]))
                more = {"clocks": watch.seen(), "remarks": remarks, **schema.history(old)}
                schema.write(path, records, {"title": SUITES[plan.suite].title, **about, **more})
    if run.records:
        return path
    print("\n".join(run.remarks()))
    return None
