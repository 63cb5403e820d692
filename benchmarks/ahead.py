"""Compiles suites into caches on the disk, with several processes of each library side by side."""

from __future__ import annotations

import pathlib
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.deadline import Deadline
from benchmarks.peers import Peer, asked
from benchmarks.problems import Problem
from benchmarks.side import as_message
from benchmarks.team import variables
from benchmarks.workers import START_SECONDS, Worker, WorkerError

_SECONDS = 240.0  # for a problem


class Task(NamedTuple):
    """What to compile.

    Attributes:
      problem: Of this problem.
      peers: For whom.
      directions: Of `DIRECTIONS`.
    """

    problem: Problem
    peers: Sequence[Peer]
    directions: Sequence[str]


def compile_all(tasks: Sequence[Task], workers: int, cache: pathlib.Path, deadline: Deadline) -> None:
    """Fills the caches; a problem that fails here is met again, and reported, by the measurement.

    Args:
      tasks: What to compile.
      workers: Processes of each library.
      cache: The folder of the caches.
      deadline: Nothing is waited for beyond it.
    """
    open_tasks: dict[str, queue.SimpleQueue[tuple[Task, list[str]]]] = {}
    for task in tasks:
        for library, names in asked(task.problem, task.peers).items():
            open_tasks.setdefault(library, queue.SimpleQueue()).put((task, names))
    counts = {library: waiting.qsize() for library, waiting in open_tasks.items()}
    with (
        tqdm(total=sum(counts.values()), unit="compilation", dynamic_ncols=True, disable=None) as bar,
        ThreadPoolExecutor(max_workers=max(1, workers * len(counts))) as pool,
    ):

        def work_off(library: str, number: int) -> None:
            log = cache / f"ahead-{library}-{number}.log"
            worker, patience = Worker(library, variables(cache, threads=1), log), _SECONDS + START_SECONDS
            while not (deadline.over or open_tasks[library].empty()):
                try:
                    task, names = open_tasks[library].get_nowait()
                except queue.Empty:
                    break
                try:
                    worker.ask("prepare", deadline.patience(patience), problem=as_message(task.problem), peers=names,
                               directions=list(task.directions), ahead=True)  # fmt: skip
                except WorkerError as error:
                    bar.write(f"{task.problem.name}: {error}")
                    worker = Worker(library, variables(cache, threads=1), log)
                patience = _SECONDS
                bar.update()
            worker.close()

        jobs = [pool.submit(work_off, library, number)
                for library, count in counts.items() for number in range(min(workers, count))]  # fmt: skip
        for job in jobs:
            job.result()
