"""The one schema of result files: what was measured, where, when, and its spread. Imports neither JAX nor torch.

A file is ``results/<device>/<name>.json``, of a suite or of a question. Each of its records is one measured quantity.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from benchmarks.environment import ROOT, describe
from benchmarks.peers.table import PEERS
from benchmarks.problems import Problem
from benchmarks.suites import SUITES

FOLDER = ROOT / "benchmarks" / "results"


class Summary(NamedTuple):
    """Median and quartiles of repetitions."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Self:
        """From at least one value."""
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(quartiles[1], quartiles[0], quartiles[2], len(values))


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured quantity."""

    name: str  # what was measured, in words; "" where problem, peer and direction say it
    value: Summary
    unit: str  # "s", "MB" and so on, "x" for a ratio, "" for a count
    problem: Problem | None = None  # of a suite's records
    peer: str = ""  # a name in `benchmarks.peers.table.PEERS`
    direction: str = ""  # "forward"; "backward", without the forward; or "jvp", with it
    method: str = ""  # how the seconds were found
    flops: float = 0.0  # over visited blocks
    moved: float = 0.0  # bytes, at least
    queue: Summary | None = None  # wall seconds of a call in a queue of calls, where that was measured
    visible: float = 1.0  # the share of the elements of visited blocks that the mask shows, where it was counted
    backend: str = ""  # that ran, if the peer is jflex; "" where that was not recorded

    @classmethod
    def single(cls, name: str, value: float, unit: str) -> Self:
        """One measurement without repetitions, to five significant digits."""
        return cls.from_values(name, [value], unit, 5)

    @classmethod
    def from_values(cls, name: str, values: Sequence[float], unit: str, digits: int = 4) -> Self:
        """Median and quartiles of repetitions, to so many significant digits."""
        *numbers, runs = Summary.from_values(values)
        median, low, high = (float(f"{x:.{digits}g}") for x in numbers)
        return cls(name, Summary(median, low, high, runs), unit)

    @property
    def seconds(self) -> float:
        """The median."""
        return self.value.median

    @property
    def tflops(self) -> float:
        """TFLOP/s of the median."""
        return self.flops / self.seconds / 1e12

    @property
    def key(self) -> tuple[str, Problem | None, str, str]:
        """Identity among the records of a file."""
        return self.name, self.problem, self.peer, self.direction

    def to_json(self) -> dict[str, Any]:
        """Content of the file; `from_json` is the inverse."""
        short = lambda summary: [*(float(f"{x:.5g}") for x in summary[:3]), summary.runs]
        if self.problem is None:
            return {"name": self.name, "value": [*self.value], "unit": self.unit}
        content = {"problem": self.problem.to_json(), "peer": self.peer, "direction": self.direction}
        content |= {"value": short(self.value), "unit": self.unit, "TFLOP/s": round(self.tflops, 2)}
        content |= {"method": self.method, "flops": self.flops, "bytes": self.moved}
        content |= {"queue": short(self.queue)} if self.queue else {}
        content |= {"visible": round(self.visible, 4)} if self.visible < 1.0 else {}
        return content | ({"backend": self.backend} if self.backend else {})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        fields = {x: content[x] for x in ("peer", "direction", "method", "flops", "visible", "backend") if x in content}
        if "problem" in content:
            fields |= {"problem": Problem(**content["problem"]), "moved": content["bytes"]}
        if "queue" in content:
            fields["queue"] = Summary(*content["queue"])
        return cls(content.get("name", ""), Summary(*content["value"]), content["unit"], **fields)


@dataclasses.dataclass(frozen=True)
class ResultFile:
    """The content of a result file."""

    name: str  # of the suite or question
    records: tuple[Record, ...]  # in the order in which they were measured
    # Title, date, command, commit, machine, versions and remarks; of suites also rates and clocks.
    about: dict[str, Any]

    @property
    def baseline(self) -> str:
        """The peer that ratios are about."""
        return SUITES[self.name].peers[0] if self.name in SUITES else "jflex"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each once."""
        return tuple(dict.fromkeys(record.problem for record in self.records if record.problem is not None))

    @property
    def directions(self) -> tuple[str, ...]:
        """Measured directions, the forward first."""
        return tuple(sorted({record.direction for record in self.records}, reverse=True))

    def peers(self, direction: str | None = None) -> tuple[str, ...]:
        """Measured peers, in the order of `PEERS`."""
        measured = {record.peer for record in self.records if direction in (None, record.direction)}
        return tuple(name for name in PEERS if name in measured)

    def find(self, problem: Problem, peer: str, direction: str) -> Record | None:
        """The record, if there is one."""
        key = ("", problem, peer, direction)
        return next((record for record in self.records if record.key == key), None)

    def speedup(self, problem: Problem, direction: str, over: str) -> float | None:
        """Speed of the baseline over that of another peer; None if one is missing."""
        first, second = (self.find(problem, name, direction) for name in (self.baseline, over))
        return None if first is None or second is None else second.seconds / first.seconds


def write(path: pathlib.Path, records: Iterable[Record], about: dict[str, Any]) -> pathlib.Path:
    """Writes a result file, at once, so that a run that is killed leaves a whole file.

    To `about`, at least a title and remarks, it adds date, command, commit, machine and versions.
    """
    here = describe()
    here["machine"] |= about.get("machine", {})
    here["versions"] = about.get("versions", {}) | here["versions"]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(record.to_json()) for record in records)
    head = json.dumps({"name": path.stem, **about, **here}, indent=2)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{head[:-2]},\n  "records": [\n{lines}\n  ]\n}}\n')
    return partial.replace(path)


def read(path: pathlib.Path) -> ResultFile | None:
    """A result file; None if there is none."""
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    records = tuple(Record.from_json(x) for x in content.pop("records"))
    return ResultFile(content.pop("name"), records, content)


def read_all(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, ResultFile]]:
    """The result files of each device, by name."""
    results: dict[str, dict[str, ResultFile]] = {}
    for path in sorted(folder.glob("*/*.json")):
        if (content := read(path)) is not None:
            results.setdefault(path.parent.name, {})[path.stem] = content
    return results


def merged(old: Iterable[Record], new: Sequence[Record]) -> list[Record]:
    """The new records, and the old ones that were not measured again."""
    again = {record.key for record in new}
    return [*(record for record in old if record.key not in again), *new]


def history(old: ResultFile | None) -> dict[str, Any]:
    """Date, command and commit of the runs whose records a file holds, and versions of packages, for the next one."""
    if old is None:
        return {}
    runs = [*old.about.get("before", []), {x: old.about[x] for x in ("date", "command", "commit")}]
    return {"before": runs, "versions": old.about.get("versions", {})}
