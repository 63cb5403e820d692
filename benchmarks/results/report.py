"""Renders the result files: ``python -m benchmarks report``.

`benchmarks/results/README.md` shows all figures; the README at the top a short table of speeds.
"""

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.environment import PEER_PACKAGES, ROOT
from benchmarks.peers.table import PEERS
from benchmarks.problems import EIGHT_BITS, Problem
from benchmarks.results import schema
from benchmarks.results.schema import FOLDER, Record, ResultFile
from benchmarks.roofline import share
from benchmarks.suites import SUITES, TRAINED

Table = list[list[str]]  # the first row is the header
Results = Mapping[str, Mapping[str, ResultFile]]  # by device and name
DEVICE = "h200"  # of the short table
README = ROOT / "README.md"
PAGE = FOLDER / "README.md"
START, END = "<!-- figures -->", "<!-- /figures -->"
# Columns of the short table; each shows the fastest of some peers, "" for the suite's first.
_COLUMNS = {
    "jflex": ("jflex", ""), "torch-flex": ("torch-flex", "torch-decode", "torch-decode-mask"),
    "jax-cudnn": ("jax-cudnn",), "fa4": ("fa4",), "flashinfer": ("flashinfer", "flashinfer-fa2", "flashinfer-batch"),
}  # fmt: skip
_VARIANTS = {
    "causal": "causal", "sliding_window": "sliding window of 1024", "document_mask": "12 packed documents",
    "softcap": "soft cap", "alibi": "ALiBi",
}  # fmt: skip
# Rows of the short table, shown where a peer was measured: suite, words with the metric, directions, and fields of the
# first problem that it shows.
_ROWS = (
    *(
        (
            "documents" if variant == "document_mask" else "main",
            f"{words}, TFLOP/s forward / backward",
            TRAINED,
            {"variant": variant, "S": 16384, "D": 128},
        )
        for variant, words in _VARIANTS.items()
    ),
    ("decode", "decode, one token against 16384 keys, B 8, 32/8 heads of 128, µs", ("forward",), {"page": 0}),
    *(
        (suite, f"{words}, µs", ("forward",), select)
        for suite, words, select in (
            ("paged", "decode over pages of 64, B 32, 4096 keys, 32/8 heads", {"page": 64}),
            ("prompts", "prompt over pages of 64: 2048 tokens at the end of 8192, 32/8 heads", {"B": 1, "page": 64}),
            ("mixed", "that prompt and 63 decoding steps after 4096 keys", {"lengths": "mixed"}),
            ("cascade", "decode, 64 sequences of 128 keys after 8192 shared ones, 32/8 heads", {"Hkv": 8}),
            ("mla", "MLA decode, B 128, 4096 keys, 16 heads", {"Hq": 16}),
        )
    ),
)  # fmt: skip
# Rows of whole models: the question, in words, and the name of the record of each column.
_WHOLE_MODELS = (
    (
        "training",
        "training step, 1.2 B Llama, S 8192, 12 documents a row (cuDNN: one, and an earlier loss), tokens/s",
        [f"llama3-1b, {name}: tokens" for name in ("jflex", "torch", "cudnn")],
    ),
    (
        "generation",
        "generation with an 8 B Llama, batch 1 (torch: SDPA), tokens/s",
        [f"batch 1, {name}: decode" for name in ("jflex dense", "torch sdpa")],
    ),
)
_METHOD = (
    "The times of a suite are kernel times, from the profiler, with a cold L2. Libraries are timed in turns. "
    "The backward is timed alone. FLOPs are counted alike for every peer: over the blocks of 128 x 128 that the "
    "BlockMask visits, the backward as five GEMMs (2.5 forwards where D = Dv). Of packed documents, the share of these "
    "elements that the mask shows is beside the name: times this share, a rate counts the exact mask. The roof is what "
    "the same run reached in a GEMM of matrices of side 8192, or in a copy where bandwidth is the limit. In decoding, "
    "FLOPs and bytes count visible keys, selected ones where keys are selected, and keys that sequences share once."
)


