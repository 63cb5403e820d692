"""Result files, targets and the documents that are generated from them."""

import dataclasses
import itertools
import pathlib
import re
import shlex

import pytest

from benchmarks import __main__ as command
from benchmarks import roofline
from benchmarks.peers.table import PEERS, by_library
from benchmarks.problems import Problem
from benchmarks.questions.question import QUESTIONS
from benchmarks.results import report, schema, targets
from benchmarks.results.schema import Record, ResultFile, Summary
from benchmarks.results.targets import DEVICE, FASTEST, PARTS, QuestionTarget, Target
from benchmarks.run.library_runner import DIRECTIONS
from benchmarks.suites import SUITES

FILES = sorted(schema.FOLDER.glob("*/*.json"))
# Results of commands that are gone; the commit in each file has its command.
RETIRED = {
    "block_mask", "demo_decode", "documents_compile", "long_masks", "mask_memory", "memory", "million_memory", "noop",
    "numerics", "paged_scaling", "streaming", "training_memory", "window",
}  # fmt: skip
ABOUT = {"title": "", "machine": {"device": "an H200"}, "remarks": [], "rates": {}, "date": "2026-11-21",
         "versions": {"python": "3", "jax": "1", "torch": "2"}}  # fmt: skip


def documented() -> list[str]:
    """Commands of the page and of the result files, those of earlier runs among them."""
    page = (schema.FOLDER.parent / "README.md").read_text()
    words = re.findall(r"python -m benchmarks ([^`\n|]+)", re.sub(r"[\[\]]|, or `--start`", "", page))
    abouts = [schema.read(path).about for path in FILES]
    runs = [run["command"] for about in abouts for run in (about, *about.get("before", []))]
    words += [x.removeprefix("python -m benchmarks ") for x in runs]
    return sorted(
        {x for x in words if x.split()[0] in command.COMMANDS and not (RETIRED - {"numerics"}) & {*x.split()}}
    )


def record(problem: Problem, peer: str, direction: str, seconds: float = 1.0, **more) -> Record:
    return Record("", Summary(seconds, seconds * 0.9, seconds * 1.1, 10), "s", problem, peer, direction, **more)


def made(name: str, peers: float = 2.0) -> ResultFile:
    """A suite in which the baseline takes a second, its peers `peers` ones, and other forms twice as long."""
    found, result, directions = [], ResultFile(name, (), ABOUT), ("forward",) if SUITES[name].served else DIRECTIONS
    for problem, direction in itertools.product(SUITES[name].problems, directions):
        for peer in itertools.chain(*by_library(problem, tuple(PEERS.values())).values()):
            seconds = {"split": 1.0}.get(problem.form, 2.0) * (1.0 if peer == result.baseline else peers)
            found.append(record(problem, peer, direction, seconds, flops=1e12 * problem.D, moved=1e9))
    return dataclasses.replace(result, records=tuple(found))


def test_documents_show_what_the_result_files_hold():
    for path, text in report.documents().items():
        assert path.read_text() == text, "run `python -m benchmarks report`"
    assert "target" not in report.speed_table(schema.read_all()).lower()
    with pytest.raises(ValueError, match="lacks the markers"):
        report.readme_with_table("# jflex", {})


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_result_file_says_how_it_was_made(path: pathlib.Path):
    result = schema.read(path)
    assert not {"title", "date", "command", "commit", "machine", "versions", "remarks"} - result.about.keys()
    assert result.records
    assert len({x.key for x in result.records}) == len(result.records)
    assert path.stem in SUITES or path.stem in {question.name for question in QUESTIONS} | RETIRED
    assert all((x.problem is not None) == (path.stem in SUITES) for x in result.records)


