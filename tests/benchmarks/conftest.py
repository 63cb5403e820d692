"""Marks the tests of the benchmarks: those without a mark are of the tier `full`."""

import pathlib

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents and not item.get_closest_marker("long"):
            item.add_marker("full")
