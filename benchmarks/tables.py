"""Tables of a suite's results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.peers import PEERS
from benchmarks.problems import Problem
from benchmarks.records import Record, SuiteResult
from benchmarks.roofline import share
from benchmarks.side import DIRECTIONS
from benchmarks.summary import geometric_mean

_ABSENT = "not installed there"


def directions_of(result: SuiteResult) -> tuple[str, ...]:
    """Those that were measured."""
    return tuple(direction for direction in DIRECTIONS if any(x.direction == direction for x in result.records))


def peers_of(result: SuiteResult, direction: str) -> tuple[str, ...]:
    """Those that were measured, in the order of `PEERS`."""
    seen = {record.peer for record in result.records if record.direction == direction}
    return tuple(name for name in PEERS if name in seen)


def header(result: SuiteResult, direction: str) -> list[str]:
    """Of the columns of `rows`; peers by their short names, for the terminal."""
    return [direction, *peers_of(result, direction), "of the roof"]


def rows(result: SuiteResult, direction: str, problems: Sequence[Problem] | None = None) -> list[list[str]]:
    """A row for each problem: TFLOP/s of every peer, and how many times faster the first of the peers is."""
    peers = peers_of(result, direction)
    found = []
    for problem in problems or result.problems:
        cells = [_cell(result, problem, direction, name) for name in peers]
        if any(cells):
            found.append([problem.name, *cells, _roof(result, problem, direction)])
    return found


def _roof(result: SuiteResult, problem: Problem, direction: str) -> str:
    """How much of the machine's rates the first of the peers reaches."""
    record = result.find(problem, result.first, direction)
    if record is None:
        return "-"
    reached = share(record.flops, record.moved, record.seconds.median, result.about.get("rates", {}).values())
    return "-" if reached is None else f"{reached:.0%}"


def _cell(result: SuiteResult, problem: Problem, direction: str, peer: str) -> str:
    record = result.find(problem, peer, direction)
    if record is None:
        return ""
    text = _number(record.tflops)
    ratio = None if peer == result.first else result.ratio(problem, direction, result.first, peer)
    return text if ratio is None else f"{text} ({ratio:.2f}x)"


def _number(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def pair_header(result: SuiteResult) -> list[str]:
    """Of the columns of `pair_rows`."""
    return ["", *(PEERS[name].title for name in _all_peers(result)), f"{PEERS[result.first].title} of the roof"]


def pair_rows(result: SuiteResult) -> list[list[str]]:
    """A row for each problem: TFLOP/s of every peer, forward / backward."""
    number = lambda record: "-" if record is None else _number(record.tflops)
    found = []
    for problem in result.problems:
        cells = []
        for name in _all_peers(result):
            pair = [result.find(problem, name, direction) for direction in DIRECTIONS]
            cells.append(" / ".join(map(number, pair)) if any(pair) else "")
        roofs = " / ".join(_roof(result, problem, direction) for direction in DIRECTIONS)
        found.append([problem.name, *cells, roofs])
    return found


def served_header(result: SuiteResult) -> list[str]:
    """Of the columns of `served_rows`."""
    return ["", *(PEERS[name].title for name in _all_or_absent(result))]


def served_rows(result: SuiteResult) -> list[list[str]]:
    """A row for each problem: microseconds of every peer, TB/s, and the share of the roof."""
    found = []
    for problem in result.problems:
        every = [result.find(problem, name, "forward") for name in _all_or_absent(result)]
        absent = [_ABSENT if is_absent(result, name) else "" for name in _all_or_absent(result)]
        cells = [gap if record is None else _served_cell(result, record)
                 for record, gap in zip(every, absent, strict=True)]  # fmt: skip
        found.append([problem.name, *cells])
    return found


def _served_cell(result: SuiteResult, record: Record) -> str:
    rates = result.about.get("rates", {}).values()
    reached = share(record.flops, record.moved, record.seconds.median, rates)
    text = f"{_microseconds_of(record.seconds.median)} µs, {record.moved / record.seconds.median / 1e12:.2f} TB/s"
    return text if reached is None else f"{text}, {reached:.0%}"


def _microseconds_of(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 99.5e-6 else f"{seconds * 1e6:.0f}"


def _all_or_absent(result: SuiteResult) -> tuple[str, ...]:
    seen = _all_peers(result)
    return tuple(name for name in PEERS if name in seen or is_absent(result, name))


def is_absent(result: SuiteResult, peer: str) -> bool:
    """Whether a peer was asked, and is not installed."""
    return any(remark.startswith(f"{peer}: ModuleNotFoundError") for remark in result.about["remarks"])


def queue_rows(result: SuiteResult) -> list[list[str]]:
    """Microseconds of the device / of a call in a queue, by the wall; a row for each problem and direction."""
    found = []
    for problem, direction in itertools.product(result.problems, directions_of(result)):
        every = [result.find(problem, name, direction) for name in _all_peers(result)]
        cells = ["" if record is None or record.queue is None else _microseconds(record) for record in every]
        if any(cells):
            found.append([f"{direction}; {problem.name}", *cells])
    return found


def _microseconds(record: Record) -> str:
    return f"{record.seconds.median * 1e6:.0f} / {record.queue.median * 1e6:.0f}"


def queue_header(result: SuiteResult) -> list[str]:
    """Of the columns of `queue_rows`."""
    return ["µs of the kernels / of a call in a queue", *(PEERS[name].title for name in _all_peers(result))]


def _all_peers(result: SuiteResult) -> tuple[str, ...]:
    seen = {record.peer for record in result.records}
    return tuple(name for name in PEERS if name in seen)


def means(result: SuiteResult, direction: str) -> dict[str, tuple[float, float, int]]:
    """Over the problems that the first and a peer share: geometric mean and least of the ratios, and their number."""
    found = {}
    for name in peers_of(result, direction):
        every = (result.ratio(problem, direction, result.first, name) for problem in result.problems)
        ratios = [x for x in every if x is not None]
        if name != result.first and ratios:
            found[name] = (geometric_mean(ratios), min(ratios), len(ratios))
    return found


def sentences(result: SuiteResult) -> list[str]:
    """The means in words, a line for each peer and direction, and who could not be measured."""
    first = PEERS[result.first].title
    told = [
        f"{direction}: {first} is {mean:.2f} times as fast as {PEERS[name].title} in the geometric mean of {count}, "
        f"{least:.2f} at the least."
        for direction in directions_of(result)
        for name, (mean, least, count) in means(result, direction).items()
    ]
    in_columns = any(problem.served for problem in result.problems)
    absent = [] if in_columns else [peer.title for name, peer in PEERS.items() if is_absent(result, name)]
    return told + [f"Not installed there: {', '.join(absent)}."] * bool(absent)


def plain(table: Sequence[Sequence[str]]) -> str:
    """Columns in line, for the terminal."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in table)  # fmt: skip


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table of the README; the first row is the header."""
    first, *rest = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([first, "|" + "---|" * len(table[0]), *rest])