def tables_of(result: ResultFile) -> list[Table]:
    """The tables of a suite: times or speeds of each problem, and where queues were measured the wall time in one."""
    titles, served = [PEERS[name].title for name in result.peers()], SUITES[result.name].served
    main = [["", *titles, *([] if served else [f"{PEERS[result.baseline].title} of the roof"])]]
    for problem in result.problems:
        records = {
            name: [result.find(problem, name, direction) for direction in SUITES[result.name].directions]
            for name in result.peers()
        }
        if served:
            cells = [_served_cell(result, record) for [record] in records.values()]
        else:
            cells = [" / ".join(map(_tflops, pair)) if any(pair) else "" for pair in records.values()]
            cells.append(
                " / ".join(_roof(result, record) or "-" for record in records.get(result.baseline, [None] * 2))
            )
        visible = min((x.visible for pair in records.values() for x in pair if x is not None), default=1.0)
        main.append([problem.name + (f"; {visible:.0%} visible" if visible < 1.0 else ""), *cells])
    queued = [["µs of the kernels / of a call in a queue", *titles]]
    for problem, direction in itertools.product(result.problems, result.directions):
        found = [result.find(problem, name, direction) for name in result.peers()]
        times = [x and x.queue and f"{x.seconds * 1e6:.0f} / {x.queue.median * 1e6:.0f}" for x in found]
        if any(times):
            queued.append([f"{direction}; {problem.name}", *(x or "" for x in times)])
    return [table for table in (main, queued) if len(table) > 1]


def _served_cell(result: ResultFile, record: Record | None) -> str:
    """Microseconds, TB/s, and the share of the roof."""
    if record is None:
        return ""
    rate = f"{record.moved / record.seconds / 1e12:.2f} TB/s"
    return ", ".join(filter(None, [f"{_microseconds(record.seconds)} µs", rate, _roof(result, record)]))


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
    for direction, name in ((x, name) for x in result.directions for name in result.peers(x)):
        ratios = [x for problem in result.problems if (x := result.speedup(problem, direction, name)) is not None]
        if name != result.baseline and ratios:
            lines.append(
                f"{direction}: {title} is {statistics.geometric_mean(ratios):.2f} times as fast as "
                f"{PEERS[name].title} in the geometric mean of {len(ratios)}, {min(ratios):.2f} at the least."
            )
    for name in result.peers("jvp"):
        both = [[result.find(x, name, y) for y in ("forward", "jvp")] for x in result.problems]
        ratios = [jvp.seconds / forward.seconds for forward, jvp in both if forward and jvp]
        if ratios:
            lines.append(f"{PEERS[name].title}: a jvp takes {min(ratios):.2f} to {max(ratios):.2f} forwards.")
    missing = lambda name: any(x.startswith(f"{name}: ModuleNotFoundError") for x in result.about["remarks"])
    absent = [peer.title for name, peer in PEERS.items() if missing(name)]
    return lines + [f"Not installed there: {', '.join(absent)}."] * bool(absent)


def show(path: pathlib.Path) -> None:
    """Prints the results of a suite."""
    if (result := schema.read(path)) is not None:
        remarks = [remark[:300] for remark in result.about["remarks"]]
        print("\n".join([f"{path}: {result.about['title']}", *map(_markdown, tables_of(result)), *remarks]))
        print("\n".join(sentences(result)))


def _markdown(table: Table) -> str:
    first, *others = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([first, "|" + "---|" * len(table[0]), *others])


def speed_table(results: Results) -> str:
    """The short table, for the README."""
    files = results.get(DEVICE, {})
    if (main := files.get("main")) is None:
        return "No speeds have been measured."
    measured = {peer for suite, *_ in _ROWS if suite in files for peer in files[suite].peers()}
    columns = [name for name, peers in _COLUMNS.items() if measured & {*peers}]
    rows, sources = [["", *(PEERS[name].title for name in columns)]], {}
    for suite, words, directions, select in _ROWS:
        if (result := files.get(suite)) is not None:
            matches = lambda problem, select=select: all(getattr(problem, name) == x for name, x in select.items())
            problem = next(filter(matches, result.problems), None)
            best = [[_fastest(result, problem, _COLUMNS[x], z) for z in directions] for x in columns]
            shown = lambda x, words=words: _microseconds(x.seconds) if words.endswith("µs") else _tflops(x)
            if any(filter(any, best[1:])):
                sources[suite] = result
                rows.append([words, *(" / ".join(map(shown, pair)) if any(pair) else "" for pair in best)])
    for question, words, names in _WHOLE_MODELS:
        if (result := files.get(question)) is not None:
            shown = {x.name: f"{x.value.median:,.0f}" for x in result.records}
            cells, sources[question] = [shown.get(name, "") for name in names], result
            rows.append([words, *(cells + [""] * len(columns))[: len(columns)]])
    about, link = main.about, PAGE.relative_to(ROOT).as_posix()
    return (
        f"One {about['machine']['device']}, bfloat16; S 16384, D 128 and time on the device where a row says nothing "
        f"else; {_software(about['versions'], ('jax', 'torch'), sources.values())}, {_when(sources.values())}. "
        f"[Every figure and how it was measured]({link}).\n\n{_markdown(rows)}"
    )


def _fastest(result: ResultFile, problem: Problem | None, names: Iterable[str], direction: str) -> Record | None:
    """The record of the fastest of some peers, "" for the suite's first; None if none was measured."""
    records = (result.find(problem, name or result.baseline, direction) for name in names)
    return min(filter(None, records), key=lambda x: x.seconds, default=None)


