"""Renders figures from the result files: ``python -m benchmarks.report [--check | --bars]``.

The README gets what was asked and what a reader looks for first; `benchmarks/results/README.md` gets everything.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from benchmarks import bars, hopper_bars, records, tables
from benchmarks.environment import ROOT
from benchmarks.problems import SERVED, TITLES
from benchmarks.records import SuiteResult
from benchmarks.results import FOLDER, Figure, read

README = ROOT / "README.md"
ALL = FOLDER / "README.md"
START, END = "<!-- figures -->", "<!-- /figures -->"
CPU = ("window", "noop", "mask_memory", "training_memory", "documents_compile", "first_call", "paged_scaling",
       "demo_decode")  # fmt: skip
GPU = ("memory", "block_mask", "first_call", "numerics")
SUITES = ("main", "hopper", "hopper_short", "paper", "blocks", "heads", "short", "captured", "pair_bias", *SERVED)
_FIRST = ("main", "hopper", "paper", "decode", "paged")  # Suites that the README shows.
_SHORTENED = ("hopper", "paper", "grid")  # Suites of which it shows plots, bars and means, and not every figure.
_METHOD = (
    "Times of suites are those of the kernels alone, as the profilers see them, with a cold L2; torch and JAX take "
    "turns. The backward is measured without the forward. FLOPs are counted for every peer over the blocks of "
    "128 x 128 that the BlockMask visits, and as 2.5 forwards for the backward. The roof is what the same run reached "
    "in a product of matrices of side 8192, or in a copy if that limits."
)
_VALUES_METHOD = " Where values have another head size (Dv), the backward is its five products."
_SERVED_METHOD = (
    " Where queries continue sequences, as in decoding, the work is that of visible keys, and keys that sequences "
    "share count once."
)


def block() -> str:
    """What stands between the marks in the README."""
    return _all_sections(short=True) + f"\n\nEvery figure: [{_relative(ALL, ROOT)}]({_relative(ALL, ROOT)})."


def everything() -> str:
    """The file with all figures."""
    head = "# Results\n\nWritten by `python -m benchmarks.report` from the files beside this one; do not edit."
    return f"{head}\n\n{_all_sections(short=False)}\n"


def documents() -> dict[pathlib.Path, str]:
    """What each file should hold."""
    return {README: readme_with_block(README.read_text()), ALL: everything()}


def _all_sections(*, short: bool) -> str:
    parts = []
    for device, questions in ((bars.DEVICE, GPU), ("cpu", CPU)):
        contents = [content for name in questions if (content := read(device, name)) is not None]
        suites = [result for name in SUITES if (result := records.read(device, name)) is not None]
        if contents or suites:
            parts.append(_section(device, contents, suites, short=short))
    return "\n\n".join(parts)


def _section(device: str, contents: list[dict[str, Any]], suites: list[SuiteResult], *, short: bool) -> str:
    abouts = [*(result.about for result in suites), *contents]
    machine = abouts[0]["machine"]
    name = machine.get("device") or f"{machine['processor']}, {machine['cores']} cores"
    software = ", ".join(f"{x} {abouts[0]['versions'][x]}" for x in ("python", "jax", "torch")
                         if x in abouts[0]["versions"])  # fmt: skip
    dates = sorted({about["date"][:10] for about in abouts})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    modules = ["benchmarks.attention --suite NAME"] * bool(suites) + [f"benchmarks.{_folder(device)}"] * bool(contents)
    again = " and ".join(f"`python -m {module}`" for module in modules)
    head = (f"On {name}; {software}; {when}. Medians; the quartiles of the repetitions are in brackets. "
            f"{again} {'measures' if len(modules) == 1 else 'measure'} them again.")  # fmt: skip
    if short:
        shown = [_suite(device, x, ROOT) for x in suites if x.suite in _FIRST]
    else:
        shown = [*(_suite(device, x, FOLDER) for x in suites), *(_table(x) for x in contents)]
    apart = any(problem.Dv for x in suites for problem in x.problems)
    method = [_METHOD + _VALUES_METHOD * apart + _SERVED_METHOD * any(x.suite in SERVED for x in suites)]
    method = method if suites else []
    return "\n\n".join([head, *method, *filter(None, [_bars_table(device, contents)]), *shown])


def _relative(path: pathlib.Path, to: pathlib.Path) -> str:
    return path.relative_to(to).as_posix()


def _folder(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def _bars_table(device: str, contents: list[dict[str, Any]]) -> str:
    """What was asked, as far as it was measured."""
    if device == bars.DEVICE:
        tabled = _tabled(device)
        found = [reading.figure for reading in bars.readings() if reading.figure is not None]
        titled = [(figure, "") for figure in found if figure not in tabled]
    else:
        titled = [
            (figure, content["title"].split(";")[0] + ": ") for content in contents for figure in content["figures"]
        ]
    rows = [[title + x.name, _value(x), _bar(x)] for x, title in titled if x.holds is not None]
    return tables.markdown([["", "measured", "asked"], *rows]) if rows else ""


def _tabled(device: str) -> list[Figure]:
    """Those that have a table of their own, beside their suite."""
    result = records.read(device, "hopper")
    return [] if result is None else [x for x in hopper_bars.in_table(result) if isinstance(x, Figure)]


def _suite(device: str, result: SuiteResult, root: pathlib.Path) -> str:
    """A suite's table; `root` is the folder of the document, from which plots are linked."""
    title = TITLES[result.suite]
    if result.suite in SERVED:
        return _served(result)
    lines = [f"*`{result.suite}`: {title}; {result.problems[0].dtype}, "
             "TFLOP/s over visited blocks, forward / backward*"]  # fmt: skip
    if result.suite == "hopper" and (targets := hopper_bars.table(result)):
        lines += [tables.markdown(targets), "*In brackets what is asked, in bold where that was not reached.*"]
    if result.suite not in _SHORTENED or root == FOLDER:
        lines.append(tables.markdown([tables.pair_header(result), *tables.pair_rows(result)]))
    if queued := tables.queue_rows(result):
        lines.append(tables.markdown([tables.queue_header(result), *queued]))
    if root == FOLDER or result.suite in _SHORTENED:
        lines += [f"![{path.stem}]({_relative(path, root)})"
                  for path in sorted((FOLDER / device).glob(f"{result.suite}_by_*.png"))]  # fmt: skip
    lines.append("\n".join(f"* {sentence}" for sentence in tables.sentences(result)))
    return "\n\n".join(lines)


