"""The picture of a run: its losses."""

import pathlib
from collections.abc import Mapping, Sequence

from flax_layers.models.checkpoint.optional import needs

Curve = Sequence[tuple[int, float]]
"""Steps, and the loss at each."""


def draw_losses(
    path: pathlib.Path,
    training: Curve,
    held_out: Curve = (),
    *,
    levels: Mapping[str, float] | None = None,
    title: str = "",
    unit: str = "nats per token",
) -> None:
    """Draws losses over steps.

    Args:
        path: The PNG to write.
        training: The loss of every step.
        held_out: That of files which were not trained on.
        levels: Losses to compare with, by their names, drawn as horizontal lines.
        title: Of the picture.
        unit: Of the losses.
    """
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
