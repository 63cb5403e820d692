"""Renders the result files: ``python -m benchmarks report``.

`benchmarks/results/README.md` shows all figures and targets; the README at the top a short table of speeds.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.peers.table import PEERS
from benchmarks.problems import EIGHT_BITS
from benchmarks.results import schema, targets
from benchmarks.results.schema import FOLDER, Record, ResultFile
from benchmarks.results.targets import DEVICE, Outcome, Results
from benchmarks.roofline import share
from benchmarks.run.library_runner import DIRECTIONS
from benchmarks.suites import SUITES

Table = list[list[str]]  # the first row is the header
README = ROOT / "README.md"
PAGE = FOLDER / "README.md"
START, END = "<!-- figures -->", "<!-- /figures -->"
_COLUMNS = ("jflex", "torch-flex", "jax-cudnn", "fa4")  # of the short table
_VARIANTS = {
    "causal": "causal",
    "sliding_window": "sliding window of 1024",
    "document_mask": "12 packed documents",
    "softcap": "soft cap",
    "alibi": "ALiBi",
}
# Rows of whole models: the question, in words, and the name of the record of each column.
_WHOLE_MODELS = (
    (
        "training",
        "training step of a 1.2 B Llama, S 8192, 12 documents a row (cuDNN: one), tokens/s",
        {x: f"llama3-1b, {name}: tokens" for x, name in zip(_COLUMNS, ("jflex", "torch", "cudnn"), strict=False)},
    ),
    (
        "generation",
        "generation with an 8 B Llama, batch 1 (torch: SDPA), tokens/s",
        {x: f"batch 1, {name}: decode" for x, name in zip(_COLUMNS, ("jflex dense", "torch sdpa"), strict=False)},
    ),
    ("engine", "serving it to 64 clients, 1024 tokens in, 256 out, tokens/s", {"jflex": "64 clients: output"}),
    (
        "context",
        "causal attention on two GPUs, S 262144, 32/8 heads, forward and backward, speed over one",
        {"jflex": "causal, forward and backward, 2 GPUs, all_gather, balanced: speed-up"},
    ),
)
# Rows of a problem that no peer of the table computes, and fields of it.
_LATENT = "latent attention (MLA), one token against 4096 keys, B 128, 128 heads, TFLOP/s", {"Hq": 128, "T": 1}
_FP8 = (
    "causal, forward, queries and keys of eight bits, TFLOP/s",
    {"variant": "causal", "D": 128, "keys": "float8_e4m3fn"},
)
_CROSSED = ("eight_bits",)  # questions whose records are named by row and column
_METHOD = (
    "The times of a suite are those of its kernels, from the profiler, with a cold L2. Libraries are timed in turns. "
    "The backward is timed alone. FLOPs are counted alike for every peer: over the blocks of 128 x 128 that the "
    "BlockMask visits, the backward as five GEMMs (2.5 forwards where D = Dv). The roof is what the same run reached "
    "in a GEMM of matrices of side 8192, or in a copy where bandwidth is the limit. In decoding, FLOPs and bytes are "
    "those of visible keys, of selected ones where keys are selected, and keys that sequences share count once."
)


# Tables of a suite, for the terminal and for Markdown.


def tables_of(result: ResultFile) -> list[Table]:
    """The tables of a suite."""
    main = _served_table(result) if SUITES[result.name].served else _speed_table(result)
    return [main, queued] if len(queued := _queue_table(result)) > 1 else [main]


def _titles(result: ResultFile) -> list[str]:
    return [PEERS[name].title for name in result.peers()]


def _speed_table(result: ResultFile) -> Table:
    """A row for each problem: TFLOP/s of every peer, forward / backward."""
    rows = [["", *_titles(result), f"{PEERS[result.baseline].title} of the roof"]]
    for problem in result.problems:
        pair = lambda name, problem=problem: [result.find(problem, name, direction) for direction in DIRECTIONS]
        cells = [" / ".join(map(_tflops, pair(name))) if any(pair(name)) else "" for name in result.peers()]
        roof = " / ".join(_roof(result, record) or "-" for record in pair(result.baseline))
        rows.append([problem.name, *cells, roof])
    return rows


def _served_table(result: ResultFile) -> Table:
    """A row for each problem: microseconds of every peer, TB/s, and the share of the roof."""

    def cell(record: Record | None) -> str:
        if record is None:
            return ""
        rate = f"{record.moved / record.seconds / 1e12:.2f} TB/s"
        return ", ".join(filter(None, [f"{_microseconds(record.seconds)} µs", rate, _roof(result, record)]))

    rows = [[x.name, *(cell(result.find(x, name, "forward")) for name in result.peers())] for x in result.problems]
    return [["", *_titles(result)], *rows]


def _queue_table(result: ResultFile) -> Table:
    """Microseconds of the kernels / of a call in a queue, by the wall, where queues were measured."""
    rows = [["µs of the kernels / of a call in a queue", *_titles(result)]]
    for problem, direction in itertools.product(result.problems, result.directions):
        records = [result.find(problem, name, direction) for name in result.peers()]
        times = [x and x.queue and f"{x.seconds * 1e6:.0f} / {x.queue.median * 1e6:.0f}" for x in records]
        if any(times):
            rows.append([f"{direction}; {problem.name}", *(x or "" for x in times)])
    return rows


def _roof(result: ResultFile, record: Record | None) -> str:
    """Share of the machine's rates; "" if unknown."""
    if record is None:
        return ""
    at_16_bits = record.flops
    if record.problem is not None and record.problem.keys in EIGHT_BITS and not record.problem.page:
        at_16_bits *= 0.75  # QK^T, half of them where D = Dv, runs at twice the rate
    reached = share(at_16_bits, record.moved, record.seconds, result.about.get("rates", {}).values())
    return "" if reached is None else f"{reached:.0%}"


