"""Plots of a suite: TFLOP/s by length and by variant, after the paper's figures 7 and 8."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.table import PEERS
from benchmarks.problems import Problem
from benchmarks.results.schema import ResultFile

_MIN_POINTS = 3  # of a plot
_SIZE = (4.2, 3.0)  # inches of a panel


def draw(result: ResultFile, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes ``<suite>_by_length.png`` and ``<suite>_by_variant.png``, where the suite has enough points."""
    written = []
    for name, panels, fill in (
        ("by_length", _panels(result, lambda x: (x.variant, x.Hq, x.Hkv, x.D), lambda x: x.S), _lines),
        ("by_variant", _panels(result, lambda x: (x.B, x.Hq, x.Hkv, x.S, x.D), lambda x: x.variant), _bars),
    ):
        if panels:
            path = folder / f"{result.name}_{name}.png"
            _picture(result, panels, fill).savefig(path, dpi=110)
            written.append(path)
    return written


def _panels(result: ResultFile, group: Callable[[Problem], Any], axis: Callable[[Problem], Any]) -> list[list[Problem]]:
    """Groups of problems with enough points."""
    groups: dict[Any, list[Problem]] = {}
    for problem in result.problems:
        groups.setdefault(group(problem), []).append(problem)
    return [problems for problems in groups.values() if len({axis(problem) for problem in problems}) >= _MIN_POINTS]


def _picture(result: ResultFile, panels: Sequence[list[Problem]], fill: Callable[..., None]) -> Any:
    from matplotlib.figure import Figure

    directions = result.directions
    size = (_SIZE[0] * len(panels), _SIZE[1] * len(directions) + 0.6)
    picture = Figure(figsize=size, layout="constrained")
    axes = picture.subplots(len(directions), len(panels), squeeze=False)
    for row, direction in zip(axes, directions, strict=True):
        for axis, problems in zip(row, panels, strict=True):
            fill(axis, result, problems, direction)
            axis.set_ylabel(f"{direction}, TFLOP/s")
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=2 * len(panels), fontsize=7)
    machine = result.about["machine"].get("device", "CPU")
    picture.suptitle(f"{machine}, {result.problems[0].dtype}, {result.about['date'][:10]}", fontsize=10)
    return picture


def _color(peer: str) -> Any:
    """The usual ten colors, and the light ones of the same hues for the peers after these."""
    from matplotlib import colormaps

    index = list(PEERS).index(peer)
    return colormaps["tab20"](2 * index % 20 + index // 10)


def _lines(axis: Any, result: ResultFile, problems: Sequence[Problem], direction: str) -> None:
    first = problems[0]
    labels = list(dict.fromkeys(problem.label for problem in problems))
    for number, label in enumerate(labels):
        for name in result.peers(direction):
            points = [
                (problem.S, record.tflops)
                for problem in problems
                if problem.label == label and (record := result.find(problem, name, direction))
            ]
            if points:
                title = PEERS[name].title + (label.removeprefix(first.variant) if len(labels) > 1 else "")
                style = ("-", "--", ":")[number % 3]
                axis.plot(*zip(*sorted(points), strict=True), style, color=_color(name), marker="o", ms=3, label=title)
    heads = f"H {first.Hq}" + ("" if first.Hq == first.Hkv else f"/{first.Hkv}")
    axis.set_xscale("log", base=2)
    axis.set_title(f"{first.variant}, {heads}, D {first.D}", fontsize=9)
    axis.set_xlabel("length")


def _bars(axis: Any, result: ResultFile, problems: Sequence[Problem], direction: str) -> None:
    peers = result.peers(direction)
    width = 0.8 / len(peers)
    for column, name in enumerate(peers):
        records = [result.find(problem, name, direction) for problem in problems]
        offsets = [row + (column - (len(peers) - 1) / 2) * width for row, record in enumerate(records) if record]
        if offsets:
            axis.bar(offsets, [x.tflops for x in records if x], width, color=_color(name), label=PEERS[name].title)
    axis.set_xticks(range(len(problems)), [problem.label for problem in problems], rotation=30, ha="right", fontsize=7)
    axis.set_title(problems[0].shape, fontsize=9)
