"""What is asked of the kernels on an H200, each with its figure from the result files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks import hopper_bars, records, results
from benchmarks.peers import FIRST, PEERS
from benchmarks.problems import Problem, parts_of_mixed, suite
from benchmarks.ratios import Found, figure_of, times_longer
from benchmarks.records import SuiteResult
from benchmarks.results import Figure
from benchmarks.side import DIRECTIONS
from benchmarks.summary import geometric_mean

DEVICE = "h200"
QUESTIONS = ("memory", "block_mask", "first_call")
_FLEX, _CUDNN = "torch-flex", "jax-cudnn"


class Reading(NamedTuple):
    """A figure of a file, or why there is none.

    Attributes:
      file: Suite or question.
      figure: With its bar, or without one if it is only stated.
      missing: What is missing, in words; then `figure` is None.
    """

    file: str
    figure: Figure | None
    missing: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is there, and reaches its bar if it has one."""
        return self.figure is not None and self.figure.holds is not False


def readings(folder: pathlib.Path = results.FOLDER) -> list[Reading]:
    """All bars."""
    found = []
    for name, read in _SUITES.items():
        result = records.read(DEVICE, name, folder)
        found += [Reading(name, None, f"{name}.json is missing")] if result is None else _of_suite(result, read)
    for question in QUESTIONS:
        content = results.read(DEVICE, question, folder)
        figures = [figure for figure in (content or {"figures": []})["figures"] if figure.holds is not None]
        if content is None:
            found.append(Reading(question, None, f"{question}.json is missing"))
        found += [Reading(question, figure) for figure in figures]
    return found


def _of_suite(result: SuiteResult, read: Callable[[SuiteResult], Iterable[Found]]) -> list[Reading]:
    return [Reading(result.suite, None, x) if isinstance(x, str) else Reading(result.suite, x)
            for x in read(result) if x]  # fmt: skip


def _main(result: SuiteResult) -> Iterable[Found]:
    for direction, least in zip(DIRECTIONS, (0.9, 0.85), strict=True):
        ratios = {problem: result.ratio(problem, direction, FIRST, _FLEX) for problem in suite(result.suite)}
        over = f"{direction} over {PEERS[_FLEX].title}"
        yield figure_of(f"{over}, geometric mean of {len(ratios)}", ratios.values(), geometric_mean, at_least=1.0)
        yield figure_of(f"{over}, the least of {len(ratios)}", ratios.values(), min, at_least=least)
        if direction == "forward":
            softcap = [ratio for problem, ratio in ratios.items() if problem.variant == "softcap"]
            yield figure_of(f"{over}, the least of softcap", softcap, min, at_least=1.5)


def _blocks(result: SuiteResult) -> Iterable[Found]:
    for direction in DIRECTIONS:
        for form, name, least in (
            ("partial", "causal: the split into full and partial blocks", 1.0),
            ("everywhere", "causal: the BlockMask against a mask applied everywhere", 1.3),
        ):
            gains = []
            for problem in suite(result.suite):
                if problem.form == "split":
                    other = dataclasses.replace(problem, form=form)
                    gains.append(times_longer(result, direction, slow=other, fast=problem))
            bar = {"at_least": least} if direction == "forward" else {}
            yield figure_of(
                f"{name}, {direction}, geometric mean of {len(gains)} lengths", gains, geometric_mean, **bar
            )


def _heads(result: SuiteResult) -> Iterable[Found]:
    for direction in DIRECTIONS:
        for D in (80, 96):
            shares = []
            for problem in suite(result.suite):
                if problem.D == D:
                    own = result.find(problem, FIRST, direction)
                    even = result.find(dataclasses.replace(problem, D=128), FIRST, direction)
                    shares.append(own.tflops / even.tflops if own and even else None)
            yield figure_of(f"TFLOP/s of D {D} over D 128, {direction}, the least of noop and causal", shares, min,
                          at_least=0.8)  # fmt: skip


def _captured(result: SuiteResult) -> Iterable[Found]:
    for problem in suite(result.suite):
        if problem.differentiated:
            plain = dataclasses.replace(problem, differentiated=False)
            bar = {"at_most": 1.1} if problem.variant == "alibi" else {}
            cost = times_longer(result, "backward", slow=problem, fast=plain)
            yield figure_of(f"backward with the gradient of {problem.variant}'s array over without", [cost], min, **bar)
            ratio = result.ratio(problem, "backward", FIRST, _FLEX)
            yield figure_of(f"backward of {problem.label}, over {PEERS[_FLEX].title}", [ratio], min)