def _served(result: SuiteResult) -> str:
    head = (f"*`{result.suite}`: {TITLES[result.suite]}; {result.problems[0].dtype}, device time, bytes that must move "
            "over it, and the share of the roof*")  # fmt: skip
    sentences = "\n".join(f"* {sentence}" for sentence in tables.sentences(result))
    return "\n\n".join([head, tables.markdown([tables.served_header(result), *tables.served_rows(result)]), sentences])


def _table(content: dict[str, Any]) -> str:
    lines = [f"*{content['title'][0].upper()}{content['title'][1:]}*", "", "| | measured | asked |", "|---|---|---|"]
    few = [figure for figure in content["figures"] if content["question"] != "numerics" or figure.unit == "x"]
    lines += [f"| {figure.name} | {_value(figure)} | {_bar(figure)} |" for figure in few]
    lines += [f"\n{remark}" for remark in content["remarks"]]
    return "\n".join(lines)


def _value(figure: Figure) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    text = f"{_number(figure.value)}{unit}"
    if figure.runs > 1 and figure.low != figure.high:
        text += f" ({_number(figure.low)} to {_number(figure.high)})"
    return text


def _bar(figure: Figure) -> str:
    if figure.holds is None:
        return ""
    least = figure.at_least is not None
    limit = f"at least {_number(figure.at_least)}" if least else f"at most {_number(figure.at_most)}"
    return limit if figure.holds else f"{limit}: **fell short**"


def _number(x: float | None) -> str:
    return f"{x:,.0f}" if x is not None and abs(x) >= 1000 else f"{x:.3g}"


def readme_with_block(readme: str) -> str:
    """The README with the block as the result files give it.

    Raises:
      ValueError: The marks are missing.
    """
    before, found, rest = readme.partition(START)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"README.md lacks the marks {START} and {END}.")
    return f"{before}{START}\n{block()}\n{END}{after}"


def bar_lines() -> tuple[list[str], bool]:
    """A line for each figure that has a bar, on the CPU and on the H200, and whether all are there and reached."""
    found = []
    for name in CPU:
        content = read("cpu", name)
        figures = [figure for figure in (content or {"figures": []})["figures"] if figure.holds is not None]
        missing = [bars.Reading(name, None, f"{name}.json is missing")] if content is None else []
        found += missing + [bars.Reading(name, figure) for figure in figures]
    lines = [f"cpu/{_line(reading)}" for reading in found]
    asked = bars.readings()
    lines += [f"{bars.DEVICE}/{_line(reading)}" for reading in asked]
    return lines, all(reading.holds for reading in [*found, *asked])


def _line(reading: bars.Reading) -> str:
    if reading.figure is None:
        return f"{reading.file}: **missing**: {reading.missing}"
    bar = _bar(reading.figure)
    return f"{reading.file}: {reading.figure.name}: {_value(reading.figure)}{', ' if bar else ''}{bar}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README differs")
    parser.add_argument("--bars", action="store_true", help="print each bar with its figure; exit 1 if one falls short")
    options = parser.parse_args()
    if options.bars:
        lines, reached = bar_lines()
        print("\n".join(lines))
        sys.exit(0 if reached else 1)
    wanted = documents()
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if options.check and differing:
        sys.exit(f"Not as the result files say: {', '.join(path.relative_to(ROOT).as_posix() for path in differing)}. "
                 "Run `python -m benchmarks.report`.")  # fmt: skip
    for path in differing:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