def _tflops(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record.tflops:.0f}" if record.tflops >= 10 else f"{record.tflops:.2g}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 99.5e-6 else f"{seconds * 1e6:.0f}"


def sentences(result: ResultFile) -> list[str]:
    """Mean speedups in words, one for each peer and direction, and which peers were not installed."""
    lines, title = [], PEERS[result.baseline].title
    for direction in result.directions:
        for name in result.peers(direction):
            every = (result.speedup(problem, direction, name) for problem in result.problems)
            ratios = [x for x in every if x is not None]
            if name != result.baseline and ratios:
                mean, count = statistics.geometric_mean(ratios), len(ratios)
                lines.append(
                    f"{direction}: {title} is {mean:.2f} times as fast as {PEERS[name].title} in the geometric mean of "
                    f"{count}, {min(ratios):.2f} at the least."
                )
    absent = [peer.title for name, peer in PEERS.items() if result.lacks(name)]
    return lines + [f"Not installed there: {', '.join(absent)}."] * bool(absent)


def show(path: pathlib.Path) -> None:
    """Prints the results of a suite."""
    result = schema.read(path)
    assert result is not None
    about = result.about
    print(f"{path}: {about['title']}\nrates: {about['rates']}\nclocks: {about['clocks']}")
    for table in tables_of(result):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            print("  ".join(map(str.ljust, row, widths)).rstrip())
    print("\n".join(f"method: {method}" for method in sorted({record.method for record in result.records})))
    print("\n".join([*sentences(result), *(remark[:300] for remark in about["remarks"])]))


def _markdown(table: Table) -> str:
    first, *others = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([first, "|" + "---|" * len(table[0]), *others])


# The short table of the README.


def speed_table(results: Results) -> str:
    """The table for the README."""
    suites = results.get(DEVICE, {})
    main = suites.get("main")
    if main is None:
        return "No speeds have been measured."
    columns = [name for name in _COLUMNS if name in main.peers()]
    rows = [["", *(PEERS[name].title for name in columns)]]
    for direction, (variant, words) in itertools.product(DIRECTIONS, _VARIANTS.items()):
        for problem in (x for x in main.problems if (x.variant, x.S, x.D) == (variant, 16384, 128)):
            records = [main.find(problem, name, direction) for name in columns]
            cells = ["" if record is None else f"{record.tflops:.0f}" for record in records]
            rows.append([f"{words}, {direction}, TFLOP/s", *cells])
    rows += _served_row(
        suites.get("decode"), columns, "decode, one token against 16384 keys, B 8, 32/8 heads of 128", 0
    )
    rows += _served_row(suites.get("paged"), columns, "the same from pages of 64, 4096 keys, B 32", 64)
    rows += _single_row(suites.get("mla"), len(columns), *_LATENT)
    rows += _single_row(suites.get("fp8"), len(columns), *_FP8)
    for question, words, names in _WHOLE_MODELS:
        if (result := suites.get(question)) is not None:
            shown = lambda record: f"{record.value.median:,.{2 if record.unit == 'x' else 0}f}"
            cells = {record.name: shown(record) for record in result.records}
            rows.append([words, *(cells.get(names.get(column, ""), "") for column in columns)])
    named = ("main", "decode", "paged", "mla", "fp8", *(question for question, *_ in _WHOLE_MODELS))
    days = _when([suites[name] for name in named if name in suites])
    about, link = main.about, PAGE.relative_to(ROOT).as_posix()
    return (
        f"One {about['machine']['device']}, bfloat16; S 16384, D 128 and time on the device where a row says nothing "
        f"else; jax {about['versions']['jax']}, torch {about['versions']['torch']}, {days}. "
        f"[Every figure and how it was measured]({link}).\n\n{_markdown(rows)}"
    )


