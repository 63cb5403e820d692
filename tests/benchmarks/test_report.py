"""Result files and the documents that are generated from them."""

import dataclasses
import itertools
import pathlib
import re
import shlex

import pytest

from benchmarks import __main__ as command
from benchmarks.peers.table import PEERS, by_library
from benchmarks.problems import Problem
from benchmarks.questions.question import QUESTIONS
from benchmarks.results import report, schema
from benchmarks.results.schema import Record, ResultFile, Summary
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
    found, result = [], ResultFile(name, (), ABOUT)
    for problem, direction in itertools.product(SUITES[name].problems, SUITES[name].directions):
        for peer in itertools.chain(*by_library(problem, tuple(PEERS.values())).values()):
            seconds = {"split": 1.0}.get(problem.form, 2.0) * (1.0 if peer == result.baseline else peers)
            found.append(record(problem, peer, direction, seconds, flops=1e12 * problem.D, moved=1e9))
    return dataclasses.replace(result, records=tuple(found))


def test_documents_show_what_the_result_files_hold():
    for path, text in report.documents().items():
        assert path.read_text() == text, "run `python -m benchmarks report`"
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
    assert back.speedup(result.problems[0], "forward", "torch-flex") == 2.0
    assert schema.merged(back.records, [result.records[0]]) == [*back.records[1:], result.records[0]]
    assert schema.read(tmp_path / "none.json") is None


def test_pages_show_suites_in_tables():
    results = {report.DEVICE: {name: made(name) for name in ("main", "short", "decode")}}
    text = report.page(results)
    assert "| noop; B 4, H 16, S 16384, D 64 | 64 / 64 |" in text
    assert "is 2.00 times as fast as torch FlexAttention in the geometric mean of" in text
    short = report.speed_table(results)
    # FlashAttention-4 is there if it was measured.
    assert "| causal, TFLOP/s forward / backward | 128 / 128 | 64 / 64 | 64 / 64 | 64 / 64 |" in short
    assert "µs | 1000000 | 2000000 | 2000000 |" in short
    about = {**ABOUT, "versions": {**ABOUT["versions"], "flashinfer-python": "0.6"}}
    results[report.DEVICE]["mixed"] = dataclasses.replace(made("mixed"), about=about)
    short = report.speed_table(results)
    assert "jax 1, torch 2, flashinfer-python 0.6, 2026" in short
    assert "keys, µs | 1000000 |  |  | 2000000 | 2000000 |" in short  # FlashInfer's column, and no row without a peer
    row = report.tables_of(results[report.DEVICE]["decode"])[0][1]
    assert row[1] == "1000000 µs, 0.00 TB/s"
    about = {**ABOUT, "remarks": ["torch-flex: ModuleNotFoundError: No module named 'torch' [everywhere]"]}
    absent = dataclasses.replace(results[report.DEVICE]["main"], about=about)
    assert report.sentences(absent)[-1] == "Not installed there: torch FlexAttention."
    assert "jflex mosaic_gpu: a jvp takes 1.00 to 1.00 forwards." in report.sentences(made("tangents"))


@pytest.mark.parametrize("words", documented())
def test_documented_commands(words: str):
    command.parse(shlex.split(words))
