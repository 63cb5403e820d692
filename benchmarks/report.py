"""Renders the README's figures from the result files: ``python -m benchmarks.report [--check | --bars]``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import bars, records, tables
from benchmarks.environment import ROOT
from benchmarks.records import SuiteResult
from benchmarks.results import FOLDER, Figure, read

README = ROOT / "README.md"
START, END = "<!-- figures -->", "<!-- /figures -->"
CPU = ("window", "noop", "mask_memory", "training_memory", "documents_compile", "first_call")
GPU = ("memory", "block_mask", "first_call", "numerics")
SUITES = ("main", "paper", "blocks", "heads", "short", "captured", "pair_bias")
_DRAWN = ("paper", "grid")  # Suites of which the README shows the plots and the means, and not every figure.
_METHOD = (
    "Times of suites are those of the kernels alone, as the profilers see them, with a cold L2; torch and JAX take "
    "turns. The backward is measured without the forward. FLOPs are counted for every peer over the blocks of "
    "128 x 128 that the BlockMask visits, and as 2.5 forwards for the backward. The roof is what the same run reached "
    "in a product of matrices of side 8192, or in a copy if that limits."
)


def block() -> str:
    """What stands between the marks in the README."""
    parts = []
    for device, questions in (("cpu", CPU), (bars.DEVICE, GPU)):
        contents = [content for name in questions if (content := read(device, name)) is not None]
        suites = [result for name in SUITES if (result := records.read(device, name)) is not None]
        if contents or suites:
            parts.append(_section(device, contents, suites))
    return "\n\n".join(parts)


def _section(device: str, contents: list[dict[str, Any]], suites: list[SuiteResult]) -> str:
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
    asked = [_METHOD, _bars_table()] if device == bars.DEVICE else []
    return "\n\n".join(
        [head, *filter(None, asked), *(_suite(device, x) for x in suites), *(_table(x) for x in contents)]
    )


def _folder(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def _bars_table() -> str:
    """What was asked of the H200 and is there."""
    found = [reading.figure for reading in bars.readings() if reading.figure is not None]
    rows = [[figure.name, _value(figure), _bar(figure)] for figure in found if figure.holds is not None]
    return tables.markdown([["", "measured", "asked"], *rows]) if rows else ""


def _suite(device: str, result: SuiteResult) -> str:
    title = result.about["title"]
    lines = [f"*`{result.suite}`: {title}; {result.problems[0].dtype}, "
             "TFLOP/s over visited blocks, forward / backward*"]  # fmt: skip
    if result.suite not in _DRAWN:
        lines.append(tables.markdown([tables.pair_header(result), *tables.pair_rows(result)]))
    if queued := tables.queue_rows(result):
        lines.append(tables.markdown([tables.queue_header(result), *queued]))
    folder = FOLDER / device
    lines += [f"![{path.stem}]({path.relative_to(ROOT).as_posix()})"
              for path in sorted(folder.glob(f"{result.suite}_by_*.png")) if result.suite in _DRAWN]  # fmt: skip
    lines.append("\n".join(f"* {sentence}" for sentence in tables.sentences(result)))
    return "\n\n".join(lines)


def _table(content: dict[str, Any]) -> str:
    lines = [f"*{content['title'][0].upper()}{content['title'][1:]}*", "", "| | measured | asked |", "|---|---|---|"]
    lines += [f"| {figure.name} | {_value(figure)} | {_bar(figure)} |" for figure in content["figures"]]
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
    found = [bars.Reading(name, figure) for name in CPU for figure in (read("cpu", name) or {"figures": []})["figures"]
             if figure.holds is not None]  # fmt: skip
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
    readme = README.read_text()
    wanted = readme_with_block(readme)
    if options.check and wanted != readme:
        sys.exit("README.md differs from the result files. Run `python -m benchmarks.report`.")
    if wanted != readme:
        README.write_text(wanted)


if __name__ == "__main__":
    main()
