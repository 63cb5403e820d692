"""Questions besides the speed of attention: a row for each result file, and one way to measure and write it."""

import argparse
import importlib
import inspect
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


class Question(NamedTuple):
    """A result file, measured by the function of this name; its keywords are options of the command."""

    command: str  # and the module in this folder
    name: str
    title: str  # with the shapes
    needs_gpu: bool = False
    keeps: bool = False  # whether earlier records that are not measured again stay without `--add`

    @property
    def measure(self) -> Callable[..., Measured | Iterator[Measured]]:
        """Returns all figures, or yields parts; after each the file is written."""
        return getattr(importlib.import_module(f"benchmarks.questions.{self.command}"), self.name)

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Arguments of `add_argument` for each keyword of `measure`; `OPTIONS` of its module completes them."""
        keywords = [x for x in inspect.signature(self.measure).parameters.values() if x.kind != x.POSITIONAL_ONLY]
        more = self.measure.__globals__.get("OPTIONS", {})
        return {x.name: _option(x.default) | more.get(x.name, {}) for x in keywords}


QUESTIONS = (
    Question(
        "gpu",
        "first_call",
        "from a fresh process to the first result of causal forward and backward; B 1, H 16, S 4096, D 64, bfloat16",
        needs_gpu=True,
    ),
    Question(
        "numerics",
        "eight_bits",
        "caches of eight bits and of bfloat16 against float64: 65,536 normal keys and values of 128, 2 heads, the keys "
        "of the second 8 times as large, and as many latent vectors of 512 columns and 64 rotated ones; 16 needles in "
        "each head: keys that one query each matches with a score of 14; in % of the exact output, and of all weights",
    ),
    Question(
        "training",
        "training",
        "training steps of whole models, bfloat16 with float32 masters, 32,768 tokens; MFU of the dense bfloat16 peak",
        keeps=True,
    ),
    Question(
        "generation",
        "generation",
        "generation with the shape of Llama 3 8B, random weights, bfloat16, greedy; prompts of 1024 tokens, 256 more",
        needs_gpu=True,
        keeps=True,
    ),
    Question(
        "engine",
        "engine",
        "the serving engine with the shape of Llama 3 8B, random weights, bfloat16, greedy",
        needs_gpu=True,
        keeps=True,
    ),
    Question("serving", "serving", "load on a server of OpenAI's completions API"),
    Question("context", "context", "context parallel attention on several GPUs of one host beside one of them"),
)


def one_of(*names: str) -> Callable[[str], str]:
    """Type of a positional argument with these choices, which may be absent."""

    def checked(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"unknown: {name}; known are {', '.join(names)}")
        return name

    return checked


def _option(default: Any) -> dict[str, Any]:
    if isinstance(default, tuple):
        return {"nargs": "+", "type": type(default[0]) if default else str, "default": default}
    return {"default": default, "type": str if default is None else type(default)}


def add_options(parser: argparse.ArgumentParser, questions: Sequence[Question]) -> None:
    """Adds the options of the questions of one command."""
    if not any("parts" in question.options for question in questions):
        names = [question.name for question in questions]
        several = f"all without: {', '.join(names)}"
        parser.add_argument("questions", nargs="*", metavar="question", type=one_of(*names), help=several)
    for name, how in (option for question in questions for option in question.options.items()):
        flag = name if name == "parts" else f"--{name.replace('_', '-')}"
        default = f"default: {how['default']}" if how["default"] is not None else ""
        parser.add_argument(flag, **{**how, "help": "; ".join(filter(None, (how.get("help"), default)))})
    parser.add_argument("--add", action="store_true", help="keep earlier records that are not measured again")
    where = "write DIR/<question>.json; default: benchmarks/results/<device>"
    parser.add_argument("--out", type=Path, metavar="DIR", help=where)


def run(questions: Sequence[Question], options: argparse.Namespace) -> None:
    """Measures the questions of a command that the options name, or all."""
    chosen = getattr(options, "questions", [])
    for question in questions:
        if not chosen or question.name in chosen:
            parts = lambda question=question: question.measure(**{x: getattr(options, x) for x in question.options})
            answer(question, parts, options)


def answer(
    question: Question, measure: Callable[[], Measured | Iterator[Measured]], options: argparse.Namespace
) -> None:
    """Measures a question, and writes its file after each part."""
    machine = gpu_facts()
    if question.needs_gpu and not machine:
        raise SystemExit("`nvidia-smi` finds no GPU.")
    folder = options.out or schema.FOLDER / results_folder(machine.get("device", "cpu"))
    path = folder / f"{question.name}.json"
    old = schema.read(path) if question.keeps or options.add else None
    records, remarks = ([], []) if old is None else (list(old.records), list(old.about["remarks"]))
    measured = measure()
    for part in [measured] if isinstance(measured, Measured) else measured:
        is_stale = lambda x, part=part: part.derived and x.startswith(part.label) and x.endswith(part.derived)
        records = schema.merged([x for x in records if not is_stale(x.name)], part.records)
        kept = [x for x in remarks if not (part.label and x.startswith(part.label))]
        remarks = list(dict.fromkeys([*kept, *part.remarks]))
        about = {"title": question.title, **part.about, "machine": gpu_facts() | dict(part.machine)}
        schema.write(path, records, {**about, "remarks": remarks, **schema.history(old)})
        print("\n".join([*map(line, part.records), *part.remarks]), flush=True)
    print(f"{path}: {question.title}")


def line(record: Record) -> str:
    """A record in words.

    >>> line(Record.single("warm-up", 2.5, "s")), line(Record.from_values("step", [1.0, 2.0, 3.0], "s"))
    ('warm-up: 2.5 s', 'step: 2 s (1.5 to 2.5)')
    """
    value = record.value
    spread = f" ({value.low:g} to {value.high:g})" if value.runs > 1 else ""
    return f"{record.name}: {value.median:g} {record.unit}{spread}"
