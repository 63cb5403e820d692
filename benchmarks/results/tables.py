"""Tables of a suite's results, for the terminal and for Markdown."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Sequence

from benchmarks.peers.table import PEERS
from benchmarks.problems import SUITES
from benchmarks.results import schema
from benchmarks.results.schema import Record, ResultFile
from benchmarks.roofline import share
from benchmarks.run.library_runner import DIRECTIONS

Table = list[list[str]]  # the first row is the header


def directions_of(result: ResultFile) -> tuple[str, ...]:
    """Those that were measured."""
    return tuple(direction for direction in DIRECTIONS if any(x.direction == direction for x in result.records))


def peers_of(result: ResultFile, direction: str | None = None) -> tuple[str, ...]:
    """Those that were measured, in the order of `PEERS`."""
    measured = {x.peer for x in result.records if direction in (None, x.direction)}
    return tuple(name for name in PEERS if name in measured)


def is_absent(result: ResultFile, peer: str) -> bool:
    """Whether a peer was to be measured, and was not installed."""
    return any(remark.startswith(f"{peer}: ModuleNotFoundError") for remark in result.about["remarks"])


def tables_of(result: ResultFile) -> list[Table]:
    """What a reader looks for in a suite's results."""
    main = _served_table(result) if SUITES[result.name].served else _speed_table(result)
    return [main, queued] if (queued := _queue_table(result)) else [main]


def _speed_table(result: ResultFile) -> Table:
    """A row for each problem: TFLOP/s of every peer, forward / backward."""
    titles = [PEERS[name].title for name in peers_of(result)]
    found = [["", *titles, f"{PEERS[result.baseline].title} of the roof"]]
    for problem in result.problems:
        cells = []
        for name in peers_of(result):
            pair = [result.find(problem, name, direction) for direction in DIRECTIONS]
            cells.append(" / ".join(map(_tflops, pair)) if any(pair) else "")
        own = [result.find(problem, result.baseline, direction) for direction in DIRECTIONS]
        found.append([problem.name, *cells, " / ".join(_roof(result, record) or "-" for record in own)])
    return found


def _served_table(result: ResultFile) -> Table:
    """A row for each problem: microseconds of every peer, TB/s, and the share of the roof."""
    found = [["", *(PEERS[name].title for name in peers_of(result))]]
    for problem in result.problems:
        cells = []
        for name in peers_of(result):
            record = result.find(problem, name, "forward")
            rate = "" if record is None else f"{record.moved / record.seconds / 1e12:.2f} TB/s"
            parts = [] if record is None else [f"{microseconds(record.seconds)} µs", rate, _roof(result, record)]
            cells.append(", ".join(filter(None, parts)))
        found.append([problem.name, *cells])
    return found


def _queue_table(result: ResultFile) -> Table:
    """Microseconds of the kernels / of a call in a queue, by the wall; empty if queues were not measured."""
    found = []
    for problem, direction in itertools.product(result.problems, directions_of(result)):
        records = [result.find(problem, name, direction) for name in peers_of(result)]
        cells = ["" if x is None or x.queue is None else f"{_us(x.seconds)} / {_us(x.queue.median)}" for x in records]
        if any(cells):
            found.append([f"{direction}; {problem.name}", *cells])
    titles = [PEERS[name].title for name in peers_of(result)]
    return [["µs of the kernels / of a call in a queue", *titles], *found] if found else []


def _roof(result: ResultFile, record: Record | None) -> str:
    """How much of the machine's rates a record reaches; "" if that is not known."""
    if record is None:
        return ""
    reached = share(record.flops, record.moved, record.seconds, result.about.get("rates", {}).values())
    return "" if reached is None else f"{reached:.0%}"


def _tflops(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record.tflops:.0f}" if record.tflops >= 10 else f"{record.tflops:.2g}"


def microseconds(seconds: float) -> str:
    """To three significant digits or more."""
    return f"{seconds * 1e6:.1f}" if seconds < 99.5e-6 else f"{seconds * 1e6:.0f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def sentences(result: ResultFile) -> list[str]:
    """Mean speedups in words, one for each peer and direction, and which peers were not installed."""
    found = []
    for direction in directions_of(result):
        for name in peers_of(result, direction):
            every = (result.speedup(problem, direction, name) for problem in result.problems)
            ratios = [x for x in every if x is not None]
            if name != result.baseline and ratios:
                found.append(
                    f"{direction}: {PEERS[result.baseline].title} is {statistics.geometric_mean(ratios):.2f} times as "
                    f"fast as {PEERS[name].title} in the geometric mean of {len(ratios)}, {min(ratios):.2f} at the "
                    "least."
                )
    absent = [peer.title for name, peer in PEERS.items() if is_absent(result, name)]
    return found + [f"Not installed there: {', '.join(absent)}."] * bool(absent)


def show(path: pathlib.Path) -> None:
    """Prints the results of a suite."""
    result = schema.read(path)
    assert result is not None
    about = result.about
    print(f"{path}: {about['title']}\nrates: {about['rates']}\nclocks: {about['clocks']}")
    for table in tables_of(result):
        print(plain(table))
    print("\n".join(f"method: {method}" for method in sorted({record.method for record in result.records})))
    print("\n".join([*sentences(result), *(remark[:300] for remark in about["remarks"])]))


def plain(table: Sequence[Sequence[str]]) -> str:
    """Aligned columns, for the terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(row.rstrip() for row in rows)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *rest = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([first, "|" + "---|" * len(table[0]), *rest])
