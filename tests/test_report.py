"""The README's figures are those of the committed result files."""

import json
import pathlib

import pytest

from benchmarks import records, report, results
from benchmarks.problems import SUITES
from benchmarks.results import Figure

RESULTS = sorted(results.FOLDER.glob("*/*.json"))


def test_documents_show_what_the_result_files_hold():
    for path, text in report.documents().items():
        assert path.read_text() == text, "run `python -m benchmarks.report`"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_result_file_says_how_it_was_made(path: pathlib.Path):
    content = json.loads(path.read_text())
    assert not {"title", "date", "command", "machine", "versions", "remarks"} - content.keys()
    if "records" in content:
        assert records.read(path.parent.name, path.stem).records
        assert path.stem in SUITES
    else:
        assert report.read(path.parent.name, path.stem)["figures"]
        assert path.stem in (report.CPU if path.parent.name == "cpu" else report.GPU)


def test_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        report.readme_with_block("# jflex")


@pytest.mark.parametrize(
    ("figure", "holds"),
    [
        (Figure("", 8.0, "x"), None),
        (Figure("", 8.0, "x", at_least=8.0), True),
        (Figure("", 7.9, "x", at_least=8.0), False),
        (Figure("", 1.3, "x", at_most=1.3), True),
        (Figure("", 1.4, "x", at_most=1.3), False),
    ],
)
def test_bars(figure: Figure, holds: bool | None):
    assert figure.holds is holds
    assert ("fell short" in report._bar(figure)) == (holds is False)
