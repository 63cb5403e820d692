"""Questions besides the speed of attention: a row for each result file, and one way to measure and write it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.results import schema
from benchmarks.results.schema import Record


class Measured(NamedTuple):
    """Figures, or a part of them."""

    records: Sequence[Record]
    remarks: Sequence[str] = ()
    label: str = ""  # remarks of an earlier run that begin so are replaced
    derived: str = ""  # so are its records that begin with the label and end so: they compare peers of one run
    about: Mapping[str, str] = {}  # replaces the title
    machine: Mapping[str, int] = {}  # added to the facts of the GPU
    draw: Callable[[Path], None] | None = None  # writes a picture


class Question(NamedTuple):
    """A result file."""

    command: str
    name: str  # of the file
    title: str  # with the shapes
    measure: Callable[..., Measured | Iterator[Measured]]  # after each part the file is written
    options: Mapping[str, Mapping[str, Any]] = {}  # arguments of `measure` by name, each with those of `add_argument`
    needs_gpu: bool = False
    keeps: bool = False  # whether earlier records that are not measured again stay without `--add`


def one_of(*names: str) -> Callable[[str], str]:
    """Type of a positional argument with these choices, which may be absent."""

    def checked(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"unknown: {name}; known are {', '.join(names)}")
        return name

    return checked


def add_options(parser: argparse.ArgumentParser, questions: Sequence[Question]) -> None:
    """Adds the options of the questions of one command."""
    if not any("parts" in question.options for question in questions):
        names = [question.name for question in questions]
        several = f"all without: {', '.join(names)}"
        parser.add_argument("questions", nargs="*", metavar="question", type=one_of(*names), help=several)
    for question in questions:
        for name, how in question.options.items():
            flag = name if name == "parts" else f"--{name.replace('_', '-')}"
            default = f"default: {how['default']}" if how.get("default") not in (None, False) else ""
            parser.add_argument(flag, **{**how, "help": "; ".join(filter(None, (how.get("help"), default)))})
    parser.add_argument("--add", action="store_true", help="keep earlier records that are not measured again")
    where = "write DIR/<question>.json; default: benchmarks/results/<device>"
    parser.add_argument("--out", type=Path, metavar="DIR", help=where)


def run(questions: Sequence[Question], options: argparse.Namespace) -> None:
    """Measures the questions of a command that the options name, or all."""
    chosen = getattr(options, "questions", [])
    for question in questions:
        if not chosen or question.name in chosen:
            answer(question, options)


def answer(question: Question, options: argparse.Namespace) -> None:
    """Measures a question, and writes its file after each part."""
    machine = gpu_facts()
    if question.needs_gpu and not machine:
        raise SystemExit("`nvidia-smi` finds no GPU.")
    folder = options.out or schema.FOLDER / results_folder(machine.get("device", "cpu"))
    path = folder / f"{question.name}.json"
    old = schema.read(path) if question.keeps or options.add else None
    before = {} if old is None else {"before": schema.runs_of(old)}
    records, remarks = ([], []) if old is None else (list(old.records), list(old.about["remarks"]))
    measured = question.measure(**{name: getattr(options, name) for name in question.options})
    for part in [measured] if isinstance(measured, Measured) else measured:
        is_stale = lambda x, part=part: part.derived and x.startswith(part.label) and x.endswith(part.derived)
        again = {record.key for record in part.records}
        records = [x for x in records if x.key not in again and not is_stale(x.name)] + list(part.records)
        kept = [x for x in remarks if not (part.label and x.startswith(part.label))]
        remarks = list(dict.fromkeys([*kept, *part.remarks]))
        about = {"title": question.title, **part.about, "machine": gpu_facts() | dict(part.machine)}
        schema.write(path, records, {**about, "remarks": remarks, **before})
        print("\n".join([*map(line, part.records), *part.remarks]), flush=True)
        if part.draw is not None:
            part.draw(path.with_suffix(".png"))
    print(f"{path}: {question.title}")


def line(record: Record) -> str:
    """A record in words.

    >>> line(Record.single("warm-up", 2.5, "s")), line(Record.from_values("step", [1.0, 2.0, 3.0], "s"))
    ('warm-up: 2.5 s', 'step: 2 s (1.5 to 2.5)')
    """
    value = record.value
    spread = f" ({value.low:g} to {value.high:g})" if value.runs > 1 else ""
    return f"{record.name}: {value.median:g} {record.unit}{spread}"
