"""The command line of questions: ``python -m benchmarks cpu [question ...]``."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.results import schema
from benchmarks.results.schema import Record

Measured = tuple[list[Record], list[str]]  # with remarks


class Question(NamedTuple):
    """What is measured for a result file."""

    title: str  # with the shapes
    measure: Callable[[], Measured]


class Questions(dict[str, Question]):
    """By the name of the file, which is that of the function."""

    def of(self, title: str) -> Callable[[Callable[..., Measured]], Any]:
        """Enters the function below."""

        def enter(measure: Callable[..., Measured]) -> Any:
            self[measure.__name__] = Question(title, measure)
            return measure

        return enter


def run(name: str, questions: Mapping[str, Question], words: Sequence[str] | None, *, on_gpu: bool) -> None:
    """Measures the named questions, or all, and writes a result file for each.

    Args:
      name: Of the command.
      questions: By the name of the file.
      words: Of the command line.
      on_gpu: Whether the results are those of the GPU.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}")
    parser.add_argument("questions", nargs="*", metavar="question", help=f"all without: {', '.join(questions)}")
    where = "write DIR/<question>.json; default: benchmarks/results/<device>"
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help=where)
    options = parser.parse_args(words)
    if unknown := sorted(set(options.questions) - set(questions)):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(questions)}")
    if on_gpu and not gpu_facts():
        parser.error("`nvidia-smi` finds no GPU.")
    with tqdm(options.questions or questions, unit="question", dynamic_ncols=True, disable=None) as bar:
        for question in bar:
            bar.set_postfix_str(question)
            title, measure = questions[question]
            records, remarks = measure()
            machine = gpu_facts() if on_gpu else {}  # right after the measurement, for the clocks
            folder = options.out or schema.FOLDER / results_folder(machine.get("device", "cpu"))
            about = {"title": title, "machine": machine, "remarks": remarks}
            path = schema.write(folder / f"{question}.json", records, about)
            bar.write("\n".join([f"{path}: {title}", *map(_line, records), *remarks]))


def _line(record: Record) -> str:
    value = record.value
    spread = f" ({value.low:g} to {value.high:g})" if value.runs > 1 else ""
    return f"  {record.name}: {value.median:g} {record.unit}{spread}"