def test_a_result_file_holds_what_was_written(tmp_path):
    result, path = made("short"), tmp_path / "short.json"
    more = dataclasses.replace(result.records[0], queue=Summary(3.0, 2.0, 4.0, 5), backend="triton", method="again")
    schema.write(path, [more, *result.records[1:]], ABOUT)
    back = schema.read(path)
    assert list(back.records) == [more, *result.records[1:]]
    assert back.about["title"] == ""
    assert back.speedup(result.problems[0], "forward", "torch-flex") == 2.0
    assert schema.merged(back.records, [result.records[0]]) == [*back.records[1:], result.records[0]]
    assert schema.read(tmp_path / "none.json") is None


def test_every_target_is_reached_by_a_fast_jflex_and_none_by_a_slow_one():
    suites = {target.suite for target in targets.TARGETS}
    for peers, good in ((20.0, True), (0.01, False)):
        found = targets.outcomes({DEVICE: {name: made(name, peers) for name in suites}})
        over_peers = [x for x in found if x.value is not None and x.name.split(" over ")[-1].startswith("torch Flex")]
        assert len(over_peers) > 20
        assert all(x.reached == good for x in over_peers)
        assert not any(x.missing for x in found if x.file.split("/")[1] in SUITES)


def test_figures_of_targets():
    blocks, decode, mixed, rolling = made("blocks"), made("decode"), made("mixed"), made("streaming_llm")
    value = lambda result, *target, **more: targets.evaluate(Target(result.name, *target, **more), result).value
    assert value(blocks, "forward", {"form": "split"}, "speed", {"form": "partial"}, mean=True) == 2.0
    assert value(blocks, "backward", {"form": "split"}, "time", "torch-flex", at_most=1.0) == 0.5
    assert value(blocks, "forward", {"D": (64, 128), "form": "split"}, "TFLOP/s", None, at_least=1.0) == 64.0
    assert value(decode, "forward", {"lengths": "skewed"}, "TB/s", {"lengths": "even"}) == 1.0
    assert value(decode, "forward", {"S": 65536}, "speed", FASTEST) == 2.0
    assert value(decode, "forward", {"S": 65536}, "µs", None) == 1e6
    assert value(mixed, "forward", {"lengths": "mixed"}, "time", PARTS, at_most=1.1) == 0.5
    assert value(rolling, "forward", {}, "time", "jflex-rerotating", at_most=1.0) == 0.5
    named = Target("streaming_llm", "forward", {}, "time", "jflex-rerotating", at_most=1.0, peer="jflex-raw-keys")
    outcome = targets.evaluate(named, rolling)
    assert (outcome.value, outcome.name) == (
        1.0,
        "forward, jflex, raw keys rotated as loaded: time over jflex, all keys rotated by XLA before, worst of 8",
    )
    for backend, ratio in (("triton", 1.0), ("mosaic_gpu", 0.8)):  # the kernels of Triton are as fast as themselves
        found = [record(problem, "jflex-triton", "forward", 0.8) for problem in SUITES["hopper_short"].problems]
        found += [record(x.problem, "jflex", "forward", backend=backend) for x in found]
        result = ResultFile("hopper_short", tuple(found), ABOUT)
        assert value(result, "forward", {}, "speed", "jflex-triton", at_least=1.0) == pytest.approx(ratio)


def test_what_is_missing_or_not_installed():
    target = Target("main", "forward", {}, "speed", "torch-flex", at_least=1.0)
    full = made("main")
    found = targets.evaluate(target, dataclasses.replace(full, records=full.records[4:]))
    assert (found.value, found.reached, found.missing) == (None, False, "1 of 21 are missing")
    assert targets.evaluate(target, None).missing == "h200/main.json is missing"
    about = {**ABOUT, "remarks": ["torch-flex: ModuleNotFoundError: No module named 'torch' [everywhere]"]}
    absent = dataclasses.replace(full, about=about)
    assert not [x for x in targets.outcomes({DEVICE: {"main": absent}}) if x.file == "h200/main"]
    assert report.sentences(absent)[-1] == "Not installed there: torch FlexAttention."


