"""Targets for measured figures, as data, and their evaluation on the result files.

A figure is a metric of the suite's first peer, or of a named one, at some problems, mostly relative to another peer or
to another problem.
"""

import dataclasses
import fnmatch
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.peers.table import PEERS
from benchmarks.problems import Problem
from benchmarks.results.schema import Record, ResultFile
from benchmarks.suites import SUITES, parts_of_mixed

DEVICE = "h200"
ANY_GPU = "*"  # every device with such a file but the CPU, or `DEVICE` if there is none
FASTEST, PARTS = "fastest peer", "sum of its parts"
Results = Mapping[str, Mapping[str, ResultFile]]  # by device and name
METRICS: dict[str, Callable[[Record], float]] = {
    "speed": lambda record: 1.0 / record.seconds,
    "time": lambda record: record.seconds,
    "TFLOP/s": lambda record: record.tflops,
    "TB/s": lambda record: record.moved / record.seconds / 1e12,
    "µs": lambda record: record.seconds * 1e6,
}


class Target(NamedTuple):
    """A limit for a figure of a suite, for the worst of the problems or for the geometric mean."""

    suite: str
    direction: str
    select: Mapping[str, Any]  # fields of the problems; a tuple for one of several values
    metric: str  # of `METRICS`
    # What the metric is divided by: that of a peer, of `FASTEST`, of the same problem with other fields, or of `PARTS`.
    over: str | Mapping[str, Any] | None
    at_least: float = -math.inf
    at_most: float = math.inf
    mean: bool = False
    peer: str = ""  # whose metric it is; "" for the suite's first


class QuestionTarget(NamedTuple):
    """A limit for the records of a question whose names match a pattern."""

    device: str  # of the folder, or `ANY_GPU`
    question: str
    pattern: str
    at_least: float = -math.inf
    at_most: float = math.inf


_BOTH = ("forward", "backward")
_SPLIT, _PLAIN = {"form": "split"}, {"variant": "noop", "lengths": ""}
_PER_D = {"variant": ("noop", "causal"), "Dv": 0}
_GRADIENT = {"variant": "alibi", "differentiated": True}
_SPARSE = {"keys": "latent", "selected": 2048}
# Targets of `hopper` by variant: TFLOP/s; of the rate of causal; and speed over `_HOPPER_PEERS`. The rates come from
# figures that were published for another H200. A run is judged by its own peers: a target over a peer is the ratio of
# the rate to what was published for that peer.
_HOPPER_PEERS = ("fa4", "jax-cudnn", "tokamax", "torch-flex")
_HOPPER = (
    ("forward", ("causal",), 128, (680,), None, (1.07, 1.02, 0.97, 1.6)),
    ("forward", ("noop",), 128, (690,), None, (1.05, 1.01, 0.98, 1.44)),
    ("forward", ("softcap",), 128, (560,), 0.82, (1.8, None, None, 2.78)),
    ("forward", ("sliding_window",), 128, (560,), 0.82, (1.04, None, None, 1.57)),
    ("forward", ("alibi", "relative_bias"), 128, (600,), 0.88, (None, None, None, 1.55)),
    ("forward", ("document_mask",), 128, (540,), 0.79, (None, None, None, 1.55)),
    ("backward", ("causal",), 128, (520, 600), None, (0.86, 1.02, 1.22, 1.33)),
    ("backward", ("noop",), 128, (540, 620), None, (0.86, 1.01, 1.23, 1.31)),
    ("backward", ("softcap",), 128, (420,), 0.8, (1.04, None, None, 2.08)),
    ("forward", ("causal",), 64, (500,), None, (0.97, 1.03, 1.1, 1.27)),
    ("forward", ("noop",), 64, (520,), None, (0.97, 1.07, 1.09, 1.26)),
    ("forward", ("softcap",), 64, (400,), 0.8, (1.96, None, None, 3.38)),
    ("forward", ("sliding_window",), 64, (420,), 0.84, (1.07, None, None, 1.28)),
    ("forward", ("alibi", "relative_bias"), 64, (440,), 0.88, (None, None, None, 1.35)),
    ("forward", ("document_mask",), 64, (400,), 0.8, (None, None, None, 1.44)),
    ("backward", ("causal",), 64, (430, 523), None, (0.82, 1.02, 1.25, 1.39)),
    ("backward", ("noop",), 64, (460, 530), None, (0.86, 1.01, 1.3, 1.41)),
    ("backward", ("softcap",), 64, (330,), 0.76, (1.62, None, None, 2.61)),
)