def _software(versions: Mapping[str, str], names: Sequence[str], files: Iterable[ResultFile]) -> str:
    """Versions of packages that are named, and of the peers in each of the files."""
    peers = {(name, x.about["versions"].get(name)) for name in PEER_PACKAGES for x in files}
    pairs = [(name, versions.get(name)) for name in names] + sorted(x for x in peers if x[1])
    return ", ".join(f"{name} {version}" for name, version in pairs if version)


def _when(files: Iterable[ResultFile]) -> str:
    """The days of the runs whose figures files hold."""
    dates = sorted({run["date"][:10] for x in files for run in (x.about, *x.about.get("before", []))})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def readme_with_table(readme: str, results: Results) -> str:
    """The README with the table that the result files give; a `ValueError` if its markers are missing."""
    before, opened, inside = readme.partition(START)
    _, closed, after = inside.partition(END)
    if not (opened and closed):
        raise ValueError(f"README.md lacks the markers {START} and {END}.")
    return f"{before}{START}\n{speed_table(results)}\n{END}{after}"


def page(results: Results) -> str:
    """The page with all figures."""
    head = "# Results\n\nWritten by `python -m benchmarks report` from the files beside this one; do not edit."
    devices = sorted(results, key=lambda device: device != DEVICE)
    sections = [_section(device, list(results[device].values())) for device in devices]
    return "\n\n".join([head, *sections]) + "\n"


def _section(device: str, files: Sequence[ResultFile]) -> str:
    order = list(SUITES)
    suites = sorted((x for x in files if x.name in SUITES), key=lambda x: order.index(x.name))
    questions = [x for x in files if x.name not in SUITES]
    machine, versions = files[0].about["machine"], (suites or files)[0].about["versions"]
    name = machine.get("device") or f"{machine['processor']}, {machine['cores']} cores"
    software = _software(versions, ("python", "jax", "torch"), files)
    lines = [
        f"## {name}",
        f"{software}; {_when(files)}. Medians; the quartiles of the repetitions are in brackets. The command, commit "
        f"and machine of each figure are in `{device}/*.json`.",
        *([_METHOD] if suites else []),
    ]
    return "\n\n".join([*lines, *map(_suite, suites), *map(_question, questions)])


def _suite(result: ResultFile) -> str:
    suite = SUITES[result.name]
    shown = "device time, TB/s that must move, share of the roof"
    kind = shown if suite.served else f"TFLOP/s over visited blocks, {' / '.join(suite.directions)}"
    lines = [f"### `{result.name}`: {suite.title}", f"{result.problems[0].dtype}; {kind}"]
    lines += map(_markdown, tables_of(result))
    return "\n\n".join(filter(None, [*lines, "\n".join(f"* {sentence}" for sentence in sentences(result))]))


def _question(result: ResultFile) -> str:
    shown = [x for x in result.records if result.name != "numerics" or x.unit == "x"]
    table = "\n\n".join(map(_markdown, question_tables(result.name, shown)))
    remarks = "\n".join(f"* {remark}" for remark in result.about["remarks"])
    parts = [f"### `{result.name}`: {result.about['title']}", table, remarks]
    return "\n\n".join(filter(None, parts))


def question_tables(name: str, records: Sequence[Record]) -> list[Table]:
    """A table of the records that are named ``"row: column"``, and a list of the others.

    All records of `eight_bits` are in the table, and of `context` the rows that have a time.
    """
    row = lambda x: x.name.split(": ", 1)[0]
    timed = {row(x) for x in records if name == "context" and x.name.endswith(": time")}
    crossed = [x for x in records if name == "eight_bits" or row(x) in timed]
    cells = {tuple(x.name.split(": ", 1)): _measured(x) for x in crossed}
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True)) if cells else ([], [])
    table = [["", *columns], *([row, *(cells.get((row, x), "") for x in columns)] for row in rows)]
    listed = [["", "measured"], *([x.name, _measured(x)] for x in records if x not in crossed)]
    return [table for table in (table, listed) if len(table) > 1]


def _measured(record: Record) -> str:
    value = record.value
    spread = f" ({_number(value.low)} to {_number(value.high)})" if value.runs > 1 and value.low != value.high else ""
    return f"{_number(value.median)} {record.unit}".rstrip() + spread


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def documents() -> dict[pathlib.Path, str]:
    """Content of each generated file."""
    results = schema.read_all()
    return {README: readme_with_table(README.read_text(), results), PAGE: page(results)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds no options."""


def run(options: argparse.Namespace) -> None:
    """Writes the documents."""
    for path, text in documents().items():
        path.write_text(text)
