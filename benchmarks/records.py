"""Result files of suites: every time with its spread, beside the problem, the peer and the work."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.environment import describe
from benchmarks.peers import FIRST, FIRST_OF
from benchmarks.problems import Problem
from benchmarks.results import FOLDER
from benchmarks.summary import Summary


@dataclasses.dataclass(frozen=True)
class Record:
    """The time of one peer, at one problem, in one direction.

    Attributes:
      problem: What was computed.
      peer: A name in `benchmarks.peers.PEERS`.
      direction: ``"forward"`` or ``"backward"``; the latter without the former.
      seconds: Of the device.
      method: How they were found.
      flops: Over visited blocks.
      moved: Bytes, at least.
      queue: Wall seconds of a call in a queue of calls, where that was asked for.
      backend: Which backend of jflex ran, if the peer is jflex; "" where that was not recorded.
    """

    problem: Problem
    peer: str
    direction: str
    seconds: Summary
    method: str
    flops: float
    moved: float
    queue: Summary | None = None
    backend: str = ""

    @property
    def tflops(self) -> float:
        """TFLOP/s of the median."""
        return self.flops / self.seconds.median / 1e12

    @property
    def key(self) -> tuple[Problem, str, str]:
        """What must differ between the records of a suite."""
        return self.problem, self.peer, self.direction


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """A result file.

    Attributes:
      suite: Its name.
      records: In the order in which they were measured.
      about: Date, command, machine, versions, rates, clocks, remarks.
    """

    suite: str
    records: tuple[Record, ...]
    about: dict[str, Any]

    def find(self, problem: Problem, peer: str, direction: str) -> Record | None:
        """The record, if there is one."""
        return next((record for record in self.records if record.key == (problem, peer, direction)), None)

    @property
    def first(self) -> str:
        """The peer that the others are compared with."""
        return FIRST_OF.get(self.suite, FIRST)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each once."""
        return tuple(dict.fromkeys(record.problem for record in self.records))

    def ratio(self, problem: Problem, direction: str, of: str, to: str) -> float | None:
        """How many times faster `of` is than `to`; None if one is missing."""
        first, second = self.find(problem, of, direction), self.find(problem, to, direction)
        return None if first is None or second is None else second.seconds.median / first.seconds.median


def write(folder: pathlib.Path, suite: str, records: Iterable[Record], about: dict[str, Any]) -> pathlib.Path:
    """Writes ``<folder>/<suite>.json``, at once, so that a run that is killed leaves a whole file.

    Args:
      folder: ``results/h200``.
      suite: Its name.
      records: What was measured.
      about: Title, machine, rates, clocks and remarks; versions, date and command are added.
    """
    path = folder / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    here = describe()
    here["machine"] |= about.get("machine", {})
    lines = ",\n".join("    " + json.dumps(_to_json(record)) for record in records)
    head = json.dumps({"suite": suite, **about, **here}, indent=2)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{head[:-2]},\n  "records": [\n{lines}\n  ]\n}}\n')
    return partial.replace(path)


def read(device: str, suite: str, folder: pathlib.Path = FOLDER) -> SuiteResult | None:
    """``<folder>/<device>/<suite>.json``; None if there is none."""
    path = folder / device / f"{suite}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return SuiteResult(suite, tuple(_from_json(x) for x in content.pop("records")), content)


def merged(old: SuiteResult | None, new: Sequence[Record]) -> list[Record]:
    """The new records, and the old ones whose problem, peer or direction was not measured again."""
    again = {record.key for record in new}
    kept = [record for record in old.records if record.key not in again] if old else []
    return [*kept, *new]


def _to_json(record: Record) -> dict[str, Any]:
    short = lambda summary: [*(float(f"{x:.5g}") for x in summary[:3]), summary.runs]
    defaults = {field.name: field.default for field in dataclasses.fields(Problem)}
    problem = {name: x for name, x in dataclasses.asdict(record.problem).items() if x != defaults[name]}
    content = {"problem": problem, "peer": record.peer, "direction": record.direction,
               "seconds": short(record.seconds), "TFLOP/s": round(record.tflops, 2), "method": record.method,
               "flops": record.flops, "bytes": record.moved}  # fmt: skip
    content |= {"queue": short(record.queue)} if record.queue else {}
    return content | ({"backend": record.backend} if record.backend else {})


def _from_json(content: dict[str, Any]) -> Record:
    queue = Summary(*content["queue"]) if "queue" in content else None
    problem, seconds = Problem.read(content["problem"]), Summary(*content["seconds"])
    work = (content["flops"], content["bytes"])
    return Record(problem, content["peer"], content["direction"], seconds, content["method"], *work, queue,
                  content.get("backend", ""))  # fmt: skip
