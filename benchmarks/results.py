"""Result files: what was measured, where, when and how far it spread."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.environment import ROOT, describe

FOLDER = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
      name: What was measured, in words.
      value: The median.
      unit: Its unit, "x" for a ratio, "" for a count.
      low: The first quartile of the repetitions; None if there was one.
      high: The third.
      runs: Repetitions.
      at_least: The bar that it must reach, if there is one.
      at_most: Likewise.
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    runs: int = 1
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the bar is reached; None without a bar."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def write(
    device: str,
    question: str,
    title: str,
    figures: Sequence[Figure],
    remarks: Sequence[str] = (),
    machine: dict[str, str] | None = None,
) -> pathlib.Path:
    """Writes ``results/<device>/<question>.json``.

    Args:
      device: ``"cpu"``, ``"h200"``.
      question: Name of the file.
      title: What was asked, in words, with the shapes.
      figures: The answers.
      remarks: What a reader must know besides, such as a peer that could not run and why.
      machine: Further facts of the machine, such as the name of its GPU.
    """
    path = FOLDER / device / f"{question}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    small = lambda figure: {k: v for k, v in dataclasses.asdict(figure).items() if v is not None}
    here = describe()
    here["machine"] |= machine or {}
    content = {"question": question, "title": title, **here, "remarks": list(remarks),
               "figures": [small(figure) for figure in figures]}  # fmt: skip
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def read(device: str, question: str, folder: pathlib.Path = FOLDER) -> dict[str, Any] | None:
    """The content of a result file with its figures as `Figure`; None if there is none."""
    path = folder / device / f"{question}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return content | {"figures": [Figure(**figure) for figure in content["figures"]]}