def _served_row(result: ResultFile | None, columns: Sequence[str], words: str, page: int) -> Table:
    """One row: the best time of each peer at the first problem with such pages."""
    problem = next((x for x in result.problems if x.page == page), None) if result else None
    if result is None or problem is None:
        return []
    row = [f"{words}, µs"]
    for column in columns:
        names = ("torch-decode", "torch-decode-mask") if column == "torch-flex" else (column,)
        records = (result.find(problem, name, "forward") for name in names)
        seconds = [record.seconds for record in records if record is not None]
        row.append(_microseconds(min(seconds)) if seconds else "")
    return [row]


def _single_row(result: ResultFile | None, columns: int, words: str, fields: Mapping[str, Any]) -> Table:
    """One row without peers: the suite's first peer at the problem with such fields."""
    matches = lambda problem: all(getattr(problem, name) == x for name, x in fields.items())
    problem = next(filter(matches, result.problems), None) if result else None
    record = result.find(problem, result.baseline, "forward") if result and problem else None
    return [] if record is None else [[words, f"{record.tflops:.0f}", *[""] * (columns - 1)]]


def _when(files: Sequence[ResultFile]) -> str:
    """The days of the runs whose figures files hold."""
    dates = sorted({run["date"][:10] for x in files for run in (x.about, *x.about.get("before", []))})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def readme_with_table(readme: str, results: Results) -> str:
    """The README with the table that the result files give.

    Raises:
      ValueError: The markers are missing.
    """
    before, opened, inside = readme.partition(START)
    _, closed, after = inside.partition(END)
    if not (opened and closed):
        raise ValueError(f"README.md lacks the markers {START} and {END}.")
    return f"{before}{START}\n{speed_table(results)}\n{END}{after}"


# The page with all figures.


def page(results: Results) -> str:
    """The page with all figures."""
    head = "# Results\n\nWritten by `python -m benchmarks report` from the files beside this one; do not edit."
    devices = sorted(results, key=lambda device: device != DEVICE)
    sections = [_section(device, list(results[device].values())) for device in devices]
    return "\n\n".join([head, *sections, _targets_section(targets.outcomes(results))]) + "\n"


def _section(device: str, files: Sequence[ResultFile]) -> str:
    order = list(SUITES)
    suites = sorted((x for x in files if x.name in SUITES), key=lambda x: order.index(x.name))
    questions = [x for x in files if x.name not in SUITES]
    machine, versions = files[0].about["machine"], (suites or files)[0].about["versions"]
    name = machine.get("device") or f"{machine['processor']}, {machine['cores']} cores"
    software = ", ".join(f"{x} {versions[x]}" for x in ("python", "jax", "torch") if x in versions)
    lines = [
        f"## {name}",
        f"{software}; {_when(files)}. Medians; the quartiles of the repetitions are in brackets. The command, commit "
        f"and machine of each figure are in `{device}/*.json`.",
        *([_METHOD] if suites else []),
    ]
    return "\n\n".join([*lines, *(_suite(device, x) for x in suites), *(_question(device, x) for x in questions)])


def _suite(device: str, result: ResultFile) -> str:
    suite, kind = SUITES[result.name], "TFLOP/s over visited blocks, forward / backward"
    if suite.served:
        kind = "device time, TB/s that must move, share of the roof"
    lines = [f"### `{result.name}`: {suite.title}", f"{result.problems[0].dtype}; {kind}"]
    lines += map(_markdown, tables_of(result))
    lines += _plots(device, result)
    lines.append("\n".join(f"* {sentence}" for sentence in sentences(result)))
    return "\n\n".join(filter(None, lines))


