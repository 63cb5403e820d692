"""Renders the README's figures from the result files: ``python -m benchmarks.report [--check | --bars]``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.results import Figure, read

README = ROOT / "README.md"
START, END = "<!-- figures -->", "<!-- /figures -->"
CPU = ("window", "noop", "mask_memory", "training_memory", "documents_compile", "first_call")
GPU = ("smoke",)


def block() -> str:
    """What stands between the marks in the README."""
    parts = []
    for device, questions, command in (("cpu", CPU, "benchmarks.cpu"), ("h200", GPU, "benchmarks.gpu_smoke")):
        contents = [content for question in questions if (content := read(device, question)) is not None]
        if contents:
            parts.append(_section(contents, command))
    return "\n\n".join(parts)


def _section(contents: list[dict[str, Any]], command: str) -> str:
    first = contents[0]
    dates = sorted({content["date"][:10] for content in contents})
    machine, versions = first["machine"], first["versions"]
    device = machine.get("device") or f"{machine['processor']}, {machine['cores']} cores"
    software = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "torch") if name in versions)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    head = (f"On {device}; {software}; {when}. Medians; the quartiles of the repetitions are in brackets. "
            f"`python -m {command}` measures them again.")  # fmt: skip
    tables = [_table(content) for content in contents]
    return "\n\n".join([head, *tables])


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


def bars() -> tuple[list[str], bool]:
    """A line for each figure that has a bar, and whether all are reached."""
    lines, reached = [], True
    for device, questions in (("cpu", CPU), ("h200", GPU)):
        for question in questions:
            for figure in (read(device, question) or {"figures": []})["figures"]:
                if figure.holds is not None:
                    reached &= figure.holds
                    lines.append(f"{device}/{question}: {figure.name}: {_value(figure)}, {_bar(figure)}")
    return lines, reached


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README differs")
    parser.add_argument("--bars", action="store_true", help="print each bar with its figure; exit 1 if one falls short")
    options = parser.parse_args()
    if options.bars:
        lines, reached = bars()
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
