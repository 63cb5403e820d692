"""Renders the result files: ``python -m benchmarks report``.

`benchmarks/results/README.md` shows all figures and targets; the README at the top a short table of speeds.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.environment import ROOT
from benchmarks.peers.table import PEERS
from benchmarks.problems import SUITES
from benchmarks.results import schema, tables, targets
from benchmarks.results.schema import FOLDER, Record, ResultFile
from benchmarks.results.targets import DEVICE, Outcome, Results
from benchmarks.run.library_runner import DIRECTIONS

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
_METHOD = (
    "Times of suites are those of the kernels alone, as the profilers see them, with a cold L2; the libraries take "
    "turns. The backward is measured without the forward. FLOPs are counted for every peer over the blocks of "
    "128 x 128 that the BlockMask visits, and as five GEMMs for the backward, 2.5 forwards where D = Dv. The roof is "
    "what the same run reached in a GEMM of matrices of side 8192, or in a copy if bandwidth is the limit. Where "
    "queries continue sequences, as in decoding, the work is that of visible keys, and keys that sequences share "
    "count once."
)


def speed_table(results: Results) -> str:
    """The table for the README."""
    suites = results.get(DEVICE, {})
    main = suites.get("main")
    if main is None:
        return "No speeds have been measured."
    rows = [row for direction in DIRECTIONS for row in _speed_rows(main, direction)]
    rows += _served_rows(suites.get("decode"), "decode, one token against 16384 keys, B 8, 32/8 heads of 128", 0)
    rows += _served_rows(suites.get("paged"), "the same from pages of 64, 4096 keys, B 32", 64)
    measured = [i for i, name in enumerate(_COLUMNS) if name in main.peers]
    header = ["", *(PEERS[_COLUMNS[i]].title for i in measured)]
    table = tables.markdown([header, *([row[0], *(row[1 + i] for i in measured)] for row in rows)])
    about = main.about
    link = PAGE.relative_to(ROOT).as_posix()
    return (
        f"Device time on {about['machine']['device']}, bfloat16, S 16384, D 128, jax {about['versions']['jax']}, "
        f"torch {about['versions']['torch']}, {about['date'][:10]}. [Every figure and how it was measured]({link}).\n\n"
        f"{table}"
    )


def _speed_rows(main: ResultFile, direction: str) -> list[list[str]]:
    rows = []
    for variant, words in _VARIANTS.items():
        problems = (x for x in main.problems if (x.variant, x.S, x.D) == (variant, 16384, 128))
        if (problem := next(problems, None)) is not None:
            records = [main.find(problem, name, direction) for name in _COLUMNS]
            cells = ["" if record is None else f"{record.tflops:.0f}" for record in records]
            rows.append([f"{words}, {direction}, TFLOP/s", *cells])
    return rows


def _served_rows(result: ResultFile | None, words: str, page: int) -> list[list[str]]:
    problems = [] if result is None else [x for x in result.problems if x.page == page]
    if result is None or not problems:
        return []
    records = [_served_record(result, name, problems) for name in _COLUMNS]
    return [[f"{words}, µs", *("" if x is None else tables.microseconds(x.seconds) for x in records)]]


def _served_record(result: ResultFile, peer: str, problems: Sequence[schema.Problem]) -> Record | None:
    names = ("torch-decode", "torch-decode-mask") if peer == "torch-flex" else (peer,)
    records = [record for name in names if (record := result.find(problems[0], name, "forward")) is not None]
    return min(records, key=lambda record: record.seconds, default=None)


def page(results: Results) -> str:
    """The page with all figures."""
    head = "# Results\n\nWritten by `python -m benchmarks report` from the files beside this one; do not edit."
    ordered = {device: results[device] for device in sorted(results, key=lambda x: x != DEVICE)}
    sections = [_section(device, list(files.values())) for device, files in ordered.items()]
    return "\n\n".join([head, *sections, _targets_section(targets.outcomes(results))]) + "\n"


def _section(device: str, files: Sequence[ResultFile]) -> str:
    order = list(SUITES)
    suites = sorted((x for x in files if x.name in SUITES), key=lambda x: order.index(x.name))
    questions = [x for x in files if x.name not in SUITES]
    machine, versions = files[0].about["machine"], (suites or files)[0].about["versions"]
    name = machine.get("device") or f"{machine['processor']}, {machine['cores']} cores"
    software = ", ".join(f"{x} {versions[x]}" for x in ("python", "jax", "torch") if x in versions)
    dates = sorted({x.about["date"][:10] for x in files})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    lines = [
        f"## {name}",
        f"{software}; {when}. Medians; the quartiles of the repetitions are in brackets. The command, commit and "
        f"machine of each figure are in `{device}/*.json`.",
        *([_METHOD] if suites else []),
    ]
    return "\n\n".join([*lines, *(_suite(device, x) for x in suites), *map(_question, questions)])


def _suite(device: str, result: ResultFile) -> str:
    kind = (
        "device time, TB/s that must move, share of the roof"
        if SUITES[result.name].served
        else ("TFLOP/s over visited blocks, forward / backward")
    )
    lines = [f"### `{result.name}`: {SUITES[result.name].title}", f"{result.problems[0].dtype}; {kind}"]
    lines += [tables.markdown(table) for table in tables.tables_of(result)]
    plots = sorted((FOLDER / device).glob(f"{result.name}_by_*.png"))
    lines += [f"![{path.stem}]({path.relative_to(FOLDER).as_posix()})" for path in plots]
    lines.append("\n".join(f"* {sentence}" for sentence in tables.sentences(result)))
    return "\n\n".join(filter(None, lines))


def _question(result: ResultFile) -> str:
    title = result.about["title"]
    shown = [x for x in result.records if result.name != "numerics" or x.unit == "x"]
    table = tables.markdown([["", "measured"], *([x.name, _measured(x)] for x in shown)])
    remarks = "\n".join(f"* {remark}" for remark in result.about["remarks"])
    return "\n\n".join(filter(None, [f"### `{result.name}`: {title}", table, remarks]))


def _measured(record: Record) -> str:
    value, unit = record.value, f" {record.unit}" if record.unit else ""
    spread = f" ({_number(value.low)} to {_number(value.high)})" if value.runs > 1 and value.low != value.high else ""
    return f"{_number(value.median)}{unit}{spread}"


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _targets_section(outcomes: Sequence[Outcome]) -> str:
    rows = [[x.file, x.name, _value(x), _limit(x)] for x in outcomes if x.value is not None]
    head = "## Targets\n\nLimits that the figures above should keep, from `benchmarks/results/targets.py`."
    missing = len(outcomes) - len(rows)
    more = f"\n\n{missing} more targets have no figure: a problem or a peer was not measured." if missing else ""
    return f"{head}\n\n{tables.markdown([['file', 'figure', 'measured', 'target'], *rows])}{more}"


def _value(outcome: Outcome) -> str:
    unit = f" {outcome.unit}" if outcome.unit else ""
    return f"missing: {outcome.missing}" if outcome.value is None else f"{_number(outcome.value)}{unit}"


def _limit(outcome: Outcome) -> str:
    limits = {"at least": outcome.at_least, "at most": outcome.at_most}
    text = ", ".join(f"{words} {_number(x)}" for words, x in limits.items() if x is not None)
    return text if outcome.reached else f"{text}: **missed**"


def readme_with_table(readme: str, results: Results) -> str:
    """The README with the table that the result files give.

    Raises:
      ValueError: The markers are missing.
    """
    before, found, rest = readme.partition(START)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"README.md lacks the markers {START} and {END}.")
    return f"{before}{START}\n{speed_table(results)}\n{END}{after}"


def documents(results: Results | None = None) -> dict[pathlib.Path, str]:
    """What each generated file should hold."""
    results = schema.read_all() if results is None else results
    return {README: readme_with_table(README.read_text(), results), PAGE: page(results)}


def _draw_plots() -> None:
    from benchmarks.results import plots

    for device, files in schema.read_all().items():
        for result in files.values():
            if result.name in SUITES and not SUITES[result.name].served:
                plots.draw(result, FOLDER / device)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document differs")
    parser.add_argument("--targets", action="store_true", help="print each target; exit 1 if one is missed")
    parser.add_argument("--plots", action="store_true", help="draw the plots of the page, too, with matplotlib")
    options = parser.parse_args(words)
    if options.plots:
        _draw_plots()
    if options.targets:
        outcomes = targets.outcomes(schema.read_all())
        print("\n".join(f"{x.file}: {x.name}: {_value(x)}, {_limit(x)}" for x in outcomes))
        sys.exit(0 if all(x.reached for x in outcomes) else 1)
    expected = documents()
    differing = [path for path, text in expected.items() if not path.exists() or path.read_text() != text]
    if options.check and differing:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in differing)
        sys.exit(f"Not as the result files say: {names}. Run `python -m benchmarks report`.")
    for path in differing:
        path.write_text(expected[path])
