"""The suites for Hopper: problems, what a broken contestant leaves, targets and their table."""

import dataclasses
import math
import pathlib

import pytest

from benchmarks import agreement, attention, bars, hopper_bars, jax_side, records, report, roofline, side, tables
from benchmarks.peers import peers_of
from benchmarks.problems import HOPPER_SHAPES, Problem, square, suite
from benchmarks.records import Record, SuiteResult
from benchmarks.results import Figure
from benchmarks.side import DIRECTIONS, Side, as_message
from benchmarks.summary import Summary

ABSENT = [f"{name}: ModuleNotFoundError: No module named 'x' [noop]" for name in ("fa4", "tokamax")]


def record(problem: Problem, peer: str, direction: str, tflops: float, backend: str = "") -> Record:
    seconds = Summary(1.0, 0.9, 1.1, 10)
    return Record(problem, peer, direction, seconds, "made up", tflops * 1e12, 1e9, backend=backend)


def as_wanted(share: float = 1.0, absent: tuple[str, ...] = ()) -> list[Record]:
    """Every target reached to a share, by peers as fast as elsewhere."""
    found = []
    for target in hopper_bars.TARGETS:
        for place, shape in enumerate(HOPPER_SHAPES):
            for variant in target.variants:
                problem = square(*shape, variant)
                rates = {"jflex-mosaic": share * target.wanted[place]} | {x: y[place] for x, y in target.peers.items()}
                found += [record(problem, peer, target.direction, rate) for peer, rate in rates.items()
                          if peer not in absent]  # fmt: skip
    return found


def result_of(found: list[Record], remarks: list[str] | None = None) -> SuiteResult:
    # Times follow from the rates: a record holds the FLOPs of a second.
    timed = [dataclasses.replace(x, flops=1e12, seconds=Summary(*([1e12 / x.flops] * 3), 10)) for x in found]
    about = {"remarks": remarks or [], "machine": {"device": "an H200"}, "date": "2026-11-21", "versions": {}}
    return SuiteResult("hopper", tuple(timed), about)


def test_every_target_has_problems_and_contestants():
    problems = suite("hopper")
    names = [peer.name for peer in peers_of("hopper")]
    for target in hopper_bars.TARGETS:
        for shape in HOPPER_SHAPES:
            assert {square(*shape, variant) for variant in target.variants} <= set(problems)
        assert set(target.peers) <= set(names)
    assert {x.S for x in suite("hopper_short")} == {256, 512, 1024, 2048, 4096}


def test_rates_as_asked_reach_every_bar_but_the_later_ones():
    figures = [x for x in hopper_bars.in_table(result_of(as_wanted())) if x]
    short = [figure.name for figure in figures if not figure.holds]
    assert len(figures) == 2 * (9 + 2 + 24 + 5)  # rows, later ones, peers, shares
    assert short == [f"backward {variant}, D {D}, then" for variant in ("causal", "noop") for D in (128, 64)]


def test_slower_kernels_fall_short_of_rates_and_peers_and_keep_their_shares():
    result = result_of(as_wanted(0.9))
    for target in hopper_bars.TARGETS:
        for place in (0, 1):
            found = hopper_bars.figures(result, target, place)
            assert [kind for kind, figure in found.items() if figure.holds] == ["share"] * ("share" in found)


def test_peers_that_are_absent_have_no_bar_and_others_that_are_missing_do():
    absent = ("fa4", "tokamax", "jax-cudnn")
    found = list(hopper_bars.in_table(result_of(as_wanted(absent=absent), ABSENT)))
    missing = [x for x in found if isinstance(x, str)]
    assert missing == [f"{direction} {variant}, D {D}, over jax.nn cuDNN: 1 of 1 are missing"
                       for direction in DIRECTIONS for variant in ("causal", "noop") for D in (128, 64)]  # fmt: skip


def test_grouped_heads_and_head_sizes_have_bars():
    found = as_wanted()
    for direction in DIRECTIONS:
        grouped = square(2, 8192, (32, 8), 128, "causal")
        found += [record(grouped, peer, direction, 600.0) for peer in ("jflex-mosaic", "jax-cudnn")]
        found += [record(square(2, 16384, 16, D, variant), "jflex-mosaic", direction, 500.0)
                  for D in (96, 192, 256) for variant in ("causal", "noop")]  # fmt: skip
    table = list(hopper_bars.in_table(result_of(found)))
    rest = [x for x in hopper_bars.hopper(result_of(found)) if x not in table]
    assert [figure.at_least for figure in rest] == [1.0, 1.0, 0.85, 0.85, None, 0.85, 0.85, None]
    assert rest[2].value == pytest.approx(500 / 690, rel=1e-3)


def test_the_report_shows_targets_in_a_table_and_not_twice(tmp_path: pathlib.Path, monkeypatch):
    result = result_of(as_wanted(0.99), ABSENT)
    records.write(tmp_path / bars.DEVICE, "hopper", result.records, {"title": "", "machine": {}, "remarks": ABSENT})
    monkeypatch.setattr(records.read, "__defaults__", (tmp_path,))
    monkeypatch.setattr(bars.readings, "__defaults__", (tmp_path,))
    text = report.block()
    assert "| forward causal, D 128 | 673 **(680)** |" in text
    assert "1.01 **(1.02)**" in text
    assert "Not installed there: tokamax Mosaic GPU, FlashAttention-4 CuTe." in text
    assert text.count("forward causal, D 128") == 1
    assert hopper_bars.table(result_of([])) == []


