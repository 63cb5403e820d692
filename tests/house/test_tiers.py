"""Tiers of tests: the marks that choose them, the tier of each row of a product; and which tests share a worker."""

import pathlib
import re
import tomllib

import pytest

from tests.support.rows import stays, tiers
from tests.support.workers import group_of

ROOT = pathlib.Path(__file__).parents[2]
BACKENDS = ["xla", pytest.param("triton", marks=pytest.mark.gpu), "interpreted"]


def rows_of(**options):
    """The rows of a test of three cases and three backends, with the names of their marks."""

    @tiers(**options)
    @pytest.mark.parametrize("case", ["a", "b", "c"])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test(case, backend):
        del case, backend

    (mark,) = test.pytestmark
    assert mark.args[0] == ["backend", "case"]
    return {row.id: [mark.name for mark in row.marks] for row in mark.args[1]}


def test_each_marker_is_documented_and_no_other_chooses_tests():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = [marker.partition(":")[0] for marker in options["markers"]]
    assert markers == ["gpu", "full", "long"]
    readme = (ROOT / "tests/README.md").read_text()
    assert all(f"| `{marker}` |" in readme for marker in markers)
    chosen = re.findall(r"-m (\w+)", (ROOT / ".ci/run").read_text())
    assert set(chosen) - {"venv", "flax_layers"} <= set(markers)


def test_rows_that_are_not_named_have_the_next_tier():
    rows = rows_of(default={"backend": "xla", "case": ["a", "b"]})
    assert [name for name, marks in rows.items() if not marks] == ["xla-a", "xla-b"]
    assert rows["xla-c"] == rows["interpreted-a"] == ["full"]
    assert rows["triton-a"] == ["gpu", "full"]
    rows = rows_of(default={"case": "a"}, full=[{"backend": "xla", "case": "b"}, {"backend": "xla", "case": "a"}])
    assert (rows["xla-a"], rows["xla-b"], rows["xla-c"]) == ([], ["full"], ["long"])
    assert rows_of(full={"case": "a"})["xla-b"] == []
    assert rows_of(full={"case": "a"}, rest="long")["xla-b"] == ["long"]


def test_rows_for_a_gpu_stay():
    assert [*rows_of(in_turns=True)] == ["xla-a", "xla-c", "triton-a", "triton-b", "triton-c", "interpreted-b"]
    assert [*rows_of(full={"backend": "xla"}, rest="gpu")] == [f"{x}-{y}" for x in ("xla", "triton") for y in "abc"]


def test_of_rows_without_a_name_one_in_a_share_stays():
    rows = rows_of(default={"backend": "xla", "case": "a"}, share=2)
    assert [name for name, marks in rows.items() if marks == ["full"]] == ["xla-b", "interpreted-a", "interpreted-c"]
    assert [name for name, marks in rows.items() if marks == ["long"]] == ["xla-c", "interpreted-b"]
    assert all(rows[f"triton-{case}"] == ["gpu", "full"] for case in "abc")


@pytest.mark.parametrize("share", [2, 3, 4])
@pytest.mark.parametrize("backends", [2, 3])
def test_rows_that_stay_meet_every_backend(backends, share):
    assert {number % backends for number in range(24) if stays(number, share)} == {*range(backends)}


def test_a_description_of_no_row_is_refused():
    with pytest.raises(ValueError, match=r"test has no row \{'case': 'd'\}"):
        rows_of(default={"case": "d"})


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/calls/test_forward.py::test_forward[xla-causal]", "causal"),
        ("tests/calls/test_backward.py::test_backward[triton-interpret-causal]", "causal"),
        ("tests/house/test_oracle.py::test_matches_oracle[causal]", "causal"),
        ("tests/house/test_oracle.py::test_names", "tests/house/test_oracle.py::test_names"),
        ("tests/masks/test_x.py::test_x[xla-16]", "tests/masks/test_x.py::test_x[xla-16]"),
        ("tests/serving/test_engine.py::test_tokens[int8]", "tests/serving"),
        ("tests/train/test_train.py::test_mesh[data=8]", "tests/train/test_train.py"),
    ],
)
def test_group(test, group):
    assert group_of(test) == group