def test_every_target_selects_problems_and_measured_peers():
    for target in targets.TARGETS:
        problems = [x for x in SUITES[target.suite].problems if targets.matches(x, target.select)]
        assert problems
        assert not isinstance(target.over, str) or target.over in (*SUITES[target.suite].peers, FASTEST, PARTS)
        if isinstance(target.over, dict):
            assert all(dataclasses.replace(x, **target.over) in SUITES[target.suite].problems for x in problems)


def test_targets_of_questions_are_limits_of_their_records(monkeypatch):
    monkeypatch.setattr(targets, "QUESTION_TARGETS", [QuestionTarget("cpu", "window", "forward, *", at_least=8.0)])
    result = ResultFile("window", (Record.single("forward, times faster", 7.9, "x"),), ABOUT)
    [found] = [x for x in targets.outcomes({"cpu": {"window": result}}) if x.file == "cpu/window"]
    assert (found.value, found.reached) == (7.9, False)
    assert report.limit(found) == "at least 8: **missed**"
    assert all(x.missing for x in targets.outcomes({}))


def test_pages_show_suites_in_tables():
    results = {DEVICE: {name: made(name) for name in ("main", "short", "decode")}}
    text = report.page(results)
    assert "| noop; B 4, H 16, S 16384, D 64 | 64 / 64 |" in text
    assert "| h200/main | forward: speed over torch FlexAttention, geometric mean of 21 | 2 x | at least 1 |" in text
    assert "is 2.00 times as fast as torch FlexAttention in the geometric mean of" in text
    short = report.speed_table(results)
    assert "| causal, backward, TFLOP/s | 128 | 64 | 64 | 64 |" in short  # FlashAttention-4 is there if it was measured
    assert "µs | 1000000 | 2000000 | 2000000 |" in short
    row = report.tables_of(results[DEVICE]["decode"])[0][1]
    assert row[1] == "1000000 µs, 0.00 TB/s"


def test_records_named_by_row_and_column_become_a_table():
    records = [Record.single(x, n, "dB") for n, x in enumerate(("a: one", "a: two", "b: two"))]
    assert report.question_tables("eight_bits", records) == [
        [["", "one", "two"], ["a", "0 dB", "1 dB"], ["b", "", "2 dB"]]
    ]
    values = {"one GPU: time": 2.0, "2 GPUs, ring: time": 1.0, "2 GPUs, ring: speed-up": 2.0, "alone: sent": 3}
    records = tuple(Record.single(name, value, "u") for name, value in values.items())
    text = report.page({DEVICE: {"context": ResultFile("context", records, ABOUT)}})
    assert "|  | time | speed-up |\n|---|---|---|\n| one GPU | 2 u |  |\n| 2 GPUs, ring | 1 u | 2 u |\n" in text
    assert "|  | measured |\n|---|---|\n| alone: sent | 3 u |\n" in text


def test_the_roof_is_the_best_rate_of_the_run():
    rates = {"jax": {"copy_bytes": 4e12, "matmul_flops": 8e14}, "torch": {"copy_bytes": 3e12, "matmul_flops": 7e14}}
    [problem] = [x for x in SUITES["paged"].problems if x.page == 64]
    work = roofline.served_work(problem)
    one = record(problem, "jflex", "forward", 1e-4, flops=work.forward_flops, moved=work.forward_bytes)
    result = ResultFile("paged", (one,), {**ABOUT, "rates": rates})
    assert report.tables_of(result)[0][1][1] == "100 µs, 5.37 TB/s, 134%"


def test_commands(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    told = capsys.readouterr().out.split()
    assert all(name in told for name in command.COMMANDS)
    monkeypatch.setattr(schema, "read_all", dict)
    with pytest.raises(SystemExit) as ended:
        command.main(["report", "--targets"])
    assert ended.value.code == 1
    assert "missing: h200/main.json is missing" in capsys.readouterr().out


@pytest.mark.parametrize("words", documented())
def test_documented_commands(words: str):
    command.parse(shlex.split(words))


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.results import plots

    for name, count in (("blocks", 1), ("captured", 1), ("pair_bias", 0)):
        assert len(plots.draw(made(name), tmp_path)) == count