def _question(device: str, result: ResultFile) -> str:
    shown = [x for x in result.records if result.name != "numerics" or x.unit == "x"]
    table = "\n\n".join(map(_markdown, _of_question(result.name, shown)))
    remarks = "\n".join(f"* {remark}" for remark in result.about["remarks"])
    parts = [f"### `{result.name}`: {result.about['title']}", table, *_plots(device, result), remarks]
    return "\n\n".join(filter(None, parts))


def _of_question(name: str, records: Sequence[Record]) -> list[Table]:
    """Records named by row and column as a table, as those of several GPUs with a time; the others as a list."""
    if name in _CROSSED:
        return [_crossed(records)]
    row = lambda x: x.name.split(": ", 1)[0]
    timed = {row(x) for x in records if name == "context" and x.name.endswith(": time")}
    cases = [x for x in records if row(x) in timed]
    listed = [_named(x) for x in records if row(x) not in timed]
    return [table for table in (_crossed(cases) if cases else [], [["", "measured"], *listed]) if len(table) > 1]


def _named(record: Record) -> list[str]:
    return [record.name, _measured(record)]


def _crossed(records: Sequence[Record]) -> Table:
    """Table of records that are named ``"row: column"``."""
    cells = {tuple(x.name.split(": ", 1)): _measured(x) for x in records}
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    return [["", *columns], *([row, *(cells.get((row, x), "") for x in columns)] for row in rows)]


def _plots(device: str, result: ResultFile) -> list[str]:
    paths = sorted((FOLDER / device).glob(f"{result.name}_by_*.png"))
    return [f"![{path.stem}]({path.relative_to(FOLDER).as_posix()})" for path in paths]


def _measured(record: Record) -> str:
    value = record.value
    spread = f" ({_number(value.low)} to {_number(value.high)})" if value.runs > 1 and value.low != value.high else ""
    return f"{_number(value.median)} {record.unit}".rstrip() + spread


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _targets_section(outcomes: Sequence[Outcome]) -> str:
    rows = [[x.file, x.name, _value(x), _limit(x)] for x in outcomes if x.value is not None]
    head = "## Targets\n\nLimits that the figures above should keep, from `benchmarks/results/targets.py`."
    missing = len(outcomes) - len(rows)
    more = f"\n\n{missing} more targets have no figure: a problem or a peer was not measured." if missing else ""
    return f"{head}\n\n{_markdown([['file', 'figure', 'measured', 'target'], *rows])}{more}"


def _value(outcome: Outcome) -> str:
    value, unit = outcome.value, outcome.unit
    return f"missing: {outcome.missing}" if value is None else f"{_number(value)} {unit}".rstrip()


def _limit(outcome: Outcome) -> str:
    limits = {"at least": outcome.target.at_least, "at most": outcome.target.at_most}
    text = ", ".join(f"{words} {_number(x)}" for words, x in limits.items() if x is not None)
    return text if outcome.reached else f"{text}: **missed**"


# The command.


def documents() -> dict[pathlib.Path, str]:
    """Content of each generated file."""
    results = schema.read_all()
    return {README: readme_with_table(README.read_text(), results), PAGE: page(results)}


def _draw_plots() -> None:
    from benchmarks.results import plots

    for device, files in schema.read_all().items():
        for result in files.values():
            if result.name in SUITES and not SUITES[result.name].served:
                plots.draw(result, FOLDER / device)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document differs")
    parser.add_argument("--targets", action="store_true", help="print each target; exit 1 if one is missed")
    parser.add_argument("--plots", action="store_true", help="draw the plots of the page, too, with matplotlib")


def run(options: argparse.Namespace) -> None:
    """Writes the documents, or checks them."""
    if options.plots:
        _draw_plots()
    if options.targets:
        outcomes = targets.outcomes(schema.read_all())
        print("\n".join(f"{x.file}: {x.name}: {_value(x)}, {_limit(x)}" for x in outcomes))
        sys.exit(0 if all(x.reached for x in outcomes) else 1)
    differing = {path: text for path, text in documents().items() if not path.exists() or path.read_text() != text}
    if options.check and differing:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in differing)
        sys.exit(f"Not as the result files say: {names}. Run `python -m benchmarks report`.")
    for path, text in differing.items():
        path.write_text(text)