def _pair_bias(result: SuiteResult) -> Iterable[Found]:
    for direction in DIRECTIONS:
        ratios = [result.ratio(problem, direction, FIRST, _CUDNN)
                  for problem in suite(result.suite) if problem.variant == "pair_bias"]  # fmt: skip
        yield figure_of(f"pair bias, {direction} over {PEERS[_CUDNN].title}, the least of {len(ratios)}", ratios, min,
                      at_least=1.0)  # fmt: skip


def _short(result: SuiteResult) -> Iterable[Found]:
    for direction in DIRECTIONS:
        ratios = [_over_best(result, problem, direction) for problem in suite(result.suite)]
        yield figure_of(f"short, {direction} over the best peer, the least of {len(ratios)}", ratios, min, at_least=0.9)


def _over_best(result: SuiteResult, problem: Problem, direction: str) -> float | None:
    ratios = [result.ratio(problem, direction, FIRST, name) for name in PEERS if name != FIRST]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _decode(result: SuiteResult) -> Iterable[Found]:
    problems = suite(result.suite)
    plain = [x for x in problems if x.variant == "noop" and not x.lengths]
    for name in (_CUDNN, "sdpa-cudnn", "sdpa-flash", "torch-decode-mask", "torch-decode"):
        ratios = [result.ratio(problem, "forward", FIRST, name) for problem in plain]
        bar = {"at_least": 0.95} if name == _CUDNN else {}
        yield figure_of(f"decode over {PEERS[name].title}, the least of {len(plain)}", ratios, min, **bar)
    for problem in problems:
        if problem.variant != "noop":
            own = times_longer(result, "forward", slow=dataclasses.replace(problem, variant="noop"), fast=problem)
            yield figure_of(f"decode with {problem.variant} over without", [own], min, at_least=0.9)
    for problem in problems:
        if problem.lengths in ("uniform", "skewed"):
            even = dataclasses.replace(problem, lengths="even")
            rates = [_bytes_per_second(result, x) for x in (problem, even)]
            share = None if None in rates else rates[0] / rates[1]
            yield figure_of(f"decode, bytes/s of {problem.lengths} lengths over even ones", [share], min, at_least=0.85)


def _bytes_per_second(result: SuiteResult, problem: Problem) -> float | None:
    record = result.find(problem, FIRST, "forward")
    return None if record is None else record.moved / record.seconds.median


_PAGES = {256: 1.03, 128: 1.03, 64: 1.03, 16: 1.08}  # at most so many times what contiguous keys take; 1 is stated


def _paged(result: SuiteResult) -> Iterable[Found]:
    for problem in sorted(suite(result.suite), key=lambda x: -x.page):
        if problem.page == 64:
            record = result.find(problem, FIRST, "forward")
            microseconds = None if record is None else record.seconds.median * 1e6
            yield figure_of("pages of 64", [microseconds], min, unit="µs", at_most=140.0)
        cost = result.ratio(problem, "forward", "jflex-contiguous", FIRST)
        bar = {"at_most": _PAGES[problem.page]} if problem.page in _PAGES else {}
        yield figure_of(f"pages of {problem.page} over contiguous keys, time", [cost], min, **bar)


def _mixed(result: SuiteResult) -> Iterable[Found]:
    mixed = suite(result.suite)[0]
    found = [result.find(x, FIRST, "forward") for x in (mixed, *parts_of_mixed(mixed))]
    seconds = [None if x is None else x.seconds.median for x in found]
    share = None if None in seconds else seconds[0] / sum(seconds[1:])
    yield figure_of("a prefill chunk and decoding steps in one call over the sum of the two", [share], min, at_most=1.1)


def _cascade(result: SuiteResult) -> Iterable[Found]:
    for problem, least in zip(suite(result.suite), (15.0, 1.5) * 2, strict=True):
        heads = f"{problem.Hq}/{problem.Hkv} heads, prefix {problem.prefix}"
        name = f"cascade, {heads} and suffix {problem.S - problem.prefix}, over"
        flat, copies = (result.ratio(problem, "forward", FIRST, peer) for peer in ("jflex-flat", "jflex-copies"))
        yield figure_of(f"{name} flat", [flat], min, at_least=least)
        yield figure_of(f"{name} flat with pages of its own for each", [copies], min)


_SUITES = {"main": _main, "blocks": _blocks, "heads": _heads, "captured": _captured, "pair_bias": _pair_bias,
           "short": _short, "decode": _decode, "paged": _paged, "cascade": _cascade, "mixed": _mixed,
           "hopper": hopper_bars.hopper, "hopper_short": hopper_bars.hopper_short}  # fmt: skip