def _by_variant() -> Iterator[Target]:
    for direction, variants, D, rates, of_causal, over_peers in _HOPPER:
        select = {"variant": variants, "D": D, "S": 16384, "Dv": 0}
        for rate in rates:
            yield Target("hopper", direction, select, "TFLOP/s", None, rate)
        if of_causal is not None:
            yield Target("hopper", direction, select, "TFLOP/s", {"variant": "causal"}, of_causal)
        for peer, limit in zip(_HOPPER_PEERS, over_peers, strict=True):
            if limit is not None:
                yield Target("hopper", direction, select, "speed", peer, limit)


TARGETS = (
    *(Target("main", x, {}, "speed", "torch-flex", 1.0, mean=True) for x in _BOTH),
    Target("main", "forward", {}, "speed", "torch-flex", 0.9),
    Target("main", "backward", {}, "speed", "torch-flex", 0.85),
    Target("main", "forward", {"variant": "softcap"}, "speed", "torch-flex", 1.5),
    Target("blocks", "forward", _SPLIT, "speed", {"form": "partial"}, 1.0, mean=True),
    Target("blocks", "forward", _SPLIT, "speed", {"form": "everywhere"}, 1.3, mean=True),
    *(Target("heads", x, {"D": D}, "TFLOP/s", {"D": 128}, 0.8) for x in _BOTH for D in (80, 96)),
    Target("captured", "backward", _GRADIENT, "time", {"differentiated": False}, at_most=1.1),
    *(Target("pair_bias", x, {"variant": "pair_bias"}, "speed", "jax-cudnn", 1.0) for x in _BOTH),
    Target("pair_bias", "backward", {"variant": "pair_bias"}, "speed", "torch-flex", 1.0),
    *(Target("short", x, {}, "speed", FASTEST, 0.9) for x in _BOTH),
    *(Target("selected", x, {"selected": 13}, "speed", {"selected": 0}, 5.0) for x in _BOTH),
    *(Target("rotary", x, {"keys": "raw"}, "time", {"keys": ""}, at_most=1.08) for x in _BOTH),
    *(Target("rotary", x, {"keys": "raw"}, "time", "jflex-rotating", at_most=1.0) for x in _BOTH),
    Target("decode", "forward", _PLAIN, "speed", "jax-cudnn", 0.95),
    *(Target("decode", "forward", {"variant": x}, "speed", {"variant": "noop"}, 0.9) for x in ("alibi", "softcap")),
    *(Target("decode", "forward", {"lengths": x}, "TB/s", {"lengths": "even"}, 0.85) for x in ("uniform", "skewed")),
    Target("paged", "forward", {"page": 64}, "µs", None, at_most=140.0),
    *(Target("paged", "forward", {"page": page}, "time", "jflex-contiguous", at_most=1.03) for page in (256, 128, 64)),
    Target("paged", "forward", {"page": 16}, "time", "jflex-contiguous", at_most=1.08),
    Target("raw_keys", "forward", {"keys": "raw"}, "time", {"keys": ""}, at_most=1.05),
    *(  # FlashInfer's gain from rotating in the kernel: 28 to 30%
        Target("streaming_llm", "forward", {}, "time", "jflex-rerotating", at_most=0.72, peer=x)
        for x in ("", "jflex-raw-keys")
    ),
    Target("paged_fp8", "forward", {"keys": "float8_e4m3fn"}, "time", {"keys": ""}, at_most=0.6),
    Target("mla", "forward", {"Hq": 16}, "TB/s", None, 3.4),  # 80 % of what a copy reaches
    *(Target("mla", "forward", {"Hq": 128}, "TFLOP/s", None, x) for x in (480.0, 600.0)),
    *(
        Target("sparse_mla", "forward", {**_SPARSE, "B": B}, "speed", {**_SPARSE, "selected": 0}, 8.0)
        for B in (1, 8, 32)
    ),
    *(Target("cascade", "forward", {"Hkv": x, "prefix": 8192}, "speed", "jflex-flat", 15.0) for x in (32, 8)),
    *(Target("cascade", "forward", {"Hkv": x, "prefix": 1024}, "speed", "jflex-flat", 1.5) for x in (32, 8)),
    Target("mixed", "forward", {"lengths": "mixed"}, "time", PARTS, at_most=1.1),
    *(Target("million", x, {"S": 1048576}, "TFLOP/s", {"S": 16384, "T": 16384}, 0.9) for x in _BOTH),
    Target("batch_invariant", "forward", {"T": 1, "prefix": 0}, "time", "jflex", at_most=1.15),
    Target("fp8", "forward", {"keys": "float8_e4m3fn", "D": 128}, "speed", {"keys": ""}, 1.2),
    *(Target("hopper", x, {"Hkv": 8}, "speed", "jax-cudnn", 1.0) for x in _BOTH),
    *(Target("hopper", x, {"D": D, **_PER_D}, "TFLOP/s", {"D": 128}, 0.85) for x in _BOTH for D in (96, 192)),
    *(Target("hopper_short", x, {}, "speed", "jflex-triton", 1.0) for x in _BOTH),
    *_by_variant(),
)
QUESTION_TARGETS = (
    *(QuestionTarget(ANY_GPU, "context", f"*, {x}, balanced: speed-up", at_least=1.85) for x in ("ring", "all_gather")),
    QuestionTarget(DEVICE, "training", "llama3-*, jflex: model FLOP utilisation", at_least=50.0),
    QuestionTarget(DEVICE, "first_call", "trace, lower, compile and run, * filling *", at_most=1.5),
    QuestionTarget(DEVICE, "first_call", "trace, lower, compile and run, * reading *", at_most=1.1),
    QuestionTarget(DEVICE, "generation", "*, jflex dense: share of the copy rate", at_least=80.0),
    QuestionTarget(DEVICE, "generation", "*, jflex dense: decode over that of the faster torch", at_least=1.0),
    QuestionTarget(DEVICE, "engine", "1 clients: share of the roof", at_least=80.0),
    QuestionTarget(DEVICE, "engine", "[0-9]* clients: share of the roof", at_least=70.0),
    QuestionTarget(DEVICE, "engine", "* clients: idle GPU", at_most=5.0),
)


