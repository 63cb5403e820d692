"""Compiles a suite into caches on the disk, with several processes of each library side by side."""

from __future__ import annotations

import pathlib
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from benchmarks.peers import Peer, asked
from benchmarks.problems import Problem
from benchmarks.side import as_message
from benchmarks.team import variables
from benchmarks.workers import START_SECONDS, Worker, WorkerError

_SECONDS = 240.0  # for a problem


def compile_all(
    problems: Sequence[Problem], peers: Sequence[Peer], directions: Sequence[str], workers: int, cache: pathlib.Path
) -> None:
    """Fills the caches; a problem that fails here is met again, and reported, by the measurement.

    Args:
      problems: What to compile.
      peers: For whom.
      directions: Of `DIRECTIONS`.
      workers: Processes of each library.
      cache: The folder of the caches.
    """
    libraries = sorted({peer.library for peer in peers})
    open_problems: dict[str, queue.SimpleQueue[Problem]] = {library: queue.SimpleQueue() for library in libraries}
    for waiting in open_problems.values():
        for problem in problems:
            waiting.put(problem)
    with (
        tqdm(total=len(problems) * len(libraries), unit="compilation", dynamic_ncols=True) as bar,
        ThreadPoolExecutor(max_workers=workers * len(libraries)) as pool,
    ):

        def work_off(library: str, number: int) -> None:
            log = cache / f"ahead-{library}-{number}.log"
            worker, patience = Worker(library, variables(cache, threads=1), log), _SECONDS + START_SECONDS
            while not open_problems[library].empty():
                try:
                    problem = open_problems[library].get_nowait()
                except queue.Empty:
                    break
                try:
                    names = asked(problem, peers).get(library, [])
                    worker.ask("prepare", patience, problem=as_message(problem), peers=names,
                               directions=list(directions), ahead=True)  # fmt: skip
                except WorkerError as error:
                    bar.write(f"{problem.name}: {error}")
                    worker = Worker(library, variables(cache, threads=1), log)
                patience = _SECONDS
                bar.update()
            worker.close()

        jobs = [pool.submit(work_off, library, number) for library in libraries for number in range(workers)]
        for job in jobs:
            job.result()