@pytest.mark.parametrize(("backend", "ratio"), [("triton", 1.0), ("mosaic_gpu", 0.8)])
def test_short_sequences_may_be_left_to_triton(backend: str, ratio: float):
    found = [record(problem, peer, direction, rate, backend if peer == "jflex" else "")
             for problem in suite("hopper_short") for direction in DIRECTIONS
             for peer, rate in (("jflex", 80.0), ("jflex-triton", 100.0))]  # fmt: skip
    result = dataclasses.replace(result_of(found), suite="hopper_short")
    chosen, named = list(hopper_bars.hopper_short(result))[:2]
    assert (chosen.value, chosen.holds, named) == (pytest.approx(ratio), ratio == 1.0, "")


class HalfBroken(Side):
    """One peer has no backward, and another nothing."""

    def start(self, problem):
        return {"work": dataclasses.asdict(roofline.work(problem, problem.T * problem.S)), "samples": {}}

    def build(self, peer, directions):
        if peer == "broken" or (peer == "forward-only" and "backward" in directions):
            raise ValueError(f"{peer} cannot")
        return {direction: lambda: None for direction in directions}

    compile_only = build
    wait = forget = lambda self, *arguments: None
    rates = queue_seconds = None

    def timed(self, call, runs):
        return [1.0] * runs, "made up"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_peer_that_fails_in_one_direction_keeps_the_other(ahead: bool):
    HalfBroken.__abstractmethods__ = frozenset()
    half = HalfBroken()
    peers = ["broken", "forward-only", "whole"]
    answer = half.prepare(as_message(suite("tiny")[0]), peers, DIRECTIONS, ahead)
    assert list(answer["ready"]) == peers[1:]
    assert {name: list(reasons) for name, reasons in answer["unable"].items()} == {
        "broken": list(DIRECTIONS), "forward-only": ["backward"]}  # fmt: skip
    if not ahead:
        assert half.measure("forward-only", "forward", 2)["seconds"] == [1.0, 1.0]
        assert "failed" in half.measure("forward-only", "backward", 2)


class Hanging:
    """A team whose Mosaic process is lost, and whose other JAX process answers."""

    def __init__(self, samples):
        self.jax, self.samples = HalfBroken(), samples

    def ask_each(self, method, seconds, arguments):
        answers = {"mosaic": {"failed": "the mosaic process was ended", "lost": True}} if "mosaic" in arguments else {}
        own = self.jax.prepare(**arguments["jax"]) | {"samples": self.samples, "backends": {"jflex": "triton"}}
        return answers | {"jax": own}

    def ask(self, library, method, seconds, **arguments):
        return getattr(self.jax, method)(**arguments)

    def ask_all(self, method, seconds):
        return {}


def test_a_contestant_that_hangs_leaves_the_others_their_times():
    run = attention.Run(Hanging({}), peers_of("hopper", ["jflex-mosaic", "jflex-triton"]), DIRECTIONS, 2, False)
    run.measure(square(1, 256, 2, 16, "causal"))
    assert {(x.peer, x.direction) for x in run.records} == {("jflex-triton", x) for x in DIRECTIONS}
    assert any(remark.startswith("mosaic: the mosaic process was ended") for remark in run.told())


def test_a_wrong_result_has_no_time():
    right, wrong = [[1.0, 2.0, 3.0]], [[1.0, 2.0, -3.0]]
    samples = {"jflex": {"forward": right, "backward": wrong}, "jax-cudnn": dict.fromkeys(DIRECTIONS, right)}
    run = attention.Run(Hanging(samples), peers_of("main", ["jflex", "jax-cudnn"]), DIRECTIONS, 2, False)
    run.measure(square(1, 256, 2, 16, "causal"))
    assert [(x.peer, x.direction) for x in run.records if x.peer == "jflex"] == [("jflex", "forward")]
    assert [x.backend for x in run.records if x.peer == "jflex"] == ["triton"]
    assert any("[backward: causal; " in remark for remark in run.told())
    assert agreement.doubts({"jflex": {"forward": [[math.nan]]}}) == {"jflex": {"forward": "array 0 is not finite"}}
    assert agreement.doubts({"jflex": {"forward": [[1.0]]}}) == {}


def test_values_of_another_size_are_computed_and_counted():
    problem = square(1, 256, 2, 32, "causal", Dv=16)
    half = jax_side.JaxSide()
    answer = half.prepare(as_message(problem), ["jflex", "jflex-triton"], DIRECTIONS)
    assert half._prepared["jflex"].calls["forward"]().shape == (1, 256, 2, 16)
    assert answer["backends"]["jflex"] == "xla"
    assert "UnsupportedError" in answer["unable"]["jflex-triton"]["forward"]
    assert [len(answer["samples"]["jflex"][x]) for x in DIRECTIONS] == [1, 3]
    visited = answer["work"]["visited"]
    assert answer["work"]["forward_flops"] == 2 * (32 + 16) * 2 * visited
    assert answer["work"]["backward_flops"] == 2 * (3 * 32 + 2 * 16) * 2 * visited
    assert "D 32, Dv 16" in problem.name
    assert problem.value_size == 16
    half.release()


def test_parts_of_a_suite_can_be_picked():
    words = ["--suite", "hopper", "--variants", "causal", "--head-size", "128", "--lengths", "16384", "--batches", "2",
             "--pass", "forward", "--peers", "jflex-mosaic"]  # fmt: skip
    plan = attention._plan("hopper", attention._options(words))
    assert [problem.name for problem in plan.problems] == ["causal; B 2, H 16, S 16384, D 128"]
    assert plan.directions == ("forward",)


def test_only_figures_and_words_are_found():
    assert all(isinstance(x, Figure | str) for x in hopper_bars.hopper(result_of([])))
    assert tables.sentences(result_of([], ABSENT)) == [
        "Not installed there: tokamax Mosaic GPU, FlashAttention-4 CuTe."
    ]
    assert side.DIRECTIONS == DIRECTIONS