class Outcome(NamedTuple):
    """A target with its figure."""

    target: Target | QuestionTarget
    file: str  # ``<device>/<name>``
    name: str  # of the figure, in words
    value: float | None  # None if it is missing
    unit: str
    missing: str = ""  # why there is no value

    @property
    def reached(self) -> bool:
        """The figure exists and is within the limit."""
        return self.value is not None and self.target.at_least <= self.value <= self.target.at_most


def outcomes(results: Results) -> list[Outcome]:
    """Every target with its figure; those over peers that were not installed are left out."""
    figures = []
    for target in TARGETS:
        # Another GPU's figures of a suite count where `DEVICE` has none.
        measured = [device for device, files in results.items() if device != "cpu" and target.suite in files]
        device = DEVICE if DEVICE in measured or not measured else measured[0]
        result = results.get(device, {}).get(target.suite)
        if result is None or not (isinstance(target.over, str) and result.lacks(target.over)):
            figures.append(evaluate(target, result, device))
    for target in QUESTION_TARGETS:
        figures += _of_question(target, results)
    return figures


def evaluate(target: Target, result: ResultFile | None, device: str = DEVICE) -> Outcome:
    """A target with its figure; `result` holds that of the suite on the device."""
    problems = [problem for problem in SUITES[target.suite].problems if matches(problem, target.select)]
    unit, file = target.metric if target.over is None else "x", f"{device}/{target.suite}"
    outcome = Outcome(target, file, _name(target, len(problems)), None, unit, f"{file}.json is missing")
    if result is None:
        return outcome
    known = [x for problem in problems if (x := _value(target, result, problem)) is not None]
    if len(known) < len(problems):
        return outcome._replace(missing=f"{len(problems) - len(known)} of {len(problems)} are missing")
    worst = statistics.geometric_mean if target.mean else min if target.at_most == math.inf else max
    return outcome._replace(value=float(f"{worst(known):.4g}"), missing="")


