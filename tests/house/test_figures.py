"""Limits of size and shape. A limit may only fall; a feature that needs more lines names its budget in its commit."""

import pytest

from tests.house import figures

LIMITS = {
    "library lines": 60309,
    "test lines": 42677,
    "benchmark lines": 5986,
    "library files over 400 lines": 0,
    "functions over 50 code lines": 0,
    "functions with more than 8 parameters": 13,
    "lines of overloads": 108,
    "uses of Any": 286,
    "fields of AttentionSpec": 7,
    "classes with score_operands": 3,
    "triton_here and .own": 0,
    "spec.route": 1,
    "library folders over 14 modules": 0,
    "largest tests folder": 30,
    "folders that import each other": 0,
    "particles as names": 2,
    "docstrings that begin with a fragment": 0,
    "Args entries of at most 3 words": 23,
    "class names used three times": 1,
    "patterns that choose tests by name": 0,
    "lines of README.md": 136,
    "lines of the longest page": 136,
    "paragraphs over 100 words": 0,
    "bullets over 60 words": 0,
}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_limit(name: str):
    assert figures.FIGURES[name]() <= LIMITS[name]
