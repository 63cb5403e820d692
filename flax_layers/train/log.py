"""The log of a run: one line of JSON for each step, and TensorBoard."""

import importlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax_layers.models.checkpoint.optional import needs

Curve = Sequence[tuple[int, float]]
"""Steps, and the loss at each."""


Hook = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers by name, as the log has them."""


class Log:
    """A file of one JSON object a line, each with its `step`.

    Lines of steps after `step`, where the run begins, are removed: they are of a run that ended after its last
    checkpoint. If that raises OSError, an old file is unchanged.
    """

    def __init__(self, path: pathlib.Path, step: int = 0):
        self.path = path
        kept = [line for line in _lines(path) if line["step"] <= step] if step else []
        new = path.with_name(f".{path.name}.new")  # a disk that is full leaves the old file
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        new.replace(path)

    def write(self, **line: Any) -> None:
        """Adds a line. If that raises OSError, the line may be incomplete; readers leave it out."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def curve(self, name: str) -> Curve:
        """The steps that have an entry, and the entry of each."""
        return [(line["step"], line[name]) for line in _lines(self.path) if name in line]


def tensorboard_hook(folder: pathlib.Path, step: int = 0) -> Hook:
    """A hook that writes for TensorBoard, which hides earlier numbers of the steps after `step`, where a run begins."""
    with needs("tensorboardX", "train"):
        package = importlib.import_module("tensorboardX")
    writer = package.SummaryWriter(str(folder), purge_step=step + 1)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file; a process that was killed may have left the last one incomplete."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw_losses(
    path: pathlib.Path,
    training: Curve,
    held_out: Curve = (),
    *,
    levels: Mapping[str, float] | None = None,
    title: str = "",
    unit: str = "nats per token",
) -> None:
    """Draws losses over steps to a PNG; `levels` are losses to compare with, by name, drawn as horizontal lines."""
    with needs("matplotlib", "train"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_columns(training), linewidth=1, label="training, each step")
    if held_out:
        axes.plot(*_columns(held_out), color="black", marker=".", label=f"held-out files: {held_out[-1][1]:.2f}")
    for (label, level), style in zip((levels or {}).items(), ("--", ":", "-."), strict=False):
        axes.axhline(level, color="gray", linestyle=style, label=f"{label}: {level:.2f}")
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.legend()
    figure.savefig(path, dpi=150)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [loss for _, loss in curve]