def matches(problem: Problem, select: Mapping[str, Any]) -> bool:
    """A problem has these fields; a tuple stands for one of its values."""
    values = {name: x if isinstance(x, tuple) else (x,) for name, x in select.items()}
    return all(getattr(problem, name) in accepted for name, accepted in values.items())


def _value(target: Target, result: ResultFile, problem: Problem) -> float | None:
    metric, find = METRICS[target.metric], lambda problem, peer: result.find(problem, peer, target.direction)
    record, over, baseline = find(problem, target.peer or result.baseline), target.over, result.baseline
    if record is None or over is None:
        return None if record is None else metric(record)
    if record.backend == "triton" and over == "jflex-triton":
        return 1.0  # the same kernels; what differs is noise
    if isinstance(over, Mapping):
        others = [find(dataclasses.replace(problem, **over), baseline)]
    elif over == PARTS:
        others = [find(part, baseline) for part in parts_of_mixed(problem)]
    elif over == FASTEST:
        others = [x for name in result.peers() if name != baseline and (x := find(problem, name)) is not None]
    else:
        others = [find(problem, over)]
    known = [metric(other) for other in others if other is not None]
    if not known or len(known) < len(others):
        return None
    return metric(record) / (sum(known) if over == PARTS else max(known))


def _name(target: Target, count: int) -> str:
    """In words: the direction, the problems, the metric and what it is relative to."""
    over, selected = target.over, _fields(target.select) if any(target.select.values()) else ""
    parts = filter(None, (target.direction, selected, target.peer and PEERS[target.peer].title))
    relative = _fields(over) if isinstance(over, Mapping) else PEERS[over].title if over in PEERS else f"the {over}"
    some = "" if count == 1 else f", geometric mean of {count}" if target.mean else f", worst of {count}"
    return f"{', '.join(parts)}: {target.metric}{'' if over is None else f' over {relative}'}{some}"


def _fields(fields: Mapping[str, Any]) -> str:
    """In words, without lengths and what is 0."""
    what = "keys" if fields.get("keys") == "latent" else "blocks"
    words = {
        "variant": lambda x: x if isinstance(x, str) else " and ".join(x),
        "differentiated": lambda x: "differentiated" if x else "not differentiated",
        "selected": lambda x: f"the best {x} {what}" if x else f"all {what}",
    }
    plain = lambda name, x: f"plain {name}" if x == "" else f"{name} {x}" if x and name != "S" else ""
    return ", ".join(filter(None, (words[x](y) if x in words else plain(x, y) for x, y in fields.items())))


def _of_question(target: QuestionTarget, results: Results) -> Iterator[Outcome]:
    measured = [device for device, files in results.items() if target.question in files and device != "cpu"]
    for device in [target.device] if target.device != ANY_GPU else measured or [DEVICE]:
        result, file = results.get(device, {}).get(target.question), f"{device}/{target.question}"
        records = [] if result is None else [x for x in result.records if fnmatch.fnmatchcase(x.name, target.pattern)]
        for record in records:
            yield Outcome(target, file, record.name, record.value.median, record.unit)
        if not records:
            missing = f"{file}.json is missing" if result is None else "no record has such a name"
            yield Outcome(target, file, target.pattern, None, "", missing)
