"""Limits of size and shape. A limit may only fall; a feature that needs more lines names its budget in its commit."""

import pytest

from tests.house import figures

LIMITS = {
    "library lines": 62636,
    "test lines": 47575,
    "benchmark lines": 8946,
    "library files over 400 lines": 2,
    "functions over 50 code lines": 4,
    "functions with more than 8 parameters": 35,
    "lines of overloads": 325,
    "uses of Any": 784,
    "fields of AttentionSpec": 34,
    "classes with score_operands": 11,
    "triton_here and .own": 25,
    "spec.route": 55,
    "library folders over 14 modules": 4,
    "largest tests folder": 30,
    "folders that import each other": 11,
    "particles as names": 460,
    "docstrings that begin with a fragment": 371,
    "Args entries of at most 3 words": 685,
    "class names used three times": 10,
    "patterns that choose tests by name": 194,
    "lines of README.md": 182,
    "lines of the longest page": 803,
    "paragraphs over 100 words": 17,
    "bullets over 60 words": 15,
}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_limit(name: str):
    assert figures.FIGURES[name]() <= LIMITS[name]
